"""The device's part: photographs in, feature maps and frames out, as a vision model would leave them.

Everything is computed and left on the device in the layout that convolutions work in (channels before
rows). `deliver` is the part that the demo is about.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

import hostward as hw
from hostward.demo._gabor import Bank, filters, gaussian
from hostward.demo._photos import Photos
from hostward.errors import OptionError

# What `deliver` does, spelled out for the reader; a test runs these lines beside it.
LINES = """\
arrays = hw.to_numpy(
    {"features": features.permute(0, 2, 3, 1),  # channels last: the transpose runs on the device
     "frames": frames.permute(0, 2, 3, 1)},
    dtype="float16",                            # the features, narrowed there too; uint8 frames stay as they are
)
stats = hw.to_python(stats)                     # plain Python numbers, all in one go
"""

COLOURS = 3  # opponent colour maps behind the energy maps: light, red - green, blue - yellow

_REC_601 = (0.299, 0.587, 0.114)  # luminance of R, G, B
_FAINT = 0.01  # energy, as a share of full contrast, that counts as texture
_BYTES_PER_COPY = 600 << 20  # on the device at the peak, for one set of the photographs, rounded up
_MOST_COPIES = 8  # 240 MB of features: long enough to time, short enough to wait for


@dataclass(frozen=True, slots=True)
class Maps:
    """What stands on the device.

    Parameters
    ----------
    features
        float32, shape ``(n, channels, height, width)``: log energy of every filter pair, then `COLOURS` maps.
    frames
        uint8, shape ``(n, 3, height, width)``: the energy, coloured by orientation.
    stats
        Per photograph, by name: tensors of a few numbers.
    """

    features: Tensor
    frames: Tensor
    stats: dict[str, dict[str, Tensor]]

    def tree(self) -> dict[str, Tensor]:
        """Return the maps as they are wanted, channels last: views, nothing moves yet."""
        return {"features": self.features.permute(0, 2, 3, 1), "frames": self.frames.permute(0, 2, 3, 1)}


def deliver(maps: Maps) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Bring the maps to the host.

    Returns
    -------
    arrays, numbers
        C-contiguous arrays of one's own, ``features`` narrowed to float16; and the stats as plain numbers.
    """
    arrays = hw.to_numpy(maps.tree(), dtype="float16")
    numbers = hw.to_python(maps.stats)
    return arrays, numbers


def pick_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises
    ------
    OptionError
        Another name, or a device that is not there.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise OptionError("unknown value for --device", got=repr(name), needed="auto, cpu, cuda or cuda:N")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not found):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or (torch.cuda.current_device() if found else 0))
    if index < found:
        return torch.device("cuda", index)
    raise OptionError(
        f"there is no device {name}",
        got=f"{found} CUDA device{'' if found == 1 else 's'}",
        why="torch sees no more" if found else _why_no_cuda(),
        do="--device auto takes what there is, --device cpu needs no GPU",
    )


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for the CPU only"
    return f"torch {torch.__version__} is built for GPUs, but finds no driver or no device"


