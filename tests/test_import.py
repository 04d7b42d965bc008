"""What importing the package costs, and what works without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


def test_beside_torch_the_import_registers_the_operators() -> None:
    """Eager calls, gradients and fake kernels hold, and half a second of DTensor is not paid for it."""
    code = """
import sys, torch
before = "torch.distributed.tensor" in sys.modules
import torchtitan_ext
op = torch.ops.torchtitan_ext.pack_shard
weight = torch.arange(6.0).requires_grad_()
op(weight, [0], [2], [1, 2, 0]).sum().backward()
assert weight.grad.tolist() == [0, 1, 1, 0, 0, 0]
assert op(torch.empty(6, device="meta"), [0], [2], [1, 2, 0]).shape == (2,)
assert before or "torch.distributed.tensor" not in sys.modules
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_a_saved_program_with_the_operators_loads_after_the_import(tmp_path: Path) -> None:
    class Packs(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return torch.ops.torchtitan_ext.pack_shard(weight, [0], [2], [1, 2, 0]) * 2

    torch.export.save(torch.export.export(Packs(), (torch.arange(6.0),)), tmp_path / "packs.pt2")
    done = run(
        "import torch, torchtitan_ext; "
        f"program = torch.export.load({str(tmp_path / 'packs.pt2')!r}); "
        "print(program.module()(torch.arange(6.0)).tolist())"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[2.0, 4.0]"), done.stderr


def test_operators_that_do_not_load_leave_the_package_importable() -> None:
    code = """
import torch
def broken(path):
    raise OSError("undefined symbol: aoti_torch_new")
torch.ops.load_library = broken
import torchtitan_ext, torchtitan_ext.errors
try:
    torchtitan_ext.ops
except ImportError as error:
    print(error)
"""
    assert "_ops.so does not load beside torch" in run(code).stdout


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("name", tte.__all__)
def test_public_names_can_be_had_first_of_all(name: str) -> None:
    done = run(f"import torchtitan_ext.fingerprints, torchtitan_ext.full.tensors; print(torchtitan_ext.{name})")
    assert done.returncode == 0, done.stderr


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = tte.nothing
    assert dir(tte) == sorted([*tte.__all__, *tte._ROOMS, "__version__"])


def test_a_type_checker_sees_the_public_names_and_the_rooms_and_no_others() -> None:
    """With a ``__getattr__`` in its sight it would take any name for one of ours."""
    tree = ast.parse(Path(str(tte.__file__)).read_text())
    seen: set[str] = set()
    for node in tree.body:
        assert getattr(node, "name", "") != "__getattr__"
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            imports = [one for one in node.body if isinstance(one, ast.ImportFrom)]
            seen |= {alias.asname or alias.name for one in imports for alias in one.names}
    assert seen == {*tte.__all__, *tte._ROOMS}
