"""A job that lost ranks gets its state back from the memory of the others, and the rest from the last checkpoint."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extent import SOAK
from reference import same_bits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torchtitan_ext as tte
from torchtitan_ext import transfer
from torchtitan_ext.elastic import ElasticPolicy, Resharded, RngState, TrainState, World
from torchtitan_ext.errors import (
    LayoutError,
    MissingStateError,
    ReplicaMismatchError,
    ReshardError,
    StateRefusedError,
    TransferFailedError,
    WrongArgumentError,
)
from torchtitan_ext.transfer.copies import majority

STEP = 5
POISON = 1000.0  # in the checkpoint every element is larger by this: it shows what came from there
SHAPES = {"even": (16, 6), "uneven": (9, 5), "columns": (6, 7), "norm": (7,), "bias": (4, 3)}


def whole(fqn: str) -> torch.Tensor:
    shape = SHAPES[fqn]
    start = 100 * list(SHAPES).index(fqn)
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def tensors_on(mesh: DeviceMesh, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """FSDP2 over TP with replicas; a norm that the TP plan leaves out, on each dp mesh; a plain tensor everywhere."""
    dp = mesh["dp_replicate", "dp_shard"]
    return {
        "even": tte.full.distribute_tensor(values["even"], mesh, [Replicate(), Shard(0), Shard(1)]),
        "uneven": tte.full.distribute_tensor(
            values["uneven"], mesh, [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]
        ),
        "columns": tte.full.distribute_tensor(values["columns"], mesh, [Replicate(), Shard(0), Shard(1)]),
        "norm": tte.full.distribute_tensor(values["norm"], dp, [Replicate(), Shard(0)]),
        "bias": values["bias"].clone(),
    }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_222() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))


def state_with(mesh: DeviceMesh, offset: float | None) -> dict[str, Any]:
    """The training state; of zeros with ``None``."""
    values = {fqn: torch.zeros_like(whole(fqn)) if offset is None else whole(fqn) + offset for fqn in SHAPES}
    return {"model": tensors_on(mesh, values), "options": {"lr": 0.0 if offset is None else 0.1 + offset}}


def held_by(alive: list[int | None], numbered: dict[str, torch.Tensor], rank: int) -> dict[str, set[int]]:
    """By key the elements that some survivor holds, by brute force. Collective."""
    own = {fqn: set(local(one).flatten().int().tolist()) for fqn, one in numbered.items()}
    gathered: list[Any] = [None] * len(alive)
    dist.all_gather_object(gathered, own if alive[rank] is not None else {})
    return {fqn: set().union(*(one.get(fqn, set()) for one in gathered)) for fqn in SHAPES}


def kill_and_recover(rank: int, world_size: int, cases: list[tuple[int, ...]], run: str) -> None:
    mesh = mesh_222()
    tte.save(state_with(mesh, POISON), Path(run, f"step-{STEP}"))
    numbers = {fqn: torch.arange(whole(fqn).numel(), dtype=torch.float32).view(SHAPES[fqn]) for fqn in SHAPES}
    numbered = tensors_on(mesh, numbers)
    for killed in cases:
        alive = [None if one in killed else one for one in range(world_size)]
        before = state_with(mesh, 0.0)
        survived = None if rank in killed else before
        state = state_with(mesh, None)
        report = transfer.recover(
            state, survived=survived, alive=alive, step=None if rank in killed else STEP, path=run, timeout_seconds=60
        )
        held = held_by(alive, numbered, rank)
        for fqn in SHAPES:
            positions = torch.arange(whole(fqn).numel()).view(SHAPES[fqn])
            is_held = torch.tensor([one in held[fqn] for one in positions.flatten().tolist()]).view(SHAPES[fqn])
            expected = tensors_on(mesh, {**numbers, fqn: torch.where(is_held, whole(fqn), whole(fqn) + POISON)})[fqn]
            assert same_bits(local(state["model"][fqn]), local(expected)), (killed, fqn)
        assert state["options"] == {"lr": 0.1}
        absent = {f"model.{fqn}" for fqn in SHAPES if len(held[fqn]) < whole(fqn).numel()}
        assert set(report.keys_from_checkpoint) == absent, (killed, report)
        assert (report.checkpoint_step, bool(report.checkpoint)) == ((STEP, True) if absent else (None, False))
        assert report.survivors == tuple(one for one in alive if one is not None) and not report.distrusted
        # Each of the two replicas wants what is lost; of the norm each rank of tp does.
        lost = {fqn: whole(fqn).numel() - len(held[fqn]) for fqn in SHAPES}
        wanted = sum(4 * count * (4 if fqn == "norm" else 2) for fqn, count in lost.items())
        assert report.bytes_from_checkpoint == wanted, (killed, report)
        total = sum(local(one).nbytes for one in state["model"].values())
        sizes = [torch.tensor(total)]
        dist.all_reduce(sizes[0])
        assert report.bytes_kept + report.bytes_moved + report.bytes_from_checkpoint == int(sizes[0])


EVERY_CASE = [*((one,) for one in range(8)), *itertools.combinations(range(8), 2)]
FEW_CASES = [(0,), (6,), (0, 4), (1, 6), (2, 3), (3, 7)]
CASES = EVERY_CASE if SOAK > 1 else FEW_CASES


def test_each_killed_rank_and_pair_of_two_replicas(run_world: Any, tmp_path: Path) -> None:
    """What some survivor holds comes from there; the two ranks that hold one shard take it along, from the disk."""
    run_world(8, kill_and_recover, CASES, str(tmp_path))


def refused(kind: type[StateRefusedError], *fragments: str, **arguments: Any) -> StateRefusedError:
    """The refusal of a recovery into zeros, which stay zeros."""
    state = arguments.pop("state")
    with pytest.raises(kind) as caught:
        transfer.recover(state, **arguments)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)
    tensors = [local(one) for one in state.get("model", {}).values()]
    assert all(bool((one == 0).all()) for one in tensors)
    return caught.value


def recovered(mesh: DeviceMesh, **arguments: Any) -> transfer.RecoverReport:
    """The report of a recovery that gives back what was there before."""
    state, expected = state_with(mesh, None), state_with(mesh, 0.0)
    report = transfer.recover(state, **arguments)
    for fqn in SHAPES:
        assert same_bits(local(state["model"][fqn]), local(expected["model"][fqn])), fqn
    assert state["options"] == {"lr": 0.1}
    return report


def flip_a_bit(tensor: torch.Tensor) -> None:
    local(tensor).view(-1).view(torch.int32)[0] ^= 1


def doubtful_copies(rank: int, world_size: int, run: str) -> None:
    mesh = mesh_222()
    alive: list[int | None] = [*range(5), None, 6, 7]
    common = {"alive": alive, "timeout_seconds": 60}

    def survivors(**changes: Any) -> dict[str, Any]:
        before = state_with(mesh, 0.0)
        for fqn, odd in changes.items():
            if rank == odd:
                flip_a_bit(before["model"][fqn])
        lives = alive[rank] is not None
        return {**common, "survived": before if lives else None, "step": STEP if lives else None}

    # Two copies that differ: nothing tells which is right, and both are named.
    names = "its copies differ on rank 3 (old rank 3) and on rank 7 (old rank 7), in ["
    refused(ReplicaMismatchError, "model.columns: ", names, state=state_with(mesh, None), **survivors(columns=3))
    # The first counts where that is asked for: the flipped bit of rank 7 is not taken.
    report = recovered(mesh, **survivors(columns=7), replicas="first")
    assert report.distrusted == {7: ("model.columns",)}
    # Three copies or more: the odd one is outvoted by name.
    report = recovered(mesh, **survivors(bias=2))
    assert report.distrusted == {2: ("model.bias",)} and "not taken from old rank 2: model.bias" in str(report)
    report = recovered(mesh, **survivors(norm=2))
    assert report.distrusted == {2: ("model.norm",)}
    # A checkpoint of the same step with fingerprints tells the odd one of two, and a single copy that is wrong.
    tte.save(state_with(mesh, 0.0), Path(run, f"step-{STEP}"), fingerprints=True)
    report = recovered(mesh, **survivors(columns=3), path=run)
    assert report.distrusted == {3: ("model.columns",)} and report.num_proved > 0 and not report.checkpoint
    report = recovered(mesh, **survivors(columns=1), path=run)  # the other copy was on rank 5
    assert report.distrusted == {1: ("model.columns",)} and report.keys_from_checkpoint == ("model.columns",)
    assert report.bytes_from_checkpoint == 2 * 4 * whole("columns")[:3, 4:].numel()
    # Values that are no tensors.
    arguments = survivors()
    if rank == 6:
        arguments["survived"]["options"]["lr"] = 0.2
    report = recovered(mesh, **arguments)
    assert report.distrusted == {6: ("options.lr",)}


def test_copies_that_differ_are_told_outvoted_or_refused(run_world: Any, tmp_path: Path) -> None:
    run_world(8, doubtful_copies, str(tmp_path))


def doubtful_steps(rank: int, world_size: int, run: str) -> None:
    mesh = mesh_222()
    before = state_with(mesh, 0.0)
    alive: list[int | None] = [None, *range(1, 8)]
    arguments: dict[str, Any] = {"alive": alive, "timeout_seconds": 60, "survived": before if rank else None}
    # One of another step is outvoted: what it holds is not taken, not even for itself.
    ahead = state_with(mesh, 3.0)
    odd = {**arguments, "survived": ahead if rank == 6 else arguments["survived"]}
    report = recovered(mesh, **odd, step={0: None, 6: STEP + 1}.get(rank, STEP))
    assert report.distrusted == {6: (f"step {STEP + 1}",)} and 6 not in report.survivors and report.step == STEP
    # Half and half.
    steps = [None, 4, 4, 4, 5, 5, 5, 6]
    text = "rank 7 (old rank 7): 6), and no more than half at one"
    refused(ReplicaMismatchError, text, state=state_with(mesh, None), **arguments, step=steps[rank])
    # What nobody holds is not mixed in from another step, unless that is asked for.
    tte.save(state_with(mesh, POISON), Path(run, "step-3"))
    alive = [None if one in (1, 5) else one for one in range(8)]
    lives = alive[rank] is not None
    arguments = {
        "alive": alive,
        "survived": before if lives else None,
        "step": STEP if lives else None,
        "timeout_seconds": 60,
    }
    error = refused(MissingStateError, state=state_with(mesh, None), **arguments)
    assert {problem.fqn for problem in error.problems} == {"model.even", "model.uneven", "model.columns"}
    assert "no survivor has [0:8, 3:6], and the survivors are at step 5: pass path= of a run" in str(error)
    where = "has no finished checkpoint of step 5: it has steps 3; another step would be mixed in with checkpoint_step="
    refused(MissingStateError, where, state=state_with(mesh, None), **arguments, path=run)
    state = state_with(mesh, None)
    report = transfer.recover(state, **arguments, path=run, checkpoint_step="latest")
    assert (report.step, report.checkpoint_step) == (STEP, 3)
    poisoned = torch.cat([whole("even")[:8, :3], whole("even")[:8, 3:] + POISON], 1)
    expected = tensors_on(
        mesh, {fqn: whole(fqn) for fqn in SHAPES} | {"even": torch.cat([poisoned, whole("even")[8:]])}
    )
    assert same_bits(local(state["model"]["even"]), local(expected["even"]))


def test_steps_that_differ_are_outvoted_or_refused_and_never_mixed_in_silence(run_world: Any, tmp_path: Path) -> None:
    run_world(8, doubtful_steps, str(tmp_path))


def to_other_worlds(rank: int, world_size: int, run: str) -> None:
    """2 x 2 x 2 becomes 2 x 3 on fewer ranks, and 2 x 4 on as many, three of them fresh."""
    old = mesh_222()
    before = state_with(old, 0.0)
    six = DeviceMesh("cpu", torch.arange(6).view(2, 3), mesh_dim_names=("dp", "tp"))
    group = dist.new_group(list(range(6)))
    for mesh, alive, members in (
        (six, [0, 1, 2, 3, 4, 5], group),
        (init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")), [None, None, 2, 3, 4, 5, None, 7], None),
    ):
        if rank >= len(alive):
            continue
        numbers = {fqn: torch.zeros_like(whole(fqn)) for fqn in SHAPES}
        placements = {
            "even": [Shard(1), Shard(0)],
            "uneven": [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)],
            "columns": [Replicate(), Shard(1)],
            "norm": [Shard(0), Replicate()],
        }
        made, wanted = (
            {fqn: tte.full.distribute_tensor(of[fqn], mesh, placements[fqn]) for fqn in placements}
            for of in (numbers, {fqn: whole(fqn) for fqn in SHAPES})
        )
        state = {"model": {**made, "bias": numbers["bias"]}, "options": {"lr": 0.0}}
        lives = alive[rank] is not None
        report = transfer.recover(
            state, survived=before if lives else None, alive=alive, step=STEP if lives else None, group=members
        )
        for fqn in placements:
            assert same_bits(local(state["model"][fqn]), local(wanted[fqn])), fqn
        assert same_bits(state["model"]["bias"], whole("bias")) and state["options"] == {"lr": 0.1}
        assert not report.checkpoint and report.bytes_moved > 0


def test_into_other_meshes_of_fewer_and_of_fresh_ranks(run_world: Any, tmp_path: Path) -> None:
    run_world(8, to_other_worlds, str(tmp_path))


def with_components(rank: int, world_size: int, run: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    value = torch.arange(24.0).view(6, 4)

    def state_of(train: TrainState, rng: RngState, offset: float) -> dict[str, Any]:
        return {
            "model": {"w": tte.full.distribute_tensor(value + offset, mesh, [Replicate(), Shard(0)])},
            "train": train,
            "rng": rng,
            "note": "before" if offset == 0 else "",
            "extra": torch.zeros(3) + offset,
        }

    train = TrainState(step=STEP, samples_seen=40, tokens_seen=400)
    before = state_of(train, RngState(7, step=lambda: train.step), 0.0)
    expected = torch.get_rng_state()
    tte.save(before, Path(run, f"step-{STEP}"))
    before.pop("extra")  # nobody holds it any more
    before["loader"] = {"samples": rank}  # nobody wants it
    alive: list[int | None] = [0, 1, 2, None]
    lives = alive[rank] is not None
    arguments: dict[str, Any] = {
        "alive": alive,
        "survived": before if lives else None,
        "step": STEP if lives else None,
        "timeout_seconds": 60,
    }

    def fresh() -> tuple[dict[str, Any], TrainState]:
        counters = TrainState()
        return state_of(counters, RngState(7, step=lambda: counters.step), -1.0), counters

    state, _ = fresh()
    missing = "rng: the checkpoint lacks the generators of rank(s) 3 of 4, and the survivors are at step 5"
    reset = "policy=ElasticPolicy({'rng': 'reset'})"
    with pytest.raises(StateRefusedError) as caught:
        transfer.recover(state, **arguments)
    assert missing in str(caught.value) and reset in str(caught.value), str(caught.value)
    assert "extra: no survivor has it" in str(caught.value) and state["note"] == ""

    # With the checkpoint: the generators, of which one is lost, and what nobody holds.
    state, counters = fresh()
    torch.manual_seed(99)
    report = transfer.recover(state, **arguments, path=run)
    assert (counters.step, counters.samples_seen, state["note"]) == (STEP, 40, "before")
    assert same_bits(torch.get_rng_state(), expected) and same_bits(state["extra"], torch.zeros(3))
    assert same_bits(state["model"]["w"].to_local(), value.chunk(2)[rank % 2])
    assert set(report.keys_from_checkpoint) == {"extra", "rng"} and report.bytes_from_checkpoint == 4 * 12
    assert "train  reshard  step 5, 40 samples seen" in str(report) and "rng    reshard  exact on the same" in str(
        report
    )

    # Or the generators start anew, and what nobody holds is left alone.
    state, counters = fresh()
    policy = ElasticPolicy({"rng": "reset", "extra": "omit"})
    report = transfer.recover(state, **arguments, policy=policy)
    assert not report.checkpoint and counters.step == STEP, (report, counters)
    assert same_bits(state["extra"], torch.zeros(3) - 1), state["extra"]
    assert "rng    reset    starts anew" in str(report)


def test_components_come_from_survivors_or_the_checkpoint(run_world: Any, tmp_path: Path) -> None:
    run_world(4, with_components, str(tmp_path))


def with_wrong_arguments(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    before = {"model": {"w": tte.full.distribute_tensor(torch.ones(4), mesh, [Shard(0)])}}

    def target() -> dict[str, Any]:
        return {"model": {"w": tte.full.distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}}

    given: dict[str, Any] = {"survived": before, "alive": [0, 1], "step": 1, "timeout_seconds": 60}
    for wrong, fragment in (
        ({"alive": [0]}, "alive: got [0], expected the old rank, or None, of each of the 2 ranks, none twice"),
        ({"alive": [1, 1]}, "alive: got [1, 1]"),
        ({"alive": [0, None]}, "alive: says None of rank 1, which passes survived"),
        ({"survived": before if rank else None}, "alive: says 0 of rank 0, which passes no survived"),
        ({"step": None}, "step: is missing on rank 0; survivors pass the training step"),
    ):
        refused(WrongArgumentError, fragment, state=target(), **{**given, **wrong})
    swapped = "lies on a mesh on which this rank was 0; alive says that rank 0 was 1"
    refused(ReplicaMismatchError, swapped, state=target(), **{**given, "alive": [1, 0]})
    several = {**given, "alive": [0, 1] if rank else [0, 2]}
    refused(ReplicaMismatchError, "alive: is (0, 2) on rank 0, (0, 1) on rank 1", state=target(), **several)
    nobody = {**given, "survived": None, "alive": [None, None], "step": None}
    refused(MissingStateError, "no rank of the old world is left", state=target(), **nobody)
    with pytest.raises(ValueError, match="expected 'equal' or 'first'"):
        transfer.recover(target(), **given, replicas="last")  # type: ignore[arg-type]
    shares = {"model": {"w": before["model"]["w"]}}
    with pytest.raises(LayoutError, match="shares memory with"):
        transfer.recover(shares, **given)


def recover_tied(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Into a state whose two keys have one memory. This process alone."""
    head = torch.zeros(3)
    state = {"emb": head, "head": head}
    transfer.recover(state, survived={"emb": first, "head": second}, alive=[0], step=STEP)
    return state["emb"], state["head"]