def copies_for(device: torch.device) -> int:
    """Return how many times to stack the photographs: once on the CPU, else what fits easily and can be timed."""
    if device.type == "cpu":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(_MOST_COPIES, free // 2 // _BYTES_PER_COPY))


@torch.no_grad()
def compute(photos: Photos, bank: Bank, device: torch.device, copies: int = 1) -> Maps:
    """Run the filter bank over the photographs, stacked `copies` times.

    Notes
    -----
    Queued on the current stream of `device`; on a GPU the call returns before the maps are there.
    """
    pixels = torch.from_numpy(photos.pixels).to(device).repeat(copies, 1, 1, 1)
    rgb = pixels.permute(0, 3, 1, 2).float() / 255
    red, green, blue = rgb.unbind(1)
    light = red * _REC_601[0] + green * _REC_601[1] + blue * _REC_601[2]
    energy = [_energy(light, bank, wavelength) for wavelength in bank.wavelengths]
    texture = [
        _blurred(each, max(2.0, wavelength / 2)) for each, wavelength in zip(energy, bank.wavelengths, strict=True)
    ]
    colours = _blurred(torch.stack([light, red - green, blue - (red + green) / 2], dim=1), 1.5)
    features = torch.cat([*(each.div_(_FAINT).log1p_() for each in texture), colours], dim=1)
    stats = {name: _stats([each[i] for each in energy], bank) for i, name in enumerate(photos.names)}
    return Maps(features, _frames(energy, bank), stats)


def _energy(light: Tensor, bank: Bank, wavelength: float) -> Tensor:
    """``(n, height, width)`` -> ``(n, orientations, height, width)``."""
    weights = torch.from_numpy(filters(bank, wavelength)).to(light.device)[:, None]
    radius = weights.shape[-1] // 2
    waves = functional.conv2d(functional.pad(light[:, None], (radius,) * 4, mode="reflect"), weights)
    pairs = waves.view(len(light), bank.orientations, 2, *light.shape[1:])
    return pairs.square().sum(dim=2).sqrt()


def _blurred(maps: Tensor, sigma: float) -> Tensor:
    """Blur every map by a Gaussian, rows and columns in turn."""
    window = torch.from_numpy(gaussian(sigma)).to(maps.device)
    radius = len(window) // 2
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    flat = functional.conv2d(functional.pad(flat, (radius, radius, 0, 0), mode="reflect"), window.view(1, 1, 1, -1))
    flat = functional.conv2d(functional.pad(flat, (0, 0, radius, radius), mode="reflect"), window.view(1, 1, -1, 1))
    return flat.reshape(maps.shape)


def _frames(energy: list[Tensor], bank: Bank) -> Tensor:
    """Draw orientation as hue, how clear it is as saturation, and energy as brightness; uint8, channels first."""
    finest = bank.wavelengths[0]
    total = sum((e * (finest / w) ** 0.5 for e, w in zip(energy, bank.wavelengths, strict=True)), torch.tensor(0.0))
    doubled = torch.from_numpy(2 * bank.angles).float().to(total.device)  # 0 and 180 degrees are one orientation
    near = _blurred(total, 1.5)
    x, y = (near * doubled.cos()[:, None, None]).sum(1), (near * doubled.sin()[:, None, None]).sum(1)
    clear = (1.8 * torch.hypot(x, y) / (near.sum(1) + _FAINT)).clamp(0, 1)[:, None]
    hue = _hue(torch.atan2(y, x)).transpose(0, 1)
    bright = _blurred(total.sum(1), 0.7)
    strong = 2 * bright.square().mean(dim=(1, 2), keepdim=True).sqrt()
    bright = (bright / strong).clamp(0, 1)[:, None] ** 0.65
    paper = torch.tensor([0.05, 0.06, 0.09], device=total.device)[:, None, None]
    ink = clear * hue + (1 - clear) * 0.85
    return ((paper + (1 - paper) * bright * ink).clamp(0, 1) * 255).round().to(torch.uint8)


def _hue(doubled_angle: Tensor) -> Tensor:
    """Return the colour of an orientation, 0 to 1, shape ``(3, *angle)``; a full turn is one cycle of hues."""
    thirds = [channel * (2 * math.pi / 3) for channel in range(3)]
    return torch.stack([0.15 + 0.85 * (0.5 + 0.5 * torch.cos(doubled_angle - third)) for third in thirds])


def legend(bank: Bank) -> NDArray[np.uint8]:
    """Return the colour of each orientation of the bank, uint8, shape ``(orientations, 3)``."""
    hues = _hue(torch.from_numpy(2 * bank.angles))
    colours: NDArray[np.uint8] = (hues.T * 255).round().to(torch.uint8).numpy()
    return colours


def _stats(energy: list[Tensor], bank: Bank) -> dict[str, Tensor]:
    by_orientation = torch.stack([each.mean(dim=(1, 2)) for each in energy])
    strongest = by_orientation.sum(0).argmax()
    return {
        "mean_energy": by_orientation.mean(),
        "mean_energy_by_wavelength": by_orientation.mean(1),
        # edges run across the wave
        "strongest_edges_deg": (strongest * (180.0 / bank.orientations) + 90) % 180,
    }
