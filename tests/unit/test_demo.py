"""The demo: its parts against what they promise, and the whole of it as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")
Image = pytest.importorskip("PIL.Image")

import hostward as hw  # noqa: E402
from hostward._cli import demo as command  # noqa: E402
from hostward._cli import main  # noqa: E402
from hostward._cli._console import make_console  # noqa: E402
from hostward.demo import STEPS, _compare, _maps, _picture, _segment  # noqa: E402
from hostward.demo._gabor import Bank, filters, gaussian  # noqa: E402
from hostward.demo._photos import Photos, load  # noqa: E402
from hostward.demo._run import Piece, Result, run  # noqa: E402
from hostward.errors import OptionError  # noqa: E402

if TYPE_CHECKING:
    from device.frame import Device

SRC = Path(hw.__file__).resolve().parents[1]
# The package under test, also where it is not installed and the folder is another.
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}
HEIGHT, WIDTH = 427, 640
FILES = ("features.npy", "frames.npy", "labels.npy", "segments.png")


def stripes(angle_deg: float, wavelength: float, size: int = 96) -> Photos:
    """One grey photograph whose light runs as a wave along `angle_deg`."""
    y, x = np.mgrid[:size, :size]
    along = x * np.cos(np.radians(angle_deg)) + y * np.sin(np.radians(angle_deg))
    grey = (127.5 + 120 * np.sin(2 * np.pi * along / wavelength)).astype(np.uint8)
    return Photos(("stripes",), np.repeat(grey[None, ..., None], 3, axis=-1))


# -- the bank


@pytest.mark.parametrize("wavelength", Bank().wavelengths)
def test_filters_are_even_and_odd_and_see_no_plain_light(wavelength: float) -> None:
    bank = Bank()
    bank_of_one = filters(bank, wavelength)
    assert bank_of_one.dtype == np.float32
    assert bank_of_one.shape[0] == 2 * bank.orientations
    assert bank_of_one.shape[1] == bank_of_one.shape[2]
    assert bank_of_one.shape[1] % 2 == 1
    np.testing.assert_allclose(bank_of_one.sum(axis=(1, 2)), 0, atol=1e-5)
    turned = bank_of_one[:, ::-1, ::-1]
    np.testing.assert_allclose(bank_of_one[0::2], turned[0::2], atol=1e-7)
    np.testing.assert_allclose(bank_of_one[1::2], -turned[1::2], atol=1e-7)


@pytest.mark.parametrize("phase", [0.0, 0.7, 1.9])
def test_energy_of_a_filters_own_wave_is_one_whatever_its_phase(phase: float) -> None:
    bank = Bank()
    for wavelength in bank.wavelengths:
        pair = filters(bank, wavelength)
        radius = pair.shape[1] // 2
        y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
        for i, angle in enumerate(bank.angles):
            wave = np.cos(2 * np.pi * (x * np.cos(angle) + y * np.sin(angle)) / wavelength + phase)
            energy = np.hypot(*(pair.reshape(bank.orientations, 2, -1) @ wave.ravel()).T)
            assert energy[i] == pytest.approx(1, abs=0.04)
            assert energy.argmax() == i
            assert energy[(i + bank.orientations // 2) % bank.orientations] < 0.1  # the wave at right angles


def test_gaussian_is_a_weighted_mean() -> None:
    window = gaussian(2.0)
    assert window.sum() == pytest.approx(1)
    assert len(window) % 2 == 1
    np.testing.assert_array_equal(window, window[::-1])


# -- the device's part


@pytest.mark.parametrize(("angle", "edges"), [(0, 90), (22.5, 112.5), (90, 0), (135, 45)])
def test_maps_find_the_orientation(angle: float, edges: float) -> None:
    made = _maps.compute(stripes(angle, 7.0), Bank(), torch.device("cpu"))
    numbers = made.stats["stripes"]
    assert numbers["strongest_edges_deg"].item() == edges
    assert numbers["mean_energy_by_wavelength"].argmax().item() == 1  # 7 pixels is the second of the bank


def test_copies_are_stacked_and_alike() -> None:
    bank = Bank()
    made = _maps.compute(stripes(0, 7.0, size=72), bank, torch.device("cpu"), copies=3)
    assert made.features.shape == (3, bank.channels + _maps.COLOURS, 72, 72)
    assert made.frames.shape == (3, 3, 72, 72)
    assert (made.features.dtype, made.frames.dtype) == (torch.float32, torch.uint8)
    torch.testing.assert_close(made.features[0], made.features[2])
    assert {name: x.shape for name, x in made.tree().items()} == {
        "features": (3, 72, 72, bank.channels + _maps.COLOURS),
        "frames": (3, 72, 72, 3),
    }


def test_the_lines_shown_are_what_the_demo_does() -> None:
    made = _maps.compute(stripes(45, 7.0, size=72), Bank(), torch.device("cpu"))
    names: dict[str, Any] = {"hw": hw, "features": made.features, "frames": made.frames, "stats": made.stats}
    exec(_maps.LINES, names)
    arrays, numbers = _maps.deliver(made)
    assert _compare.same_bytes(names["arrays"], arrays)
    assert names["stats"] == numbers
    assert type(numbers["stripes"]["mean_energy"]) is float


@pytest.mark.parametrize(
    "name", ["gpu", "cuda:", "cuda:x", "cpu:0", "", " cuda", "mps", pytest.param("cuda:99", id="not-there")]
)
def test_devices_that_are_refused(name: str) -> None:
    with pytest.raises(OptionError):
        _maps.pick_device(name)


def test_devices_that_are_taken() -> None:
    assert _maps.pick_device("cpu") == torch.device("cpu")
    assert _maps.pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert _maps.copies_for(torch.device("cpu")) == 1


# -- scikit-learn's part and the picture


def fields(colours: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Features of three plain fields of different size, with noise; and which pixel is in which field."""
    truth = np.zeros((60, 80), np.uint8)
    truth[:, 50:] = 1
    truth[40:, 50:] = 2
    random = np.random.default_rng(5)
    centres = random.normal(size=(3, 12 + colours)) * 3
    return (centres[truth] + random.normal(scale=0.2, size=(60, 80, 12 + colours))).astype(np.float16), truth


