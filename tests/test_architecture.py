"""The order of the modules and what only one of them may touch, read from the sources."""

import ast
import inspect
from pathlib import Path
from typing import get_type_hints

import torchtitan_ext

PACKAGE = Path(torchtitan_ext.__file__).resolve().parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Rooms, lowest first. A module imports from its own room and from rooms in lower rows, so that no arrow points up;
# rooms of one row do not know each other.
ROWS = [
    {"_core"},
    {"errors", "clock"},
    {"metrics", "op_library", "dcp_private", "threads"},
    {"ops"},
    {"layout"},
    {"state", "ranks"},
    {"storage"},
    {"transforms"},
    {"checkpoint", "sync"},
    {"full", "fingerprints"},
    {"transfer", "weights"},
    {"elastic", "runs"},
    {"integrations"},
    {"offline"},
    {"cli"},
    {"__init__", "__main__", "run", "selftest"},
]

# The rooms inside the large rooms, in the same way; a module beside them counts as a room, "" is the ``__init__``.
INNER_ROWS = {
    "storage": [
        {"element_types", "progress", "futures", "location"},
        {"checkpoint_files", "raw_tensor"},
        {"damage", "commit"},
        {"objects"},
        {"metadata"},
        {"native"},
        {"formats"},
        {"weights"},
        {"inspect"},
        {"runs"},
        {""},
    ],
    "checkpoint": [{"tables"}, {"rules"}, {"planners"}, {"staging"}, {"operation"}, {""}],
    "transfer": [
        {"key_sources"},
        {"endpoint", "planning"},
        {"sent_sums"},
        {"plan"},
        {"state_dicts"},
        {"dtensors"},
        {""},
    ],
    "transforms": [{"rules"}, {"ready"}, {"mapped"}, {"mapped_reads", "weights"}, {"reader"}, {""}],
    "elastic": [{"own_share"}, {"data", "schedule", "rng", "train_state"}, {""}],
    "offline": [
        {"amounts", "sources", "workers", "placement_rules"},
        {"boxes", "mapped_files"},
        {"selection", "torch_boxes"},
        {"compare", "dry_run", "rewrite"},
        {""},
    ],
}

MAX_MODULES_OF_A_FOLDER = 15


def name_of(source: Path) -> str:
    """``errors``, ``layout.rules``; a room by its own name."""
    name = ".".join(source.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def tree_of(source: Path) -> ast.Module:
    return ast.parse(source.read_text())


def imported_modules(source: Path) -> set[str]:
    """The modules of the package that a source imports, by the names of ``name_of``."""
    names: set[str] = set()
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchtitan_ext":
            module = str(node.module).removeprefix("torchtitan_ext").removeprefix(".")
            members = {f"{module}.{alias.name}".removeprefix(".") for alias in node.names} & MODULES
            names |= members or ({module} if module else set())
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".", 1)[1] for alias in node.names if alias.name.startswith("torchtitan_ext.")}
    return names


def room_of(module: str) -> str:
    return module.split(".")[0]


def inner_room_of(module: str) -> str:
    return (module.split(".") + [""])[1]


def allowed_rooms(room: str, rows: list[set[str]]) -> set[str]:
    """The room and those in lower rows."""
    position = next((place for place, rooms in enumerate(rows) if room in rooms), None)
    assert position is not None, f"{room!r} is a new room: give it a place in the rows"
    return {room}.union(*rows[:position])


MODULES = {name_of(source) for source in SOURCES} | {"_core"}
IMPORTS = {name_of(source): imported_modules(source) for source in SOURCES}


def attributes(source: Path) -> set[str]:
    return {node.attr for node in ast.walk(tree_of(source)) if isinstance(node, ast.Attribute)}


def test_no_import_points_up() -> None:
    for module, imports in IMPORTS.items():
        room = room_of(module)
        assert {room_of(imported) for imported in imports} <= allowed_rooms(room, ROWS), module
        if room in INNER_ROWS:
            inner = {inner_room_of(imported) for imported in imports if room_of(imported) == room}
            assert inner <= allowed_rooms(inner_room_of(module), INNER_ROWS[room]), module