def test_tied_keys_of_which_survivors_hold_two_values_are_refused() -> None:
    value = torch.arange(3.0)
    for second in (value, value.clone()):
        emb, head = recover_tied(value, second)
        assert emb is head and same_bits(emb, value)
    with pytest.raises(
        ReplicaMismatchError, match=r"head: has the memory of emb .* hold two values of them, on rank 0"
    ):
        recover_tied(value, value + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_only_the_checkpoint_has_is_cast_as_a_load_casts(tmp_path: Path, dtype: torch.dtype) -> None:
    tte.save({"w": torch.ones(3), "only": torch.full((2,), 1 / 3)}, tmp_path / f"step-{STEP}")
    state = {"w": torch.zeros(3), "only": torch.zeros(2, dtype=dtype)}
    options: dict[str, Any] = {"survived": {"w": torch.ones(3)}, "alive": [0], "step": STEP, "path": tmp_path}
    if dtype == torch.bfloat16:
        with pytest.raises(
            ReshardError, match="only: saved as torch.float32, the target is torch.bfloat16: values can"
        ):
            transfer.recover(state, **options)
        return
    transfer.recover(state, **options)
    assert torch.equal(state["only"], torch.full((2,), 1 / 3).double())


def test_arguments(run_world: Any) -> None:
    run_world(2, with_wrong_arguments)


class Counted:
    """A component whose state cannot be unpickled on rank 1."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]

    def reshard(self, saved: Any, old: World, new: World) -> Resharded:
        return Resharded(saved, "taken")


class NotOnRank1:
    def __reduce__(self) -> Any:
        return fail_on_rank_1, ()


def fail_on_rank_1() -> NotOnRank1:
    if dist.get_rank() == 1:
        raise RuntimeError("cannot be made here")
    return NotOnRank1()


def with_other_entries_on_each_rank(rank: int, world_size: int) -> None:
    given: dict[str, Any] = {"alive": [0, 1], "step": 1, "timeout_seconds": 60}
    state = {f"stage{1 - rank}": {"w": torch.zeros(3)}}
    held = {f"stage{rank}": {"w": torch.full((3,), float(rank))}}
    report = transfer.recover(state, survived=held, **given)
    assert same_bits(state[f"stage{1 - rank}"]["w"], torch.full((3,), float(1 - rank))), state
    assert report.bytes_moved == 2 * 12 and not report.checkpoint

    survived = {"counted": Counted(NotOnRank1())} if rank == 0 else None
    given |= {"alive": [0, None], "step": None if rank else 1}
    with pytest.raises(TransferFailedError, match="in phase ask: rank 1: RuntimeError: cannot be made here"):
        transfer.recover({"counted": Counted(0)}, survived=survived, **given)


def test_ranks_that_want_other_entries_than_they_hold(run_world: Any) -> None:
    """As stages of a pipeline do; and what cannot be unpickled on one rank fails on all of them."""
    run_world(2, with_other_entries_on_each_rank)


@pytest.mark.parametrize(
    ("values", "right"), [("aa", "a"), ("ab", None), ("aab", "a"), ("abc", None), ("aabb", None), ("abbb", "b")]
)
def test_more_than_half_of_three_or_more_are_a_majority(values: str, right: str | None) -> None:
    assert majority(dict(enumerate(values))) == right
