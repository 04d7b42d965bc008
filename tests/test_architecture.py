"""The order of the modules and what only one of them may touch, read from the sources."""

import ast
import inspect
from pathlib import Path

import pytest

import torchtitan_ext

PACKAGE = Path(torchtitan_ext.__file__).resolve().parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Each module may import those of the layers above its own. DESIGN: errors <- ops, layout <- state_dict <- planners <-
# checkpoint; elastic components know errors and plain values only, the planners ask for policies.
LAYERS = [
    {"_core"},
    {"errors", "op_library"},
    {"ops", "layout", "cast", "plain_value", "exchange"},
    {"elastic.component"},
    {"elastic.policy", "elastic.index_order", "elastic.streams", "elastic.indexed", "elastic.lr_schedule"},
    {"elastic.sampler", "elastic.shards", "elastic.packing"},
    {"elastic.stream_batches", "elastic.torchtitan_data"},
    {"elastic.dataloader", "elastic.lr_scheduler", "elastic.rng", "elastic.train_state", "elastic.param_groups"},
    {"elastic"},
    {"state_dict", "value_digest", "sync_scope"},
    {"replicas", "dcp_failure"},
    {"sync_agreement"},
    {"replica_check"},
    {"sync"},
    {"key_table"},
    {"agreement"},
    {"load_report"},
    {"save_planner", "load_planner"},
    {"elastic.saved_components"},
    {"elastic.load"},
    {"full_tensor", "fingerprint", "flat_state_dict"},
    {"staging"},
    {"checkpoint"},
    {"__init__", "integrations"},
    {"integrations.torchtitan"},
]
LAYER_OF = {name: position for position, names in enumerate(LAYERS) for name in names}


def name_of(source: Path) -> str:
    """As in LAYERS: ``layout``, ``elastic.policy``; a package by its own name."""
    name = ".".join(source.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


def imported_modules(source: Path) -> set[str]:
    """The modules of the package that a source imports, as in LAYERS."""
    names: set[str] = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchtitan_ext":
            module = str(node.module).removeprefix("torchtitan_ext").removeprefix(".")
            members = {f"{module}.{alias.name}".removeprefix(".") for alias in node.names} & set(LAYER_OF)
            names |= members or ({module} if module else set())
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".", 1)[1] for alias in node.names if alias.name.startswith("torchtitan_ext.")}
    return names


def attributes(source: Path) -> set[str]:
    return {node.attr for node in ast.walk(tree_of(source)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_imports_follow_the_layers(source: Path) -> None:
    assert name_of(source) in LAYER_OF, "a new module: give it a place in LAYERS"
    allowed = {name for name, layer in LAYER_OF.items() if layer < LAYER_OF[name_of(source)]}
    assert imported_modules(source) <= allowed


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_private_attributes_of_dtensors_stay_in_layout(source: Path) -> None:
    if name_of(source) != "layout":
        assert not attributes(source) & {"_local_tensor", "_spec"}


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_only_op_library_names_torch_ops(source: Path) -> None:
    names = {ast.unparse(node) for node in ast.walk(tree_of(source)) if isinstance(node, ast.Attribute)}
    if name_of(source) != "op_library":
        assert "torch.ops" not in names


@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_no_imports_inside_functions(source: Path) -> None:
    functions = (node for node in ast.walk(tree_of(source)) if isinstance(node, ast.FunctionDef))
    inner = [node for function in functions for node in ast.walk(function)]
    assert not [ast.unparse(node) for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))]


def test_the_public_face_is_small() -> None:
    names = [name for name in torchtitan_ext.__all__ if not inspect.ismodule(getattr(torchtitan_ext, name))]
    assert len(names) <= 15
    assert torchtitan_ext.__all__ == sorted(torchtitan_ext.__all__)
    assert all(hasattr(torchtitan_ext, name) for name in torchtitan_ext.__all__)