def test_no_folder_is_crowded() -> None:
    folders = {source.parent for source in SOURCES}
    counts = {str(folder.relative_to(PACKAGE)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES_OF_A_FOLDER} == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    for module in IMPORTS:
        reached: set[str] = set()
        pending = [module]
        while pending:
            new = IMPORTS.get(pending.pop(), set()) - reached
            reached |= new
            pending += new
        assert module not in reached


def test_private_attributes_of_dtensors_stay_in_layout_dtensor() -> None:
    users = {name_of(source) for source in SOURCES if attributes(source) & {"_local_tensor", "_spec"}}
    assert users == {"layout.dtensor"}


def test_only_op_library_names_torch_ops() -> None:
    users = {
        name_of(source)
        for source in SOURCES
        if any(
            isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops" for node in ast.walk(tree_of(source))
        )
    }
    assert users == {"op_library"}


def asks_the_time(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name == "time" for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        # Whoever imports a function of the clock by name keeps it where a test puts another one in place.
        return node.module in ("time", "torchtitan_ext.clock")
    return isinstance(node, ast.Call) and ast.unparse(node.func) in CLOCKS


CLOCKS = {f"{module}{name}" for module in ("datetime.", "datetime.datetime.") for name in ("now", "utcnow", "today")}


def test_only_clock_asks_the_time() -> None:
    users = {name_of(source) for source in SOURCES if any(map(asks_the_time, ast.walk(tree_of(source))))}
    assert users == {"clock"}


def test_private_names_of_dcp_come_from_dcp_private() -> None:
    users = {
        name_of(source)
        for source in SOURCES
        for node in ast.walk(tree_of(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed.checkpoint")
        if any("._" in f"{node.module}.{alias.name}" for alias in node.names)
    }
    assert users == {"dcp_private"}


# What these do not say torch takes from ``set_default_device`` and ``set_default_dtype``, the business of others.
CONSTRUCTORS = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
} | {
    *("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}

# An empty list of tensors has no device: what is made of it goes where the caller's other tensors go.
FOLLOWS_DEFAULTS = {"ops.flat": {"torch.empty(0, dtype=dtype)"}}


def test_new_tensors_say_device_and_dtype() -> None:
    silent: dict[str, set[str]] = {}
    for source in SOURCES:
        calls = [node for node in ast.walk(tree_of(source)) if isinstance(node, ast.Call)]
        made = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in CONSTRUCTORS}]
        for call in made:
            if not {"device", "dtype"} <= {word.arg for word in call.keywords}:
                silent.setdefault(name_of(source), set()).add(ast.unparse(call))
    assert silent == FOLLOWS_DEFAULTS


def test_no_imports_inside_functions() -> None:
    found = {
        name_of(source): ast.unparse(node)
        for source in SOURCES
        for function in ast.walk(tree_of(source))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    }
    assert found == {}


def test_the_public_face_is_small() -> None:
    assert len(torchtitan_ext.__all__) <= 18
    assert torchtitan_ext.__all__ == sorted(torchtitan_ext.__all__)
    assert all(hasattr(torchtitan_ext, name) for name in torchtitan_ext.__all__)


def test_calls_have_few_options() -> None:
    calls = (torchtitan_ext.save, torchtitan_ext.async_save, torchtitan_ext.load)
    counts = {}
    for call in calls:
        parameters = inspect.signature(call).parameters.values()
        counts[call.__name__] = sum(one.kind is one.KEYWORD_ONLY for one in parameters)
        get_type_hints(call)
    assert counts == {"save": 6, "async_save": 6, "load": 12}


def test_no_two_test_modules_have_one_name() -> None:
    """pytest imports them by it."""
    names = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, other in zip(names, names[1:], strict=False) if name == other] == []


TESTS = Path(__file__).parent


def test_only_the_harness_looks_at_the_clock_and_kills() -> None:
    found: dict[str, list[str]] = {}
    for source in TESTS.rglob("*.py"):
        if any(source.is_relative_to(TESTS / tool) for tool in ("harness", "mutants")):
            continue
        for node in ast.walk(tree_of(source)):
            imported = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            imported |= {node.module} if isinstance(node, ast.ImportFrom) else set()
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if "time" in imported or called in {"threading.Timer", "Timer", "os.kill"} or "getsockname" in called:
                found.setdefault(str(source.relative_to(TESTS)), []).append(ast.unparse(node))
    assert found == {}
