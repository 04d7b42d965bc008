"""What the documents promise: examples run, and no kind of error, exception or public name is left out."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import FrameType, ModuleType

import errors_page
import pytest
import torch
from warm_processes import torchrun

import torchtitan_ext
from torchtitan_ext import errors
from torchtitan_ext.elastic import ElasticPolicy
from torchtitan_ext.errors.refusals import REFUSALS

ROOT = Path(__file__).parents[1]
PACKAGE = Path(torchtitan_ext.__file__).resolve().parent
REFERENCE = ROOT / "docs" / "reference"
PAGES_WITH_JOBS = ("layouts.md", "moves.md", "hugging_face.md")
WITH_EXAMPLES = "".join((ROOT / "docs" / "use" / page).read_text() for page in PAGES_WITH_JOBS)
EXAMPLES = re.findall(r"```python\n# torchrun --nproc-per-node (\d+)\n(.*?)```", WITH_EXAMPLES, re.S)
ROOMS = (
    *("", ".checkpoint", ".elastic", ".errors", ".full", ".integrations", ".layout", ".metrics", ".ops"),
    *(".runs", ".storage", ".sync", ".transfer", ".transforms", ".weights"),
)


@pytest.mark.nightly("pages")
@pytest.mark.parametrize(("num_ranks", "code"), EXAMPLES, ids=["fused QKV", "a generator", "weights"])
def test_the_examples_of_pages_run(tmp_path: Path, num_ranks: str, code: str) -> None:
    script = tmp_path / "example.py"
    script.write_text(code.replace("/tmp/", f"{tmp_path}/"))
    done = torchrun(int(num_ranks), script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == int(num_ranks)


# Programs with a name, and below each what it prints.
PROGRAMS = [
    (page, *program)
    for page in ("elastic.md", "hugging_face.md")
    for program in re.findall(
        r"```python\n(# \w+\.py)\n(.*?)```\n```\n(.*?)```", (ROOT / "docs" / "use" / page).read_text(), re.S
    )
]


@pytest.mark.nightly("pages")
@pytest.mark.parametrize(("page", "name", "code", "output"), PROGRAMS, ids=[name[2:] for _, name, _, _ in PROGRAMS])
def test_the_programs_of_pages_print_what_they_show(
    tmp_path: Path, page: str, name: str, code: str, output: str
) -> None:
    script = tmp_path / name[2:]
    script.write_text(code.replace("/tmp/", f"{tmp_path}/"))
    for _ in range(2 if name == "# workers.py" else 1):  # its files are there then
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, output), done.stderr[-3000:]


PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def anchors(page: Path) -> set[str]:
    """The fragments under which a browser finds the headings of a page."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    words = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)(.*?)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_named_file_is_there(page: Path) -> None:
    """By its path in the repository, or in the package."""
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|h|cpp|cu|md)|(?:torchtitan_ext|csrc|tests)/[\w/]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists() and not (PACKAGE / path).exists()] == []


TABLES_OF = {"resume": "resume", "storage": "storage", "hf": "contest", "data": "contest"}


@pytest.mark.parametrize("benchmark", TABLES_OF)
def test_the_tables_of_costs_are_those_of_the_result_files(tmp_path: Path, benchmark: str) -> None:
    page = tmp_path / "costs.md"
    page.write_text(re.sub(r"\d", "", (ROOT / "docs" / "costs.md").read_text()))
    (results,) = (ROOT / "benchmarks" / "results").glob(f"{benchmark}_*.json")
    script = ROOT / "benchmarks" / f"{TABLES_OF[benchmark]}_table.py"
    subprocess.run([sys.executable, str(script), str(results), "--into", str(page)], check=True)
    place = re.compile(rf"<!-- tables of {benchmark} -->\n(.*?)<!-- end of tables -->", re.S)
    assert place.findall(page.read_text()) == place.findall((ROOT / "docs" / "costs.md").read_text())


@pytest.fixture(scope="module")
def functions_run(tmp_path_factory: pytest.TempPathFactory) -> set[tuple[str, str]]:
    """Files of the package and the names of functions and classes that a save and two loads call."""
    run = tmp_path_factory.mktemp("run")
    found: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            name = frame.f_code.co_name
            made = type(frame.f_locals["self"]).__name__ if name == "__init__" else name
            found.add((str(path.relative_to(PACKAGE)), made))

    state = {"model": {"w": torch.zeros(3)}, "step": 1}
    sys.setprofile(note)
    try:
        torchtitan_ext.CheckpointManager(run, keep=1, fingerprints=True, asynchronous=False).save(state, 1)
        torchtitan_ext.load(state, run, step="latest", policy=ElasticPolicy())
        torchtitan_ext.load(state, run / "step-1", prove=True)
    finally:
        sys.setprofile(None)
    return found


WALK = re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", (ROOT / "docs" / "design.md").read_text())


@pytest.mark.parametrize(("module", "names"), WALK)
def test_a_state_dict_walks_as_the_page_says(functions_run: set[tuple[str, str]], module: str, names: str) -> None:
    assert {(module, name) for name in re.findall(r"\w+", names)} <= functions_run


