"""What turns one checkpoint into another, as files of changes, and a chain of them onto a checkpoint of any mesh."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call, flip
from checkpoints import DTYPES, random_bits, save_as, tensors, training_state
from reference import as_bytes, same_bits

import torchtitan_ext as tte
from torchtitan_ext.cli.output import DIFFERS, FINE, UNREADABLE, WRONG_USAGE
from torchtitan_ext.errors import (
    DamagedCheckpointError,
    MissingStateError,
    ReshardError,
    StateRefusedError,
    WrongBaseError,
    WrongValueError,
)
from torchtitan_ext.offline.compare.delta_file import DeltaReport, check_carried, versions_of, write_delta
from torchtitan_ext.offline.compare.diff import diff
from torchtitan_ext.offline.rewrite import changes as changes_of_files
from torchtitan_ext.offline.rewrite.reshard import ReshardReport, reshard
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source

KINDS = ["ours", "stock", "torch", "safetensors", "dp=3", "dp_shard=2,tp=2", "dp=40"]
MESHES = [{"dp": 1}, {"dp": 4}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp": 7, "tp": 2}]


def changed(draw: random.Random, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A version in which a random share of the elements of each tensor has other bits."""
    new = {}
    for key, tensor in state.items():
        items = as_bytes(tensor).clone().view(-1, tensor.itemsize)
        count = round(draw.choice([0.0, 0.01, 0.3, 1.0]) * tensor.numel())
        for element in draw.sample(range(tensor.numel()), count):
            items[element, draw.randrange(tensor.itemsize)] ^= 1
        new[key] = items.view(-1).view(tensor.dtype).view(tensor.shape)
    return new


def wrote(a: Path, b: Path, path: Path, *, max_bytes: int = 1 << 20, **options: Any) -> DeltaReport:
    one, other = open_source(a), open_source(b)
    selection = options.pop("selection", None)
    report = diff(one, other, selection=selection, max_bytes=1 << 20)
    versions = versions_of(one, other, options.pop("versions", None))
    return write_delta(one, other, report, path, versions=versions, selection=selection, max_bytes=max_bytes)


def resharded(source: Path, target: Path, *changes: Path, **options: Any) -> ReshardReport:
    given: dict[str, Any] = {"mesh": {"dp": 3}, "num_processes": 1, "max_bytes": 8 << 20, **options}
    return reshard(open_source(source), target, changes=changes, **given)


def differences(a: Path, b: Path) -> tuple[Any, ...]:
    return diff(open_source(a), open_source(b), read=True).differences


