"""Brings the state back after ranks were lost: from the memory of those that are left, and the rest from a checkpoint.

A recovery is a transfer whose source is an old world with ranks missing, followed by a load of what nobody holds. Its
phases, of which the first four change nothing:

1. *plan*: all ranks tell what they hold and want; the coordinator agrees on the survivors' step and layouts;
2. *compare*: survivors take the sums of their shards; the coordinator decides whose copies are taken, who sends what,
   and what no survivor holds;
3. *ask*: components with a rule of their own are asked for their part;
4. *choose*, *prepare*, *plan*: the load of what is missing, if anything is;
5. *agree*, *exchange*: the transfer;
6. *read values*, *read*, *take*: the load, and components take their new state.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.operation.arguments import check_seconds
from torchtitan_ext.checkpoint.operation.choose_step import StepChoice, choose_step
from torchtitan_ext.checkpoint.operation.component_plans import Components, PlannedSource
from torchtitan_ext.checkpoint.operation.load_phases import (
    LoadJob,
    open_source,
    plan_load,
    prepare_load,
    read_load,
    take_load,
)
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, Phases, checking_arguments
from torchtitan_ext.checkpoint.planners.load_planner import LoadPlanner
from torchtitan_ext.checkpoint.rules.load_rules import UNTOUCHED
from torchtitan_ext.checkpoint.rules.policy import ElasticPolicy, Source, check_rules
from torchtitan_ext.checkpoint.rules.report import ComponentLine
from torchtitan_ext.checkpoint.tables.component import (
    Resharded,
    can_reshard,
    disagreeing_states,
    is_stateful,
    reshard_state,
)
from torchtitan_ext.checkpoint.tables.key_table import BoxesEntry, KeyEntry, TensorEntry, describe_state, host_digest
from torchtitan_ext.checkpoint.tables.tensor_sums import TensorSummer
from torchtitan_ext.errors import (
    CannotReshardError,
    NoCheckpointError,
    Problem,
    TorchtitanExtError,
    check_argument,
    check_counts,
    refusal,
)
from torchtitan_ext.layout.dtensor import describes_itself, local_tensor
from torchtitan_ext.layout.layout import LayoutRules, ShardOrder, row_major_position
from torchtitan_ext.layout.own_boxes import has_own_boxes, own_boxes
from torchtitan_ext.ranks.exchange import check_usable
from torchtitan_ext.state.nested import flat_keys
from torchtitan_ext.state.plain_value import check_classes
from torchtitan_ext.state.value_digest import digest_value
from torchtitan_ext.storage import FileReader
from torchtitan_ext.storage.commit.steps import has_finished, step_of, step_paths
from torchtitan_ext.transfer.copies import HeldCopies, Replicas, SavedSums
from torchtitan_ext.transfer.endpoint import Endpoint, choose_device, describe_endpoint, shared_memory_problems
from torchtitan_ext.transfer.phases import transfer_phases
from torchtitan_ext.transfer.plan import TransferPlan
from torchtitan_ext.transfer.recover_report import RecoverReport
from torchtitan_ext.transfer.survivors import (
    RecoverPart,
    Start,
    SurvivorOffer,
    Survivors,
    agree_on_survivors,
    plan_recovery,
    starts_of,
)
from torchtitan_ext.transfer.transport import GroupTransport

_AGREEING = "ranks agreed on what survived; nothing was changed"
_COMPARING = "copies of survivors were compared; nothing was changed"
_ASKING = "components were asked for their part; nothing was changed"


def recover(
    state: dict[Any, Any],
    *,
    survived: Mapping[Any, Any] | None = None,
    alive: Sequence[int | None],
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
    path: str | os.PathLike[str] | None = None,
    checkpoint_step: StepChoice | None = None,
    policy: ElasticPolicy | None = None,
    layouts: Mapping[str, ShardOrder] | None = None,
    replicas: Replicas = "equal",
    allow_classes: Collection[Callable[..., Any]] = (),
    bucket_bytes: int = ops.DEFAULT_BUCKET_BYTES,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> RecoverReport:
    """Fills a state dict from what is left in the memory of a job that lost ranks, in place. Collective.

    All ranks of the new world call it: survivors with what they still hold, fresh ranks without. The two worlds may
    have any meshes. What no survivor holds, and only that, comes from the run's checkpoint of the same training step;
    where there is none the recovery is refused. Copies of one shard are compared before any is taken: with the
    fingerprints of that checkpoint, where it has them, else with each other.

    Args:
        state: What to fill, as in ``load``: DTensors on the new meshes, with memory of their own, components, plain
            values. Every rank has its part.
        survived: What this rank holds of the old world: a state dict with the keys of ``state``, of DTensors on the old
            meshes, whose process groups may be gone: they are read as plain values. ``None`` on a fresh rank.
        alive: By new rank (a position in ``group``) the rank that it was in the old world, ``None`` for fresh ranks.
            The same on every rank.
        step: The training step of ``survived``; fresh ranks leave it out.
        group: The new world: the default group if left out.
        path: The directory of the run (``<run>/step-<number>``), for what no survivor holds.
        checkpoint_step: Read that from another step, as ``load`` takes it: a number, ``"latest"`` or ``"last-good"``.
            The state is then a mix of two steps. By default only the survivors' own step is read.
        policy: What to do with each component: ``"reset"`` starts it anew, ``"omit"`` leaves it as it is.
        layouts: Sharding orders that placements cannot express, old and new, by canonical fqn or glob.
        replicas: ``"first"`` takes the copy of the first rank where copies differ and nothing tells which is right.
        allow_classes: As in ``load``.
        bucket_bytes: As in ``plan_reshard``.
        timeout_seconds: How long a rank waits for the others in each phase.

    Returns:
        What came from where, and whose copies were not taken.

    Raises:
        StateRefusedError: (a subclass) Copies differ, survivors are of different steps, a layout stays in doubt, or
            nobody holds what is wanted. The same on every rank, names keys and ranks; nothing was changed.
        TransferFailedError: A rank failed; names what may be part-written. The same on every rank.
        LostRankError: A rank is gone or does not take part.
    """
    check_usable("recover", group)
    with checking_arguments("recover", group):
        check_argument("recover", "state", state, dict, "a dict such as {'model': model.state_dict()}")
        check_argument("recover", "survived", survived, (Mapping, type(None)), "a dict with the keys of state, or None")
        check_argument("recover", "alive", alive, (list, tuple), "a list of old ranks, with None for fresh ranks")
        check_argument("recover", "path", path, (str, os.PathLike, type(None)), "the directory of a run")
        check_rules("recover", policy)
        check_classes("recover", allow_classes)
        check_seconds("recover", timeout_seconds)
        check_counts("recover", step=step, bucket_bytes=bucket_bytes)
        if replicas not in get_args(Replicas):
            raise ValueError(f"recover: got replicas={replicas!r}, expected 'equal' or 'first'")
    job = _Recovery(
        state, survived, tuple(alive), step, path, checkpoint_step, policy or ElasticPolicy(), layouts, replicas
    )
    planner = LoadPlanner(layouts=layouts, allow_classes=allow_classes, allow_unclaimed=["*"])
    with transfer_phases(group, timeout_seconds, "recover") as phases:
        start, part = _plan(job, phases, bucket_bytes)
        from_disk = _ask_components(job, part, phases)
        load = _plan_load(job, part, start, from_disk, planner, phases)
    plan = TransferPlan(
        job.source,
        job.target,
        part.part,
        phases.group,
        transport=GroupTransport(phases.group, bucket_bytes),
        timeout_seconds=timeout_seconds,
        operation="recover",
    )
    moved = plan.run()
    seconds = {**phases.seconds, **moved.seconds}
    with transfer_phases(group, timeout_seconds, "recover") as phases:
        _read_and_take(job, load, phases)
        seconds |= phases.seconds
    report = dataclasses.replace(part.report, components=tuple(job.lines), seconds=seconds)
    if load is None:
        return report
    return dataclasses.replace(
        report,
        bytes_from_checkpoint=load.num_bytes,
        checkpoint=load.planned.opened.name,
        checkpoint_step=step_of(load.planned.opened.name),
        keys_from_checkpoint=load.keys,
    )


@dataclass
class _Recovery:
    """One call on one rank: its arguments, then what is worked out.

    Attributes:
        components: The entries of the state by what is done with them.
        carried: Those with a rule of their own, which are asked.
        source, target: What survived, and what is filled.
        entries: What survived, by key.
        partial: What this rank loads: views of absent boxes, whole tensors, other values, components.
        lines: What becomes of components.
    """

    state: dict[Any, Any]
    survived: Mapping[Any, Any] | None
    alive: tuple[int | None, ...]
    step: int | None
    path: str | os.PathLike[str] | None
    checkpoint_step: StepChoice | None
    policy: ElasticPolicy
    layouts: Mapping[str, ShardOrder] | None
    replicas: Replicas
    components: Components = field(default_factory=Components)
    carried: dict[Any, Any] = field(default_factory=dict)
    source: Endpoint = field(init=False)
    target: Endpoint = field(init=False)
    entries: Mapping[str, KeyEntry] = field(default_factory=dict)
    partial: dict[Any, Any] = field(default_factory=dict)
    lines: list[ComponentLine] = field(default_factory=list)


@dataclass(frozen=True)
class _PlannedLoad:
    """The load of what no survivor holds.

    Attributes:
        num_bytes: Bytes of the tensors among it, over all ranks.
        keys: What some rank loads.
    """

    job: LoadJob
    planned: PlannedSource
    components: Components
    num_bytes: int
    keys: tuple[str, ...]


def _plan(job: _Recovery, phases: Phases, bucket_bytes: int) -> tuple[Start, RecoverPart]:
    found: list[Survivors] = []  # of the coordinator

    def agree(offers: list[SurvivorOffer]) -> list[Start]:
        found.append(agree_on_survivors(offers))
        return starts_of(found[0])

    def decide(held: list[HeldCopies]) -> list[RecoverPart]:
        saved = None if job.path is None else _saved_sums(Path(job.path), found[0].step)
        return plan_recovery(found[0], held, saved, job.replicas)

    # What one rank holds another one may want: of a pipeline, each wants the keys of its own stage.
    wanted = set().union(*phases.on_all("plan", lambda: _sort_components(job), doing=_AGREEING))
    start = phases.through_coordinator(
        "plan", lambda: _offer(job, wanted, phases, bucket_bytes), agree, doing=_AGREEING
    )
    part = phases.through_coordinator("compare", lambda: _held_copies(job, start, phases), decide, doing=_COMPARING)
    return start, part


def _offer(job: _Recovery, wanted: Collection[str], phases: Phases, bucket_bytes: int) -> SurvivorOffer:
    survived = None
    if job.survived is not None:
        # What nobody wants is not looked at: the values of other entries may differ by rank.
        entries = {key: value for key, value in job.survived.items() if str(key) in wanted}
        survived = {key: value.state_dict() if is_stateful(value) else value for key, value in entries.items()}
    left_out = {str(key) for key in job.components.values if _action(job, key) in ("reset", "omit")}

    def is_left_out(fqn: str) -> bool:
        name = next((name for name in left_out if fqn == name or fqn.startswith(f"{name}.")), None)
        return name is not None or job.policy.key_action(fqn, "") in ("reset", "omit")

    job.source = describe_endpoint("survived", survived, job.layouts, is_filled=False, is_left_out=is_left_out)
    job.target = describe_endpoint("state", job.components.values, job.layouts, is_filled=True, is_left_out=is_left_out)
    problems = [*job.source.problems, *job.target.problems, *_alive_problems(job, phases)]
    problems += choose_device(job.source, job.target, phases.group)
    if not problems:
        problems += shared_memory_problems(job.source, job.target)
    job.entries = describe_state(job.source.values, {}, LayoutRules(job.layouts)).entries
    old_size, misplaced = _old_world(job, phases.rank) if not problems else (0, [])
    arguments = {
        "alive": job.alive,
        "path": "" if job.path is None else os.fspath(job.path),
        "checkpoint_step": job.checkpoint_step,
        "policy": repr(job.policy),
        "replicas": job.replicas,
        "bucket_bytes": bucket_bytes,
        "components": sorted(map(str, job.carried)),
    }
    return SurvivorOffer(
        source=job.source.table.message,
        target=job.target.table.message,
        host=host_digest(),
        step=None if job.survived is None else job.step,
        alive=job.alive,
        old_size=old_size,
        arguments=arguments,
        problems=(*problems, *misplaced),
        tied=job.target.tied,
    )


def _action(job: _Recovery, key: Any) -> str:
    return job.policy.component_action(str(key))


def _sort_components(job: _Recovery) -> list[str]:
    """Sorts the entries of the state by what is done with them, as a load does; names those with values to fill."""
    for key, component in job.state.items():
        action = _action(job, key)
        if not is_stateful(component):
            job.components.values[key] = component
        elif action == "reset" and hasattr(component, "reset"):
            job.components.to_reset.append(key)
            job.lines.append(ComponentLine(str(key), "reset", "starts anew"))
        elif action in ("reset", "omit"):
            job.lines.append(ComponentLine(str(key), job.policy.component_action(str(key)), "left as is"))
        elif action != "keep" and can_reshard(component):
            job.carried[key] = component
        else:
            job.components.values[key] = component.state_dict()
    return [str(key) for key in job.components.values]


def _alive_problems(job: _Recovery, phases: Phases) -> list[Problem]:
    """What is wrong with ``alive``, and with what this rank passes beside it."""
    known = [old for old in job.alive if old is not None]
    is_rank = all(isinstance(old, int) and not isinstance(old, bool) and old >= 0 for old in known)
    if len(job.alive) != phases.size or not is_rank or len(set(known)) < len(known):
        expected = f"the old rank, or None, of each of the {phases.size} ranks, none twice"
        what = f"got {list(job.alive)!r}, expected {expected}"
        return [Problem("wrong_argument", "alive", what)]
    was = job.alive[phases.rank]
    if (was is None) != (job.survived is None):
        passed = "no survived" if job.survived is None else "survived"
        what = f"says {was} of rank {phases.rank}, which passes {passed}; None stands for ranks that hold nothing"
        return [Problem("wrong_argument", "alive", what)]
    if job.survived is not None and job.step is None:
        what = f"is missing on rank {phases.rank}; survivors pass the training step of what they hold"
        return [Problem("wrong_argument", "step", what)]
    return []


def _old_world(job: _Recovery, rank: int) -> tuple[int, list[Problem]]:
    """How many ranks the old world had by this rank's meshes, and whether the rank stood on them where it says."""
    was = job.alive[rank] if rank < len(job.alive) else None
    reports = {
        id(entry.report): (fqn, entry.report) for fqn, entry in job.entries.items() if isinstance(entry, TensorEntry)
    }
    old_size = 0
    for fqn, report in reports.values():
        if report.mesh is None:
            continue
        old_size = max(old_size, 1 + max(report.mesh.ranks))
        stood = report.mesh.ranks[row_major_position(report.coordinate, report.mesh.shape)]
        if was is not None and stood != was:
            what = f"lies on a mesh on which this rank was {stood}; alive says that rank {rank} was {was}"
            return old_size, [Problem("ranks_disagree", fqn, what)]
    return old_size, []


