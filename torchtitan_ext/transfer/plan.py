"""A transfer that was planned once and can run many times."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_ext import _core, ops
from torchtitan_ext.checkpoint.operation.phases import Phases, checking_arguments
from torchtitan_ext.errors import (
    CheckpointFailedError,
    Problem,
    TransferFailedError,
    check_counts,
    differing,
    named,
    refusal,
)
from torchtitan_ext.fingerprints import Fingerprint, fingerprint_over
from torchtitan_ext.layout.dtensor import view_of
from torchtitan_ext.ranks.groups import position_in
from torchtitan_ext.transfer.endpoint import Endpoint
from torchtitan_ext.transfer.planning import RankPart, Replicas
from torchtitan_ext.transfer.sent_sums import different_boxes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TransferResult:
    """What one run did on this rank.

    Attributes:
        version: The number that the source's ranks gave to ``run``; ``None`` where they gave none.
        bytes_sent, bytes_received: To and from other ranks.
        bytes_kept: From this rank's source into its own target.
        seconds: How long each phase took.
        unproved: With ``verify``: target keys of which the ranks hold a part of the tensor only.
    """

    version: int | None
    bytes_sent: int
    bytes_received: int
    bytes_kept: int
    seconds: Mapping[str, float]
    unproved: tuple[str, ...] = ()


class TransferPlan:
    """Which rank sends which part of the source to whom: see ``plan_reshard``.

    Attributes:
        version: The version of the target's state, by the last run; ``None`` before the first run, after a run without
            a version, and after one that failed while tensors moved, which may have left the target part-written. A run
            that was refused, or failed before, leaves it.
    """

    def __init__(
        self,
        source: Endpoint,
        target: Endpoint,
        part: RankPart,
        group: dist.ProcessGroup | None,
        *,
        bucket_bytes: int,
        timeout_seconds: float,
        replicas: Replicas = "equal",
    ) -> None:
        self.version: int | None = None
        self._source = source
        self._target = target
        self._part = part
        self._group = group
        self._filled = part.filled
        self._bucket_bytes = bucket_bytes
        self._planned: ops.PlannedExchange | None = None
        self._timeout_seconds = timeout_seconds
        self._replicas = replicas
        self._num_runs = 0
        self._sends = _Side(source, part.sends, is_filled=False)
        self._receives = _Side(target, part.receives, is_filled=True)
        self._fills = _core.expand_fills(part.fills, target.first_tensor)

    def run(self, *, version: int | None = None, verify: bool = False) -> TransferResult:
        """Fills the targets, in place, with what the sources hold now. Collective over the group; plans nothing.

        Args:
            version: A number for the state, such as the training step; ranks without a source leave it out. All others
                give the same.
            verify: Whether replicas of the source are compared before anything moves, and the target's fingerprints
                with the source's afterwards, without gathering tensors. Of keys that are cast or made by a transform
                the sums of what was sent are compared with those of what lies there.

        Raises:
            StateRefusedError: A tensor has other memory than when this was planned, ranks give several versions, or
                replicas differ. The same on every rank; nothing was changed.
            TransferFailedError: The transfer failed on some rank, or ``verify`` found another target than source; names
                the part-written keys. The same on every rank.
            LostRankError: A rank is gone or does not take part.
        """
        with checking_arguments("TransferPlan.run", self._group):
            check_counts("TransferPlan.run", version=version)
        run = _Run(version, verify)
        with transfer_phases(self._group, self._timeout_seconds) as phases:
            found = phases.on_all("agree", lambda: self._offer(run), doing="ranks agreed on a transfer")
            problems = [problem for offer in found for problem in offer.problems]
            problems += _differing(found)
            given = {rank: offer.version for rank, offer in enumerate(found) if offer.version is not None}
            problems = problems or differing(
                "version", list(given.values()), ranks=list(given), advice="give one number, or none on some ranks"
            )
            if problems:
                raise refusal("reshard", problems)
            held = self._fingerprint(phases, self._source) if verify else None
            if held is not None and held.differing and self._replicas != "first":
                what = 'has replicas that differ in the source; plan it with replicas="first" to take the first one'
                raise refusal("reshard", [Problem("replicas_differ", fqn, what) for fqn in held.differing])
            for offer in found:
                run.objects.update(offer.objects)
            run.is_memory = all(offer.is_memory for offer in found)
            self._num_runs += 1
            self.version = None
            doing = f"ranks exchanged tensors; the target may be part-written: {named(self._filled)}"
            with phases.changing(self._filled, doing):
                phases.on_all("exchange", lambda: self._exchange(run), exchange_name=self._name_of("exchange"))
            unproved = () if held is None else self._prove(phases, held, run)
            phases.log_metrics(logger, self._part.total_bytes)
        self.version = next(iter(given.values()), None)
        bytes_to, bytes_from = self._sends.bytes_of_peer, self._receives.bytes_of_peer
        return TransferResult(
            version=self.version,
            bytes_sent=sum(bytes_to.values()) - bytes_to.get(phases.rank, 0),
            bytes_received=sum(bytes_from.values()) - bytes_from.get(phases.rank, 0),
            bytes_kept=bytes_from.get(phases.rank, 0),
            seconds=dict(phases.seconds),
            unproved=unproved,
        )

    @property
    def bytes_between(self) -> Mapping[tuple[int, int], int]:
        """What the first rank sends to the second one, in groups of at most 64 ranks; else this rank's part."""
        rank = 0 if self._group is None else position_in(self._group)
        return self._part.bytes_between or {
            **{(rank, peer): num_bytes for peer, num_bytes in self._sends.bytes_of_peer.items()},
            **{(peer, rank): num_bytes for peer, num_bytes in self._receives.bytes_of_peer.items()},
        }

    def describe(self) -> str:
        """``bytes_between`` as text, a line for each pair of ranks. Not collective."""
        lines = [f"{self._part.total_bytes:,} bytes in all"]
        for (sending, wanting), num_bytes in sorted(self.bytes_between.items()):
            to = "keeps" if sending == wanting else f"-> rank {wanting}:"
            lines.append(f"rank {sending} {to} {num_bytes:,} bytes")
        return "\n".join(lines)

    def _offer(self, run: _Run) -> _Offer:
        """What the other ranks get to know. What can fail on this rank alone is done here, before anything moves."""
        problems = []
        for side, endpoint in (("source", self._source), ("target", self._target)):
            reason = endpoint.why_changed()
            if reason is not None:
                problems.append(Problem("cannot_reshard", side, reason))
        run.sources = self._sends.tensors(self._source.memory_to_read())
        run.filled, run.finish = self._target.memory_to_fill()
        run.targets = self._receives.tensors(run.filled)
        objects = self._source.objects_now(self._part.objects_sent)
        for fqn, value in objects.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                what = f"is no tensor, and cannot be sent: {type(error).__name__}: {error}"
                problems.append(Problem("unsupported_value", fqn, what))
        return _Offer(
            plan=self._part.number,
            version=run.version,
            verify=run.verify,
            objects={} if problems else objects,
            problems=tuple(problems),
            is_memory=self._source.is_memory and self._target.is_memory,
        )

    @property
    def _group_name(self) -> str:
        return "" if self._group is None else self._group.group_name

    def _name_of(self, phase: str) -> str:
        """What no other exchange of the group is named, the same on all ranks."""
        return f"{self._part.number:x}/{self._num_runs}/{phase}"

    def _exchange(self, run: _Run) -> None:
        planned = self._planned if run.is_memory else None
        if planned is None:
            sides = run.sources, run.targets, self._sends.boxes, self._receives.boxes
            planned = ops.PlannedExchange(*sides, group_name=self._group_name, bucket_bytes=self._bucket_bytes)
        if run.is_memory:  # the same in each run
            self._planned = planned
        # gloo closes connections on which it waited so long: the end of the phase does not take as long again
        planned.run(digest=self._part.number if run.is_memory else 0, timeout_seconds=self._timeout_seconds)
        with torch.no_grad():
            for tensor, view, value in self._fills:
                view_of(run.filled[tensor], view).fill_(value)
        self._finish(run)

    def _finish(self, run: _Run) -> None:
        run.finish()
        self._target.set_objects({fqn: run.objects[name] for fqn, name in self._part.objects_filled.items()})

    def _fingerprint(self, phases: Phases, endpoint: Endpoint) -> Fingerprint:
        left_out = self._part.partial if endpoint is self._target else self._part.unwanted
        tensors = {
            fqn: value
            for fqn, value in endpoint.values.items()
            if isinstance(value, torch.Tensor) and fqn not in left_out
        }
        doing = "ranks took fingerprints of the " + ("target" if endpoint is self._target else "source")
        return fingerprint_over(
            lambda work: phases.on_all("verify", work, doing=doing), tensors, endpoint.layouts, rank=phases.rank
        )

    def _prove(self, phases: Phases, held: Fingerprint, run: _Run) -> tuple[str, ...]:
        filled = self._fingerprint(phases, self._target)
        compared = filled.values.keys() - {*self._part.changed, *self._part.partial}
        wrong = {
            fqn
            for fqn in compared
            if filled.values[fqn] != held.values[self._part.renamed.get(fqn, fqn)] or fqn in filled.differing
        }
        if self._part.changed:
            wrong |= {fqn for of_rank in self._compare_changed(phases, run) for fqn in of_rank}
        if wrong:
            failure = f"{len(wrong)} key(s) are not what the source holds, after the transfer"
            raise TransferFailedError("reshard", {0: failure}, tuple(sorted(wrong)), "verify")
        return self._part.partial

    def _compare_changed(self, phases: Phases, run: _Run) -> list[list[str]]:
        """By rank the keys with a box, changed by a map or a cast, that does not hold what was sent."""

        def compare() -> list[str]:
            sides = run.sources, run.targets, self._sends.boxes, self._receives.boxes
            changed = self._sends.changed, self._receives.changed
            different = different_boxes(
                *sides, changed, self._source.device, self._group_name, self._bucket_bytes, self._timeout_seconds
            )
            return [self._receives.name_of(tensor) for tensor in different]

        return phases.on_all("verify", compare, doing="ranks compared sums", exchange_name=self._name_of("sums"))