def test_segments_are_the_fields_largest_first() -> None:
    features, truth = fields(3)
    found = _segment.segment(features, colours=3, clusters=3, components=4)
    assert found.labels.dtype == np.uint8
    assert list(found.pixels) == sorted(np.bincount(found.labels.ravel()), reverse=True)
    assert (found.labels == truth).mean() > 0.98  # the vote rounds the corners
    assert 0.9 < found.variance_kept <= 1
    again = _segment.segment(features, colours=3, clusters=3, components=4)
    np.testing.assert_array_equal(again.labels, found.labels)


def test_borders_against_their_definition() -> None:
    labels = np.random.default_rng(1).integers(0, 3, size=(9, 11))
    marked = _picture.borders(labels)
    for y in range(9):
        for x in range(11):
            before = ([labels[y, x - 1]] if x else []) + ([labels[y - 1, x]] if y else [])
            assert marked[y, x] == any(other != labels[y, x] for other in before)


def test_segmented_tints_with_the_mean_and_draws_borders() -> None:
    photo = np.zeros((4, 6, 3), np.uint8)
    photo[:, 3:] = (200, 100, 40)
    labels = np.zeros((4, 6), np.uint8)
    labels[:, 3:] = 2  # label 1 has no pixel
    painted = _picture.segmented(photo, labels)
    assert (painted[:, :3] == 0).all()
    assert (painted[:, 3] == 255).all()
    assert (painted[:, 4:] == (200, 100, 40)).all()


# -- the comparison


@pytest.mark.parametrize(
    ("other", "same"),
    [
        pytest.param({"a": np.array([1.0, np.nan])}, True, id="alike-and-nan"),
        pytest.param({"b": np.array([1.0, np.nan])}, False, id="name"),
        pytest.param({"a": np.array([1.0, np.nan], np.float32)}, False, id="dtype"),
        pytest.param({"a": np.array([[1.0, np.nan]])}, False, id="shape"),
        pytest.param({"a": np.array([np.nextafter(1.0, 2.0), np.nan])}, False, id="one-bit"),
        pytest.param({"a": np.array([1.0, -np.nan])}, False, id="sign-of-nan"),
    ],
)
def test_same_bytes(other: dict[str, Any], same: bool) -> None:
    assert _compare.same_bytes({"a": np.array([1.0, np.nan])}, other) is same


def test_every_way_gives_the_same_bytes() -> None:
    ways = _compare.ways(_maps.compute(stripes(45, 7.0, size=72), Bank(), torch.device("cpu"), copies=2))
    ours, *others = (call() for call in ways.values())
    assert next(iter(ways)) == _compare.HOSTWARD
    assert len(others) == 2
    for arrays in (ours, *others):
        assert all(array.flags.c_contiguous for array in arrays.values())
        assert _compare.same_bytes(ours, arrays)