def _held_copies(job: _Recovery, start: Start, phases: Phases) -> HeldCopies:
    """What this rank's copies are compared by, and the states of its components with a rule of their own."""
    if not start.is_taken or job.survived is None:
        return HeldCopies()
    values = job.source.values
    summer, digests = TensorSummer(), {}
    for fqn, entry in job.entries.items():
        phases.at(fqn)
        if isinstance(entry, (TensorEntry, BoxesEntry)):
            summer.add(fqn, values[fqn], entry, start.steps.get(fqn))
        else:
            digests[fqn] = digest_value(values[fqn])
    components: dict[str, tuple[Any, Any]] = {}
    for key in job.carried:
        if key in job.survived:
            held = job.survived[key]
            flat = flat_keys({str(key): held.state_dict() if is_stateful(held) else held})
            components |= {fqn: (flat.stock_paths[fqn], value) for fqn, value in flat.values.items()}
    return HeldCopies(summer.table(), digests, components)


def _saved_sums(run: Path, step: int) -> SavedSums | None:
    """The fingerprints of the run's checkpoint of this step; ``None`` where there are none, or they cannot be read."""
    try:
        found = step_paths(run).get(step)
        if found is None or not has_finished(found):
            return None
        opened = open_source(Source(found), LoadPlanner(), 0)
        if opened.is_of_one_rank or not isinstance(opened.reader, FileReader):
            return None
        opened.reader.set_up_storage_reader(opened.metadata, True)
        return SavedSums(opened.reader, opened.metadata.state_dict_metadata) if opened.reader.has_sums else None
    except (TorchtitanExtError, OSError, ValueError):  # copies are then compared with each other
        return None


