"""The picture: a row per photograph, with its Gabor energy and its segments beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL import Image

_PAPER = (14, 16, 22)
_TITLE = (236, 239, 244)
_QUIET = (148, 156, 172)
_MARGIN, _GAP, _HEAD, _CAPTION = 28, 14, 78, 40


def segmented(photo: NDArray[np.uint8], labels: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Tint each segment with its mean colour and draw the borders between segments.

    Parameters
    ----------
    photo
        uint8, shape ``(height, width, 3)``.
    labels
        Shape ``(height, width)``, 0 to `k` - 1.

    Returns
    -------
    ndarray of uint8, shape ``(height, width, 3)``, own
    """
    flat = labels.ravel()
    counts = np.bincount(flat)
    sums = np.stack([np.bincount(flat, weights=photo[..., channel].ravel()) for channel in range(3)], axis=1)
    means = sums / np.maximum(counts, 1)[:, None]
    painted: NDArray[np.float64] = 0.25 * photo + 0.75 * means[labels]
    painted[borders(labels)] = 255
    return painted.round().astype(np.uint8)


def borders(labels: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Mark each pixel whose neighbour to the left or above has another label."""
    marked = np.zeros(labels.shape, bool)
    marked[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    marked[1:] |= labels[1:] != labels[:-1]
    return marked


def sheet(
    photos: NDArray[np.uint8],
    frames: NDArray[np.uint8],
    labels: NDArray[np.integer],
    *,
    legend: NDArray[np.uint8],
    title: str,
    captions: Sequence[str],
) -> Image.Image:
    """Lay photographs, frames and segments out side by side.

    Parameters
    ----------
    photos, frames
        uint8, shape ``(n, height, width, 3)``.
    labels
        Shape ``(n, height, width)``.
    legend
        uint8, shape ``(orientations, 3)``: the colour of each orientation of the bank.
    title, captions
        A line on top, and one for each of the three columns.
    """
    from PIL import Image, ImageDraw

    n, height, width, _ = photos.shape
    size = (2 * _MARGIN + 3 * width + 2 * _GAP, _HEAD + n * (height + _GAP) - _GAP + _CAPTION + _MARGIN)
    image = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN, _HEAD / 2), title, fill=_TITLE, anchor="lm", font_size=30)
    left = [_MARGIN + column * (width + _GAP) for column in range(3)]
    for row in range(n):
        top = _HEAD + row * (height + _GAP)
        panels = (photos[row], frames[row], segmented(photos[row], labels[row]))
        for x, panel in zip(left, panels, strict=True):
            image.paste(Image.fromarray(panel), (x, top))
    baseline = size[1] - _MARGIN - _CAPTION / 2 + 8
    for x, caption in zip(left, captions, strict=True):
        draw.text((x, baseline), caption, fill=_QUIET, anchor="lm", font_size=19)
    strokes = _legend(legend)
    image.paste(strokes, (left[1] + width - strokes.width, round(baseline - strokes.height / 2)))
    return image


def _legend(colours: NDArray[np.uint8]) -> Image.Image:
    """Draw one stroke per orientation, along the edge that the filter answers to."""
    from PIL import Image, ImageDraw

    step, fine = 26, 4  # drawn larger and shrunk, for smooth strokes
    image = Image.new("RGB", (len(colours) * step * fine, step * fine), _PAPER)
    draw = ImageDraw.Draw(image)
    for i, colour in enumerate(colours):
        angle = math.pi * i / len(colours) + math.pi / 2  # the edge runs across the wave
        x, y, reach = (i + 0.5) * step * fine, step * fine / 2, 10 * fine
        dx, dy = reach * math.cos(angle), reach * math.sin(angle)
        draw.line((x - dx, y - dy, x + dx, y + dy), fill=tuple(int(c) for c in colour), width=4 * fine)
    return image.resize((len(colours) * step, step), Image.Resampling.LANCZOS)