@pytest.mark.parametrize("seed", range(12))
def test_chains_onto_checkpoints_of_any_mesh_and_format(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    first: dict[str, torch.Tensor] = {key: random_bits(tuple(t.shape), t.dtype) for key, t in tensors().items()}
    states = [first]
    for _ in range(2):
        states.append(changed(draw, states[-1]))
    steps = [save_as(draw.choice(KINDS), tmp_path / f"step-{10 * at}", state) for at, state in enumerate(states)]
    files = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    for at, path in enumerate(files):
        report = wrote(steps[at], steps[at + 1], path, max_bytes=draw.choice([1, 500, 20_000, 1 << 20]))
        assert (report.base_version, report.version, report.not_carried) == (10 * at, 10 * at + 10, ())
        assert report.num_bytes == path.stat().st_size
        in_memory = {key: tensor.clone() for key, tensor in states[at].items()}
        tte.delta.apply(in_memory, tte.delta.load(path), version=10 * at, verify="all")
        assert all(same_bits(tensor, states[at + 1][key]) for key, tensor in in_memory.items())
    mesh = draw.choice(MESHES)
    done = resharded(steps[0], tmp_path / "new", *files, mesh=mesh, num_processes=draw.choice([1, 2]))
    assert done.version == 20
    assert differences(tmp_path / "new", steps[2]) == ()
    assert differences(steps[0], save_as("ours", tmp_path / "as before", first)) == ()


def test_a_file_that_a_job_saved_goes_onto_a_checkpoint(tmp_path: Path) -> None:
    state = {f"w.{dtype}": random_bits((40, 9), dtype) for dtype in DTYPES}
    source = save_as("dp=2,tp=2", tmp_path / "step-4", {"model": state, "step": 4})
    base = tte.delta.Snapshot(state, version=4)
    draw = random.Random(0)
    for key, tensor in changed(draw, state).items():
        state[key].view(torch.uint8).copy_(tensor.view(torch.uint8))
    changes = base.changes(version=6)
    assert changes.num_changed > 0
    tte.delta.save(changes, tmp_path / "job.safetensors")
    chosen = Selection((), "model")
    report = resharded(source, tmp_path / "new", tmp_path / "job.safetensors", selection=chosen, mesh={"dp": 5})
    assert (report.version, report.num_changed) == (6, changes.num_changed)
    assert differences(tmp_path / "new", save_as("torch", tmp_path / "wanted", state)) == ()


def test_few_changes_take_few_bytes(tmp_path: Path) -> None:
    old = random_bits((2000, 1000), torch.bfloat16)
    new = old.clone()
    new.view(torch.int16).view(-1)[torch.randperm(2_000_000)[:20_000]] ^= 1
    a, b = (save_as("ours", tmp_path / f"step-{at}", {"w": one}) for at, one in enumerate((old, new)))
    report = wrote(a, b, tmp_path / "d.safetensors", max_bytes=256 << 20)
    assert report.num_changed == 20_000
    assert report.num_bytes < 5 * 20_000


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    """Checkpoints of steps 0 to 3, and three files from one to the next."""
    weight = torch.arange(600.0).view(30, 20)
    steps = []
    for at in range(4):
        weight[at, at] = -1 - at
        weight[0, 19] = at  # changes each time
        state = {"w": weight.clone(), "b": torch.zeros(5), "note": f"step {at}"}
        steps.append(save_as("ours", tmp_path / f"step-{at}", state))
    return [wrote_path(steps[at], steps[at + 1], tmp_path / f"d{at}.safetensors") for at in range(3)]


def wrote_path(a: Path, b: Path, path: Path) -> Path:
    report = wrote(a, b, path)
    assert report.not_carried == ("note",)
    return path


def refused(error: type[Exception], match: str, source: Path, *changes: Path, **options: Any) -> None:
    target = source.parent / "refused"
    before = {path.name for path in source.parent.iterdir()}
    with pytest.raises(error, match=match):
        resharded(source, target, *changes, **options)
    assert {path.name for path in source.parent.iterdir()} == before, "nothing was committed, nothing is left"


def test_gaps_orders_and_bases_are_refused_by_name(tmp_path: Path, chain: list[Path]) -> None:
    first = tmp_path / "step-0"
    gap = r"d2.safetensors: leads from version 2 to 3, and the tensors are of version 1 then; give before it what leads"
    refused(WrongBaseError, gap + " from 1 to 2", first, chain[0], chain[2])
    refused(WrongBaseError, "d1.safetensors: leads .* version 0 then", first, chain[1])
    refused(WrongBaseError, "d0.safetensors: .* give the files in the order", first, chain[1], chain[0], base_version=1)
    refused(WrongBaseError, "d0.safetensors: leads .* of version 1 then", first, chain[0], chain[0])
    # Versions that fit, and bits that do not: of the first file, and of the second one.
    refused(WrongBaseError, r"w: has other bits than .* \(.*d1.safetensors\)", first, chain[1], base_version=1)
    other = save_as("dp=2", tmp_path / "step-00", {"w": torch.zeros(30, 20), "b": torch.zeros(5)})
    refused(WrongBaseError, r"w: has other bits than .* \(.*d0.safetensors\)", other, chain[0], num_processes=2)
    with pytest.raises(WrongBaseError):
        resharded(first, tmp_path / "step-3", chain[1], base_version=1, overwrite=True)
    assert differences(tmp_path / "step-3", tmp_path / "step-3") == ()
    assert resharded(first, tmp_path / "new", *chain) == ReshardReport(3, 3, 2420, (), 6, 3)
    assert [found.key for found in differences(tmp_path / "new", tmp_path / "step-3")] == ["note"]


def test_a_file_that_skips_a_version_is_refused(tmp_path: Path) -> None:
    """Of no element twice, and a checkpoint whose version nobody knows, or which somebody gives wrong."""
    weight, steps = torch.arange(600.0).view(30, 20), []
    for at in range(3):
        steps.append(save_as("ours", tmp_path / f"step-{at}", {"w": weight.clone(), "v": torch.full((3,), at)}))
        weight[at, at] = -1
    files = [wrote(steps[at], steps[at + 1], tmp_path / f"d{at}", selection=Selection(("w",))) for at in range(2)]
    assert [file.num_changed for file in files] == [1, 1]
    first = save_as("dp=3", tmp_path / "first", {"w": torch.arange(600.0).view(30, 20), "v": torch.zeros(3)})
    what = r"w: has other bits than the changes were made from, in elements that they do not replace \(.*d1\)"
    for options in ({}, {"base_version": 1}, {"num_processes": 2}):
        refused(WrongBaseError, what, first, tmp_path / "d1", **options)
    assert resharded(first, tmp_path / "new", tmp_path / "d0", tmp_path / "d1").version == 2
    chosen = Selection(("w",))
    read = diff(open_source(tmp_path / "new"), open_source(steps[2]), selection=chosen, read=True)
    assert read.differences == ()


def test_a_file_that_is_written_over_meanwhile(
    tmp_path: Path, chain: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = chain[0].read_bytes()
    done = changes_of_files.ChangeChain.__init__
    written: list[bytes] = []

    def then_write_over(self: Any, *args: Any) -> None:
        done(self, *args)
        chain[0].write_bytes(written[-1])

    monkeypatch.setattr(changes_of_files.ChangeChain, "__init__", then_write_over)
    for other in (content[:-1] + bytes([content[-1] ^ 1]), content[: len(content) // 2]):
        written.append(other)
        refused(DamagedCheckpointError, "d0.safetensors", tmp_path / "step-0", chain[0])
        chain[0].write_bytes(content)


def test_other_tensors_are_refused(tmp_path: Path, chain: list[Path]) -> None:
    ten = save_as("ours", tmp_path / "ten", {"w": torch.zeros(10)})
    refused(ReshardError, r"w: has shape \(30, 20\) in the changes, \(10,\) in the state", ten, chain[0])
    half = save_as("ours", tmp_path / "half", {"w": torch.zeros(30, 20).bfloat16()})
    refused(ReshardError, "w: is float32 in the changes, bfloat16 in the state", half, chain[0])
    none = save_as("ours", tmp_path / "none", {"v": torch.zeros(10)})
    refused(MissingStateError, "w: has changed, and the checkpoint has no such tensor", none, chain[0])
    refused(WrongValueError, "which are for tensors as they are", tmp_path / "step-0", chain[0], dtype="bfloat16")
    resharded(tmp_path / "step-0", tmp_path / "b alone", chain[0], selection=Selection(("b",)))


def test_damaged_files_are_refused(tmp_path: Path, chain: list[Path]) -> None:
    content = chain[0].read_bytes()
    for byte in range(0, len(content), 7):
        flip(chain[0], byte)
        if b'"format":"pt"' in chain[0].read_bytes():
            refused(DamagedCheckpointError, "d0.safetensors", tmp_path / "step-0", chain[0])
        chain[0].write_bytes(content)
    chain[0].write_bytes(content[:-1])
    refused(DamagedCheckpointError, "d0.safetensors", tmp_path / "step-0", chain[0])
    weights = save_as("safetensors file", tmp_path / "weights", {"w": torch.zeros(3)})
    refused(DamagedCheckpointError, "is no file of changes", tmp_path / "step-0", weights)


def test_what_changes_cannot_carry_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    ours, same = torch.ones(4), torch.zeros(2)
    a = {"a": same, "dtype": ours, "kind": 3, "shape": ours, "same": same, "note": "x"}
    b = {"b": same, "dtype": ours.int(), "kind": ours, "shape": torch.ones(5), "same": same, "note": 7, "more": 1}
    sources = [open_source(save_as("ours", tmp_path / f"step-{at}", state)) for at, state in enumerate((a, b))]
    with pytest.raises(StateRefusedError) as refusal:
        check_carried(*sources)
    assert [problem.fqn for problem in refusal.value.problems] == ["a", "b", "dtype", "kind", "shape"]
    report = wrote(
        tmp_path / "step-0", tmp_path / "step-1", tmp_path / "d", selection=Selection(("same", "note", "more"))
    )
    assert report.not_carried == ("more", "note")
    with pytest.raises(WrongValueError, match="expected that the second is larger"):
        versions_of(sources[1], sources[0], None)
    with pytest.raises(WrongValueError, match="is not named after a step"):
        versions_of(sources[0], open_source(save_as("torch", tmp_path / "nameless", a)), None)
    for wrong in ("1", "1:x", "2:1", "1:2:3", "-1:2"):
        with pytest.raises(WrongValueError):
            versions_of(*sources, wrong)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_what_files_of_changes_do_not_have_is_refused(tmp_path: Path) -> None:
    for number, (key, dtype) in enumerate({"w\udc80": torch.float32, "half": torch.complex32}.items()):
        states = [{key: torch.full((8,), at, dtype=torch.uint8).view(dtype)} for at in range(2)]
        paths = [save_as("stock", tmp_path / str(number) / f"step-{at}", state) for at, state in enumerate(states)]
        with pytest.raises(StateRefusedError, match=r"w\\udc80: its name is no text|half: "):
            wrote(*paths, tmp_path / "d")
        assert not (tmp_path / "d").exists()


def test_stored_fingerprints_that_lie_are_found(tmp_path: Path) -> None:
    weight = torch.arange(3000.0)
    for at in range(2):
        weight[at] = -1
        tte.save({"w": weight}, tmp_path / f"step-{at}", fingerprints=True)
    assert wrote(tmp_path / "step-0", tmp_path / "step-1", tmp_path / "d").num_changed == 1
    one, other = (open_source(tmp_path / f"step-{at}") for at in range(2))
    report = diff(one, other)
    report.totals["w"] = (report.totals["w"][0] + 1, report.totals["w"][1])  # type: ignore[index]
    with pytest.raises(DamagedCheckpointError, match="w is not what its fingerprint says"):
        write_delta(one, other, report, tmp_path / "wrong", versions=(0, 1))
    assert not (tmp_path / "wrong").exists()


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = training_state()
    save_as("dp=2,tp=2", tmp_path / "step-7", state)
    state["model"]["wide"][3, :2] = 0
    state["step"] = 8
    save_as("ours", tmp_path / "step-8", state)
    done = call("diff", "step-7", "step-8", "--delta", "d.safetensors")
    assert done.code == DIFFERS
    *_, first, second = done.out.splitlines()
    assert first.startswith("d.safetensors: version 7 to 8, 2 changed elements, ")
    assert second == "not carried, since changes have tensors only: step"
    done = call("diff", "step-7", "step-8", "--delta", "again.safetensors", "--versions", "70:80", "--json")
    assert done.json["delta"] == {
        "base_version": 70, "version": 80, "num_changed": 2, "not_carried": ["step"],
        "num_bytes": (tmp_path / "again.safetensors").stat().st_size,
    }  # fmt: skip
    done = call("reshard", "step-7", "new", "--mesh", "dp=3", "--changes", "d.safetensors", "--json")
    assert (done.code, done.json["version"], done.json["num_changed"]) == (FINE, 8, 2)
    assert [found.key for found in differences(tmp_path / "new", tmp_path / "step-8")] == ["step"]
    done = call("reshard", "step-7", "x", "--mesh", "dp=1", "--changes", "d.safetensors", "--base-version", 6)
    assert done.code == UNREADABLE and "leads from version 7 to 8, and the tensors are of version 6" in done.err
    done = call("reshard", "step-7", "x", "--mesh", "dp=1", "--changes", "again.safetensors", "--base-version", 70)
    assert done.out.endswith("version 80, by 2 changed elements\n")
    for wrong in (["--versions", "1:2"], ["--delta", "step-8"], ["--delta", "y", "--versions", "2:1"]):
        done = call("diff", "step-7", "step-8", *wrong)
        assert (done.code, done.out) == (WRONG_USAGE, ""), done
    assert not (tmp_path / "y").exists()
