"""The demo from end to end: photographs -> device -> host -> scikit-learn -> files."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import hostward as hw
from hostward.demo import _compare, _maps, _photos, _picture, _segment
from hostward.demo._gabor import Bank
from hostward.errors import OptionError

CAPTIONS = (
    "photograph",
    "Gabor energy, coloured by the edges' orientation",
    "segments: texture and colour, clustered",
)


@dataclass(frozen=True, slots=True)
class Piece:
    """One array that came back: where it stands in the tree, what it was and what it is."""

    path: str
    device_shape: tuple[int, ...]
    device_dtype: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What the demo did.

    Parameters
    ----------
    versions
        Of hostward and what it ran on.
    device, device_name
        ``cpu`` or ``cuda:0``, and the GPU's name.
    link_crossed
        Whether bytes went from a GPU to the host. Without that no time means anything.
    copies
        How many times the photographs were stacked on the device.
    pieces, plan
        What moved, and how (the text of `hostward.explain`).
    same_bytes
        Whether every other way gave the same bytes.
    timings
        One for each way, hostward's first; empty where no link was crossed.
    first_s
        How long the demo's own delivery took, the first of the process; ``None`` where no link was crossed.
    numbers
        The stats, as plain numbers, per photograph.
    segments, variance_kept
        Pixels of each segment, per photograph; share of the variance that was clustered.
    files
        Written, in order.
    seconds
        All of it.
    """

    versions: dict[str, str]
    device: str
    device_name: str
    link_crossed: bool
    copies: int
    pieces: tuple[Piece, ...]
    plan: str
    same_bytes: bool
    timings: tuple[_compare.Timing, ...]
    first_s: float | None
    numbers: dict[str, dict[str, Any]]
    segments: dict[str, tuple[int, ...]]
    variance_kept: dict[str, float]
    files: tuple[Path, ...]
    seconds: float


def run(folder: Path, device: str = "auto", on_step: Callable[[str], None] = lambda _: None) -> Result:
    """Run the demo.

    Parameters
    ----------
    folder
        Where the files go; made if it is not there. Files of an earlier run are overwritten, others untouched.
    device
        ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
    on_step
        Called with a description when each of the `hostward.demo.STEPS` steps begins.

    Raises
    ------
    OptionError
        There is no such device, or `folder` cannot be written to.
    """
    began = time.perf_counter()
    where = _maps.pick_device(device)
    check_folder(folder)

    on_step("loading the photographs")
    loaded = _photos.load()
    bank = Bank()
    copies = _maps.copies_for(where)

    on_step(f"{bank.channels} Gabor filter pairs on {where}")
    made = _maps.compute(loaded, bank, where, copies)
    settle = _settle(where)
    settle()

    on_step("to NumPy")
    tree = made.tree()
    plan = str(hw.explain(tree, dtype="float16"))
    start = time.perf_counter()
    arrays, numbers = _maps.deliver(made)
    first_s = time.perf_counter() - start

    on_step("the same in other ways, for the bytes")
    others = _compare.ways(made)
    same = all(_compare.same_bytes(arrays, call()) for way, call in others.items() if way != _compare.HOSTWARD)
    crossed = where.type != "cpu"
    timings = tuple(_compare.measure(way, call, settle) for way, call in others.items()) if crossed else ()

    on_step("scikit-learn: segments")
    first = len(loaded.names)  # the copies behind them are the same photographs
    found = [_segment.segment(features, colours=_maps.COLOURS) for features in arrays["features"][:first]]
    labels = np.stack([each.labels for each in found])

    on_step("writing arrays")
    keep = {"features": arrays["features"][:first], "frames": arrays["frames"][:first], "labels": labels}
    files = [folder / f"{name}.npy" for name in keep] + [folder / "segments.png"]
    try:
        for path, array in zip(files, keep.values(), strict=False):
            np.save(path, array)
        on_step("drawing the picture")
        name = device_name(where)
        title = f"hostward demo: texture from {name}, segments from scikit-learn"
        sheet = _picture.sheet(
            loaded.pixels, keep["frames"], labels, legend=_maps.legend(bank), title=title, captions=CAPTIONS
        )
        sheet.save(files[-1])
    except OSError as error:
        raise _not_writable(folder, error) from error

    return Result(
        versions=_versions(),
        device=str(where),
        device_name=name,
        link_crossed=crossed,
        copies=copies,
        pieces=(_piece("features", made.features, arrays), _piece("frames", made.frames, arrays)),
        plan=plan,
        same_bytes=same,
        timings=timings,
        first_s=first_s if crossed else None,
        numbers=numbers,
        segments={name: each.pixels for name, each in zip(loaded.names, found, strict=True)},
        variance_kept={name: each.variance_kept for name, each in zip(loaded.names, found, strict=True)},
        files=tuple(files),
        seconds=time.perf_counter() - began,
    )


def check_folder(folder: Path) -> None:
    """Make the folder and try a file in it, before any work is done.

    Raises
    ------
    OptionError
        It cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError as error:
        raise _not_writable(folder, NotADirectoryError(error.errno, "it is a file, not a folder")) from error
    except OSError as error:
        raise _not_writable(folder, error) from error


def _not_writable(folder: Path, error: OSError) -> OptionError:
    return OptionError(
        "cannot write the output files",
        got=f"folder {str(folder)!r}",
        why=error.strerror or str(error),
        do="name a folder you can write to: hostward demo --out DIR",
    )


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or ``the CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def _versions() -> dict[str, str]:
    found = {"hostward": hw.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return found | {name: version(name) for name in ("numpy", "scikit-learn")}


def _settle(device: torch.device) -> Callable[[], None]:
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _piece(name: str, source: torch.Tensor, arrays: dict[str, NDArray[Any]]) -> Piece:
    array = arrays[name]
    return Piece(
        path=f"[{name!r}]",
        device_shape=tuple(source.shape),
        device_dtype=str(source.dtype).removeprefix("torch."),
        shape=array.shape,
        dtype=str(array.dtype),
        nbytes=array.nbytes,
    )