def documented(page: str) -> set[str]:
    """Names that begin a row of a table of a page."""
    rows = re.findall(r"^\| (`.*?) \|", (REFERENCE / page).read_text(), re.M)
    return {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}


def test_every_kind_of_problem_has_a_remedy() -> None:
    kinds = set(errors.ProblemKind.__args__)  # type: ignore[attr-defined]
    assert kinds <= documented("errors.md")


def test_every_heading_stands_with_its_kind() -> None:
    lines = (REFERENCE / "errors.md").read_text().splitlines()
    for kind, (_, heading) in REFUSALS.items():
        assert any(line.startswith(f"| `{kind}`") and heading in line for line in lines), heading


def test_every_exception_is_explained() -> None:
    classes = {name for name, member in inspect.getmembers(errors, inspect.isclass) if issubclass(member, Exception)}
    assert classes <= documented("errors.md")
    assert errors_page.PATH.read_text() == errors_page.page_of_classes(), "run python docs/make_pages.py"
    no_remedy = [row for row in map(errors_page.row_of, errors_page.classes()) if row.endswith("|  |\n")]
    assert [row.split("`")[1] for row in no_remedy] == ["TorchtitanExtError"]


# Warnings that say what was found elsewhere: phrases of it.
FOUND_ELSEWHERE = {
    ("load_planner.py", "load: ..."): [
        "of a source",
        "saved entries of ... that nothing asks for are not loaded:",
        "... is the position of ..., which goes on from it on as many ranks as saved",
    ],
    ("report.py", "load: %s"): ["load: "],
}


def texts_of(node: ast.AST) -> list[str]:
    """Constant texts in it; those of an f-string as one, with ... for what is filled in."""
    found: list[str] = []
    for one in ast.walk(node):
        if isinstance(one, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "..." for part in one.values)
            found.append("".join(map(str, parts)))
        elif isinstance(one, ast.Constant) and isinstance(one.value, str):
            found.append(one.value)
    return found


def warnings_of_package() -> list[tuple[str, list[str]]]:
    """The file and the texts of every warning; where it has no words of its own, those of its function."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if ast.unparse(call.func) in ("warn", "logger.warning"):
                texts = [text for argument in call.args for text in texts_of(argument)]
                if not re.search("[a-z]", "".join(texts)):
                    texts = [text for one in functions if call in ast.walk(one) for text in texts_of(one)]
                found.append((path.name, texts))
    return found


def test_every_warning_is_explained() -> None:
    """By a phrase of its text, and no phrase is explained that no warning has."""
    table = (REFERENCE / "errors.md").read_text().split("\n## Warnings\n")[1].split("\n## ")[0]
    phrases = re.findall(r"^\| `(.*?)`", table, re.M)
    shown: set[str] = set()
    for file, texts in warnings_of_package():
        own = [phrase for phrase in phrases if any(phrase in text for text in texts)]
        found = FOUND_ELSEWHERE.get((file, "".join(texts[:1])), own)
        assert found and set(found) <= set(phrases), f"errors.md does not explain a warning of {file}: {texts}"
        shown |= set(found)
    assert shown == set(phrases)
    everything = [text for path in PACKAGE.rglob("*.py") for text in texts_of(ast.parse(path.read_text()))]
    for phrase in (phrase for phrases in FOUND_ELSEWHERE.values() for phrase in phrases):
        assert any(phrase in text for text in everything), phrase


def public_names(module: ModuleType) -> set[str]:
    """Its ``__all__``; of a module without one, what is defined in it. Functions of ``errors`` serve the package."""
    if module is errors:
        return {name for name in errors.__all__ if inspect.isclass(getattr(errors, name))}
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        name
        for name, member in inspect.getmembers(module, lambda one: inspect.isclass(one) or inspect.isroutine(one))
        if member.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_in_the_index(room: str) -> None:
    assert public_names(importlib.import_module(f"torchtitan_ext{room}")) <= documented("api.md")


def test_every_room_with_public_names_is_looked_at() -> None:
    package = Path(torchtitan_ext.__file__).parent
    lists = {path for path in package.rglob("*.py") if re.search(r"^__all__ = ", path.read_text(), re.M)}
    rooms = {Path(str(importlib.import_module(f"torchtitan_ext{room}").__file__)) for room in ROOMS}
    assert lists <= {*rooms, package / "dcp_private.py"}  # which lends names of torch to the package


def test_the_index_names_nothing_that_is_not_there() -> None:
    known = {name for room in ROOMS for name in public_names(importlib.import_module(f"torchtitan_ext{room}"))}
    for adapter in ("ray.py", "torchtitan.py", "torchtitan_text_data.py"):
        source = (Path(torchtitan_ext.__file__).parent / "integrations" / adapter).read_text()
        known |= set(re.findall(r"^(?:class|def) ([^\W_]\w*)", source, re.M))
    assert documented("api.md") == known