def _ask_components(job: _Recovery, part: RecoverPart, phases: Phases) -> dict[str, str]:
    """Asks components with a rule of their own; by name why some of them need a checkpoint. Collective."""

    def ask() -> dict[str, str]:
        merged = part.components()
        reasons: dict[str, str] = {}
        for key, component in job.carried.items():
            name = str(key)
            phases.at(name)
            if name not in merged:
                reasons[name] = "no survivor has anything of it"
                continue
            try:
                job.components.resharded[key] = reshard_state(component, merged[name], part.old, part.new)
            except CannotReshardError as error:
                reasons[name] = error.reason
            except Exception as error:
                reasons[name] = f"{type(component).__name__} cannot take it ({type(error).__name__}: {error})"
        return reasons

    found: dict[str, str] = {}
    for reasons in phases.on_all("ask", ask, doing=_ASKING):
        found = {**reasons, **found}
    for key in [key for key in job.carried if str(key) in found]:
        job.components.resharded.pop(key, None)
    lines = [ComponentLine(str(key), "reshard", new.note) for key, new in job.components.resharded.items()]
    job.lines += lines
    return found


def _plan_load(
    job: _Recovery,
    part: RecoverPart,
    start: Start,
    from_disk: Mapping[str, str],
    planner: LoadPlanner,
    phases: Phases,
) -> _PlannedLoad | None:
    """Plans the load of what no survivor holds; ``None`` where survivors hold all. Collective; changes nothing.

    Raises:
        StateRefusedError: There is no checkpoint of it.
    """
    lacking, absent = part.absent_keys()
    texts = {**dict.fromkeys(lacking, "no survivor has it"), **absent}
    if not texts and not from_disk:
        phases.on_all("ask", lambda: _check_samples(job.components.resharded), doing=_ASKING)
        return None
    advice = f", and the survivors are at step {start.step}: "
    if job.path is None:
        raise _nowhere(texts, from_disk, f"{advice}pass path= of a run with a checkpoint of that step")
    try:
        chosen = choose_step(job.path, start.step if job.checkpoint_step is None else job.checkpoint_step, phases)
    except NoCheckpointError as error:
        mix = "; another step would be mixed in with checkpoint_step=" if job.checkpoint_step is None else ""
        raise _nowhere(texts, from_disk, f"{advice}{error.run} {error.detail}{mix}") from None
    built = phases.on_all("choose", lambda: _build_partial(job, part, lacking, from_disk), doing=_ASKING)
    partial = job.partial
    load = LoadJob(partial, Source(chosen), planner, ElasticPolicy(strict="ignore"), phases)
    _, opened, components = prepare_load(load)
    planned = plan_load(load, opened, components)
    report = planned.report
    gone = [] if report is None else [fqn for fqn in report.missing if fqn in texts]
    gone_components = [
        name
        for name in from_disk
        if any(str(key) == name and key not in components.resharded for key in job.carried)
        and components.plans[name].note != UNTOUCHED
    ]
    if gone or gone_components:
        of_components = {name: from_disk[name] for name in gone_components}
        raise _nowhere({fqn: texts[fqn] for fqn in gone}, of_components, f"{advice}{chosen} does not have it either")
    if job.checkpoint_step is None:
        resharded = {**job.components.resharded, **components.resharded}
        phases.on_all("ask", lambda: _check_samples(resharded), doing=_ASKING)
    return _PlannedLoad(load, planned, components, sum(built), (*texts, *from_disk))