@dataclass
class _Run:
    """The arguments of one run, and what this rank has prepared for it.

    Attributes:
        sources, targets: Plain memory of both sides.
        filled: The tensors of the target themselves, where ``targets`` has views of them.
        is_memory: Whether this is the callers' own memory, on all ranks.
        finish: To be called when the targets are filled.
        objects: Values that are no tensors, of all ranks.
    """

    version: int | None
    verify: bool
    sources: list[torch.Tensor] = field(default_factory=list)
    targets: list[torch.Tensor] = field(default_factory=list)
    filled: list[torch.Tensor] = field(default_factory=list)
    is_memory: bool = True
    finish: Callable[[], None] = lambda: None
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Offer:
    """What a rank tells the others before a run."""

    plan: int
    version: int | None
    verify: bool
    objects: Mapping[str, Any]
    problems: tuple[Problem, ...]
    is_memory: bool


def _differing(offers: Sequence[_Offer]) -> list[Problem]:
    """The problem that ranks run different plans, or in different ways."""
    plans = differing("plan", [offer.plan for offer in offers], show=None, advice="run plans in one order on all ranks")
    verify = differing("verify", [offer.verify for offer in offers])
    return (plans or verify)[:1]


class _Side:
    """What a rank sends, or what it receives: which boxes of which tensors.

    Attributes:
        boxes: A table of boxes of ``tensors``, as ``ops.exchange_runs_`` takes it.
        changed: The numbers of the boxes that a cast or a map changes, the same boxes on both sides.
        bytes_of_peer: To or from each rank.
    """

    def __init__(self, endpoint: Endpoint, told: bytes, *, is_filled: bool) -> None:
        """``told``: what the plan tells this rank, for ``_core.expand_transfers``."""
        table = _core.expand_transfers(told, endpoint.first_tensor, len(endpoint.tensors))
        entries = bytearray(table.entries)
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        self.boxes = torch.frombuffer(entries, dtype=torch.int64) if entries else nothing
        self.changed: Sequence[int] = table.changed
        self.bytes_of_peer: Mapping[int, int] = table.bytes_of_peer
        self._endpoint, self._views, self._is_filled = endpoint, table.views, is_filled
        self._kept: list[Tensor] | None = None

    def tensors(self, memory: Sequence[Tensor]) -> list[Tensor]:
        """The memory of the endpoint's tensors and, behind it, views of some of them: of what a map moves.

        Of tensors that are filled by views alone stand-ins without elements remain, since no two may share memory.
        Views of memory that stays from run to run are made once.
        """
        if self._kept is not None:
            return self._kept
        tensors = list(memory)
        for number, view in self._views:
            tensors.append(view_of(memory[number], view))
            if self._is_filled:
                tensors[number] = memory[number].new_empty(0)
        self._kept = tensors if self._endpoint.is_memory else None
        return tensors

    def name_of(self, tensor: int) -> str:
        """The key of one of ``tensors``."""
        in_memory = len(self._endpoint.tensors)
        return self._endpoint.names[tensor if tensor < in_memory else self._views[tensor - in_memory][0]]


@contextmanager
def transfer_phases(group: dist.ProcessGroup | None, timeout_seconds: float) -> Iterator[Phases]:
    """Phases over a group. What would be a CheckpointFailedError is a TransferFailedError."""
    try:
        with Phases("reshard", group, timeout_seconds=timeout_seconds) as phases:
            yield phases
    except CheckpointFailedError as error:
        raise TransferFailedError(error.operation, error.failures, error.undefined, error.step) from None
