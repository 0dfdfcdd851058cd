"""The photographs: those that scikit-learn ships, so the demo downloads nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Photos:
    """Photographs of one size.

    Parameters
    ----------
    names
        File names without their ending.
    pixels
        uint8, shape ``(photographs, height, width, 3)``, RGB.
    """

    names: tuple[str, ...]
    pixels: NDArray[np.uint8]


def load() -> Photos:
    """Load the photographs that come with scikit-learn (a temple in China, a dahlia)."""
    from sklearn.datasets import load_sample_images

    found = load_sample_images()
    names = tuple(str(name).replace("\\", "/").rsplit("/", 1)[-1].rsplit(".", 1)[0] for name in found.filenames)
    return Photos(names, np.stack(found.images))