def test_measure_settles_before_each_call() -> None:
    happened: list[str] = []

    def call() -> dict[str, Any]:
        happened.append("call")
        return {"a": np.zeros(1000, np.uint8)}

    timing = _compare.measure("way", call, lambda: happened.append("settle"), calls=3)
    assert happened == ["call", *["settle", "call"] * 3]
    assert (timing.way, timing.calls) == ("way", 3)
    assert timing.least_s <= timing.median_s <= timing.most_s
    assert timing.gb_per_s == pytest.approx(1000 / timing.median_s / 1e9)


def test_every_way_gives_the_same_bytes_off_a_device(device: Device) -> None:
    made = _maps.compute(stripes(45, 7.0, size=72), Bank(), torch.device("cpu"), copies=2)
    stats = {name: {key: device.tensor(x) for key, x in each.items()} for name, each in made.stats.items()}
    made = _maps.Maps(device.tensor(made.features), device.tensor(made.frames), stats)
    arrays, numbers = _maps.deliver(made)
    assert numbers["stripes"]["strongest_edges_deg"] == 135
    for way, call in _compare.ways(made).items():
        assert _compare.same_bytes(arrays, call()), way


# -- the whole


def demo(*arguments: str, cwd: Path, on: str = "cpu") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "hostward", "demo", "--device", on, *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=50, cwd=cwd, env=ENV)


@pytest.fixture(scope="module")
def run_json(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("demo")
    done = demo("--json", "--out", "a/b", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "a" / "b", json.loads(done.stdout)


@pytest.fixture(scope="module")
def run_text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    out = folder / "hostward-demo"
    out.mkdir()
    (out / "labels.npy").write_bytes(b"from an earlier run")
    (out / "notes.txt").write_bytes(b"the user's own")
    done = demo(cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return out, done.stdout


def test_arrays_on_disk(run_json: tuple[Path, dict[str, Any]]) -> None:
    folder, document = run_json
    features, frames, labels = (np.load(folder / name) for name in FILES[:3])
    channels = Bank().channels + _maps.COLOURS
    assert (features.shape, features.dtype) == ((2, HEIGHT, WIDTH, channels), np.float16)
    assert (frames.shape, frames.dtype) == ((2, HEIGHT, WIDTH, 3), np.uint8)
    assert (labels.shape, labels.dtype) == ((2, HEIGHT, WIDTH), np.uint8)
    assert features.flags.c_contiguous
    assert frames.flags.c_contiguous
    assert np.isfinite(features).all()
    assert frames.std(axis=(1, 2)).min() > 5  # something is drawn in every channel
    for one, name in zip(labels, document["segments"], strict=True):
        assert np.bincount(one.ravel()).tolist() == document["segments"][name]
        assert len(document["segments"][name]) == 4
        assert min(document["segments"][name]) > HEIGHT * WIDTH / 100


def test_picture_on_disk(run_json: tuple[Path, dict[str, Any]]) -> None:
    with Image.open(run_json[0] / "segments.png") as image:
        assert image.format == "PNG"
        assert image.width > 3 * WIDTH
        assert image.height > 2 * HEIGHT
        pixels = np.asarray(image)
    photo = load().pixels[0]
    at = [(y, x) for y in range(200) for x in range(100) if (pixels[y, x] == photo[0, 0]).all()]
    assert any((pixels[y : y + HEIGHT, x : x + WIDTH] == photo).all() for y, x in at), "the photograph stands in it"


def test_json_document(run_json: tuple[Path, dict[str, Any]]) -> None:
    folder, document = run_json
    assert (document["command"], document["schema_version"]) == ("demo", command.SCHEMA_VERSION)
    assert document["link_crossed"] is False
    assert document["timings"] == []
    assert document["same_bytes"] is True
    assert [Path(each["path"]).name for each in document["files"]] == list(FILES)
    assert [each["nbytes"] for each in document["files"]] == [(folder / name).stat().st_size for name in FILES]
    assert [(p["path"], p["dtype"], p["nbytes"]) for p in document["pieces"]] == [
        ("['features']", "float16", 2 * HEIGHT * WIDTH * 27 * 2),
        ("['frames']", "uint8", 2 * HEIGHT * WIDTH * 3),
    ]
    assert set(document["numbers"]) == {"china", "flower"}
    assert document["plan"].count("\n") >= 1


def test_text_for_people(run_text: tuple[Path, str]) -> None:
    out, text = run_text
    assert "no link was crossed, so there is no speed to compare" in text
    assert "GB/s" not in text
    assert "\x1b" not in text
    for name in FILES:
        assert str(Path("hostward-demo") / name) in text
    assert _maps.LINES in text
    assert text.index("hostward bench") > text.index(_maps.LINES)
    assert {path.name for path in out.iterdir()} == {*FILES, "notes.txt"}
    assert (out / "notes.txt").read_bytes() == b"the user's own"


def test_two_runs_give_the_same_files(run_json: tuple[Path, dict[str, Any]], run_text: tuple[Path, str]) -> None:
    for name in FILES:
        assert (run_json[0] / name).read_bytes() == (run_text[0] / name).read_bytes(), name


def test_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path / "file" / "x")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        f"hostward demo: cannot write the output files: got folder {str(tmp_path / 'file' / 'x')!r}\n"
        "  why: Not a directory\n"
        "  do: name a folder you can write to: hostward demo --out DIR\n"
    )


def test_a_file_in_place_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path / "file")]) == 2
    assert "\n  why: it is a file, not a folder\n" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "labels.npy").mkdir()
    with pytest.raises(OptionError, match="cannot write the output files"):
        run(tmp_path, "cpu")


