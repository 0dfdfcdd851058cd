"""`import hostward` is cheap, needs no torch, and says what to install when the first call does."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import hostward

HEAVY = {"torch", "numpy", "ml_dtypes", "rich", "optree", "asyncio"}

# Puts a finder in front that refuses torch, as if it were not installed.
NO_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def python(code: str) -> str:
    """Run code in a fresh interpreter; what it printed."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after the code."""
    return set(python(f"{code}\nimport sys\nprint(*({HEAVY!r} & sys.modules.keys()))").split())


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import hostward") == set()


def test_the_check_for_heavy_imports_can_fail() -> None:
    assert "torch" in loaded_by("import hostward, torch")


def test_import_time_is_small() -> None:
    code = """
    import time
    start = time.perf_counter()
    import hostward
    print(time.perf_counter() - start)
    """
    assert min(float(python(code)) for _ in range(3)) < 0.05


def test_import_works_without_torch() -> None:
    assert python(f"{NO_TORCH}\nimport hostward\nprint(hostward.__version__)") == hostward.__version__


@pytest.mark.parametrize("name", ["to_numpy", "to_python", "explain"])
def test_first_use_without_torch_says_what_to_install(name: str) -> None:
    code = f"""
    import hostward
    try:
        hostward.{name}({{"a": [1, 2]}})
    except hostward.errors.MissingDependencyError as error:
        print(error.do)
    """
    assert "pip install 'hostward[torch]'" in python(NO_TORCH + textwrap.dedent(code))


def test_blocking_torch_does_block_it() -> None:
    code = """
    try:
        import torch
    except ModuleNotFoundError as error:
        print(error.name)
    """
    assert python(NO_TORCH + textwrap.dedent(code)) == "torch"


def test_dir_lists_the_public_names_before_they_are_loaded() -> None:
    listed = python("import hostward\nprint(*dir(hostward))").split()
    assert set(hostward.__all__) <= set(listed)


@pytest.mark.parametrize("name", hostward.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(hostward, name) is getattr(hostward, name)


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hostward' has no attribute 'to_nunpy'") as caught:
        hostward.to_nunpy  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("to_nunpy", hostward)