def _nowhere(texts: Mapping[str, str], of_components: Mapping[str, str], advice: str) -> Exception:
    """The refusal of what neither survivors nor a checkpoint have."""
    advice += "; or load the last checkpoint as a whole"
    problems = [Problem("missing_key", fqn, what, advice) for fqn, what in texts.items()]
    for name, what in of_components.items():
        anew = f", or start it anew with policy=ElasticPolicy({{{name!r}: 'reset'}})"
        problems.append(Problem("cannot_reshard", name, what, advice + anew))
    return refusal("recover", problems)


def _build_partial(job: _Recovery, part: RecoverPart, lacking: Collection[str], from_disk: Mapping[str, str]) -> int:
    """Makes the state dict of what this rank loads: views of absent boxes, whole values, components. Returns bytes."""
    problems: list[Problem] = []
    num_bytes = 0
    names = [name for of_section in job.target.table.names for name in of_section]
    for key in _core.expand_absent(part.absent):
        fqn = names[key.position]
        view = _view_of_boxes(fqn, job.target.values[fqn], key.boxes)
        if isinstance(view, Problem):
            problems.append(view)
        else:
            job.partial[fqn] = view
            num_bytes += key.num_bytes
    for fqn in set(lacking).intersection(names):
        value = job.partial[fqn] = job.target.values[fqn]
        num_bytes += local_tensor(value).nbytes if isinstance(value, torch.Tensor) else 0
    job.partial |= {key: component for key, component in job.carried.items() if str(key) in from_disk}
    if problems:
        raise refusal("recover", problems)
    return num_bytes


