"""A bank of Gabor filters, by formula: what a photograph looks like to the first stage of vision.

A Gabor filter is a wave under a Gaussian window. It answers to one orientation at one scale. The even
(cosine) and the odd (sine) filter of a pair answer to lines and to edges; the root of their summed
squares, the *energy*, answers to both and does not care where in the wave a pixel lies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The window's width for a bandwidth of one octave: sigma / wavelength = sqrt(ln 2 / 2) / pi * (2 + 1) / (2 - 1).
# Source: Petkov and Kruizinga, "Computational models of visual neurons", Biological Cybernetics 76, 1997.
_SIGMA_PER_WAVELENGTH = math.sqrt(math.log(2) / 2) / math.pi * 3
_ASPECT = 0.7  # window: width across the wave / width along its crests
_REACH = 2.5  # window is cut after so many sigma


@dataclass(frozen=True, slots=True)
class Bank:
    """Which filters: every orientation at every wavelength.

    Parameters
    ----------
    wavelengths
        In pixels, finest first.
    orientations
        How many, evenly spread over 180 degrees; the first one answers to vertical edges.
    """

    wavelengths: tuple[float, ...] = (3.5, 7.0, 14.0)
    orientations: int = 8

    @property
    def angles(self) -> NDArray[np.float64]:
        """The wave's direction per orientation, in radians from the x axis; edges run across it."""
        return np.arange(self.orientations, dtype=np.float64) * (math.pi / self.orientations)

    @property
    def channels(self) -> int:
        """Energy maps per photograph."""
        return len(self.wavelengths) * self.orientations


def filters(bank: Bank, wavelength: float) -> NDArray[np.float32]:
    """Return the filters of one wavelength.

    Returns
    -------
    ndarray of float32, shape ``(2 * orientations, size, size)``, own
        Even and odd filter of the first orientation, of the second, and so on. `size` is odd. Every filter
        sums to zero, so a plain area gives none; a wave of its own kind with amplitude 1 gives an energy of about 1.
    """
    across = _SIGMA_PER_WAVELENGTH * wavelength
    along = across / _ASPECT
    radius = math.ceil(_REACH * along)
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1].astype(np.float64)
    pairs = []
    for angle in bank.angles:
        u = x * math.cos(angle) + y * math.sin(angle)
        v = y * math.cos(angle) - x * math.sin(angle)
        window = np.exp(-0.5 * ((u / across) ** 2 + (v / along) ** 2))
        window /= window.sum()
        phase = 2 * math.pi * u / wavelength
        even = np.cos(phase)
        even -= (window * even).sum()  # a cut-off cosine has a mean, which would answer to plain light
        pairs += [2 * window * even, 2 * window * np.sin(phase)]
    return np.stack(pairs).astype(np.float32)


def gaussian(sigma: float) -> NDArray[np.float32]:
    """Return a one-dimensional Gaussian of odd length that sums to one."""
    radius = math.ceil(3 * sigma)
    t = np.arange(-radius, radius + 1) / sigma
    window = np.exp(-0.5 * t * t)
    normed: NDArray[np.float32] = (window / window.sum()).astype(np.float32)
    return normed
