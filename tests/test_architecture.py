"""The order of the modules and what only one of them may touch, read from the sources."""

import ast
from pathlib import Path

import pytest

import torchtitan_ext

SOURCES = sorted(Path(torchtitan_ext.__file__).resolve().parent.glob("*.py"))

# Each module may import those of the layers above its own. DESIGN: errors <- ops, layout <- state_dict <- planners <-
# checkpoint.
LAYERS = [
    {"_core"},
    {"errors"},
    {"ops", "layout", "cast", "plain_value", "mesh_exchange"},
    {"state_dict", "value_digest"},
    {"replicas"},
    {"sync_agreement"},
    {"replica_check"},
    {"sync"},
    {"key_table"},
    {"agreement"},
    {"save_planner", "load_planner"},
    {"full_tensor", "fingerprint", "flat_state_dict"},
    {"checkpoint"},
    {"__init__"},
]
LAYER_OF = {name: position for position, names in enumerate(LAYERS) for name in names}


def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


def imported_modules(source: Path) -> set[str]:
    """The modules of the package that a source imports, by their last name."""
    names: set[str] = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torchtitan_ext":
            names |= {alias.name for alias in node.names if alias.name in LAYER_OF}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan_ext."):
            names.add(str(node.module).split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("torchtitan_ext.")}
    return names


def attributes(source: Path) -> set[str]:
    return {node.attr for node in ast.walk(tree_of(source)) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_imports_follow_the_layers(source: Path) -> None:
    assert source.stem in LAYER_OF, "a new module: give it a place in LAYERS"
    allowed = {name for name, layer in LAYER_OF.items() if layer < LAYER_OF[source.stem]}
    assert imported_modules(source) <= allowed


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_private_attributes_of_dtensors_stay_in_layout(source: Path) -> None:
    if source.stem != "layout":
        assert not attributes(source) & {"_local_tensor", "_spec"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_only_ops_names_torch_ops(source: Path) -> None:
    names = {ast.unparse(node) for node in ast.walk(tree_of(source)) if isinstance(node, ast.Attribute)}
    if source.stem != "ops":
        assert "torch.ops" not in names


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_imports_inside_functions(source: Path) -> None:
    functions = (node for node in ast.walk(tree_of(source)) if isinstance(node, ast.FunctionDef))
    inner = [node for function in functions for node in ast.walk(function)]
    assert not [ast.unparse(node) for node in inner if isinstance(node, (ast.Import, ast.ImportFrom))]


def test_the_public_face_is_small() -> None:
    assert len(torchtitan_ext.__all__) <= 16
    assert torchtitan_ext.__all__ == sorted(torchtitan_ext.__all__)
    assert all(hasattr(torchtitan_ext, name) for name in torchtitan_ext.__all__)