def _view_of_boxes(fqn: str, value: Any, boxes: Sequence[_core.AbsentBox]) -> torch.Tensor | Problem:
    """The memory of a tensor, which states that it has these boxes and no others: a load fills nothing else of it."""
    local = local_tensor(value)
    bases: dict[int, tuple[int, ...]] = {}
    if has_own_boxes(value):
        bases = {number: chunk.local_offsets for number, chunk in enumerate(own_boxes(value)[1])}
    elif describes_itself(value):
        what = f"no survivor has all of it, and a {type(value).__name__} cannot be read in part; use a DTensor"
        return Problem("unsupported_tensor", fqn, what)
    view: Any = local.detach()
    view.global_shape = tuple(value.global_shape) if has_own_boxes(value) else tuple(value.shape)
    view.global_offsets = tuple(box.offsets for box in boxes)
    view.local_offsets = tuple(
        tuple(map(sum, zip(box.local_offsets, bases.get(box.chunk, (0,) * len(box.sizes)), strict=True)))
        for box in boxes
    )
    view.local_sizes = tuple(box.sizes for box in boxes)
    made: torch.Tensor = view
    return made


def _check_samples(resharded: Mapping[Any, Resharded]) -> None:
    """Refuses states of components that count other samples than were served: they are of different moments."""
    names, counts = disagreeing_states(resharded)
    if names:
        what = f"samples seen by the run: {counts}; survivors pass the states of one step, or reset one of them"
        raise refusal("recover", [Problem("cannot_reshard", name, what) for name in names])


def _read_and_take(job: _Recovery, load: _PlannedLoad | None, phases: Phases) -> None:
    """Reads what no survivor held, and gives components their new state. Collective."""
    if load is not None:
        read_load(dataclasses.replace(load.job, phases=phases), load.planned, load.components)
        values = {fqn: job.partial[fqn] for fqn in load.keys if fqn in job.target.values and fqn in job.partial}
        job.target.set_objects({fqn: one for fqn, one in values.items() if not isinstance(one, torch.Tensor)})
        job.components.resharded |= load.components.resharded
        report = load.planned.report
        names = {str(key) for key in load.components.resharded}
        job.lines += [] if report is None else [line for line in report.components if line.name in names]
    take_load(LoadJob(job.state, Source(), LoadPlanner(), job.policy, phases), job.components)
