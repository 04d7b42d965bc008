"""What importing the package costs, and what works without torch."""

import subprocess
import sys

import pytest

import torchtitan_ext as tte

# As where torch is not installed: the finder is asked before any other.
WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_core_and_the_errors_need_neither_torch_nor_numpy() -> None:
    code = "import torchtitan_ext, torchtitan_ext.errors, torchtitan_ext._core; print(torchtitan_ext.__version__)"
    done = run(WITHOUT_TORCH + code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == tte.__version__


def test_a_name_that_needs_torch_says_what_to_install() -> None:
    done = run(WITHOUT_TORCH + "import torchtitan_ext; torchtitan_ext.save")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torchtitan_ext.save needs torch 2.11 or newer; run: pip install torch"
    )


def test_importing_the_package_imports_nothing_of_it() -> None:
    rooms = "(name for name in sys.modules if name.split('.')[0] in ('torch', 'torchtitan_ext'))"
    done = run(f"import sys, torchtitan_ext; print(*{rooms})")
    assert done.stdout.split() == ["torchtitan_ext"]


@pytest.mark.parametrize("name", tte.__all__)
def test_public_names_can_be_had_first_of_all(name: str) -> None:
    done = run(f"import torchtitan_ext.fingerprints, torchtitan_ext.full_tensors; print(torchtitan_ext.{name})")
    assert done.returncode == 0, done.stderr


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tte.nothing
    assert set(tte.__all__) <= set(dir(tte))