def test_steps_are_as_many_as_announced(tmp_path: Path) -> None:
    begun: list[str] = []
    run(tmp_path, "cpu", begun.append)
    assert len(begun) == STEPS


def test_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--device", "cuda:99", "--out", str(tmp_path / "made")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hostward demo: there is no device cuda:99: got ")
    assert not (tmp_path / "made").exists()


def test_on_a_gpu(device: Device, tmp_path: Path) -> None:
    if device.type != "cuda":
        pytest.skip("hostward demo takes CUDA devices: run with --device cuda")
    done = demo("--json", "--out", str(tmp_path), cwd=tmp_path, on="cuda")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["link_crossed"] is True
    assert document["same_bytes"] is True
    assert document["timings"][0]["way"] == _compare.HOSTWARD
    assert [timing["calls"] >= 3 for timing in document["timings"]] == [True] * 3
    assert np.load(tmp_path / "features.npy").shape == (2, HEIGHT, WIDTH, Bank().channels + _maps.COLOURS)


# -- the report with a GPU, from made-up numbers


@pytest.fixture
def with_gpu(tmp_path: Path) -> Result:
    path = tmp_path / "features.npy"
    path.write_bytes(b"1234")
    timings = (
        _compare.Timing("hostward", 0.01, 0.009, 0.02, 5, 50.0),
        _compare.Timing("the usual", 0.5, 0.4, 0.6, 5, 1.0),
    )
    return Result(
        versions={"hostward": "0.0"},
        device="cuda:0",
        device_name="Some GPU",
        link_crossed=True,
        copies=8,
        pieces=(Piece("['features']", (16, 27, 4, 5), "float32", (16, 4, 5, 27), "float16", 500_000_000),),
        plan="one line\nanother [with brackets]",
        same_bytes=True,
        timings=timings,
        first_s=0.25,
        numbers={"china": {"strongest_edges_deg": 22.5, "mean_energy": 0.01}},
        segments={"china": (30, 10)},
        variance_kept={"china": 0.9},
        files=(path,),
        seconds=3.0,
    )


def test_report_with_a_gpu(with_gpu: Result, capsys: pytest.CaptureFixture[str]) -> None:
    command._report(with_gpu, make_console())
    out = capsys.readouterr().out
    assert "What moved, from Some GPU" in out
    assert "another [with brackets]" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["hostward", "10.0", "ms", "9.0", "to", "20.0", "5", "50.00", "1.0"] in rows
    assert ["the", "usual", "500.0", "ms", "400.0", "to", "600.0", "5", "1.00", "50.0"] in rows
    assert "Every byte is the same in all 2 ways." in out
    assert "GB/s: 500.0 MB of arrays over the median" in out
    assert "the first of this process and with the stats: 0.250 s" in out
    assert "no link was crossed" not in out


def test_bytes_that_differ_are_shouted(with_gpu: Result, capsys: pytest.CaptureFixture[str]) -> None:
    command._report(replace(with_gpu, same_bytes=False), make_console())
    assert "THE BYTES DIFFER" in capsys.readouterr().out


def test_json_of_a_gpu_run(with_gpu: Result) -> None:
    document = json.loads(json.dumps(command.as_json(with_gpu)))
    assert document["timings"][1]["gb_per_s"] == 1.0
    assert document["files"] == [{"path": str(with_gpu.files[0]), "nbytes": 4}]
