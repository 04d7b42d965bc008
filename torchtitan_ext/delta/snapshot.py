"""A version of a state to which later ones are compared."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Literal, get_args

import torch.distributed as dist

from torchtitan_ext.checkpoint.operation.arguments import check_seconds
from torchtitan_ext.checkpoint.operation.phases import TIMEOUT_SECONDS, checking_arguments
from torchtitan_ext.delta.held import agree_on_steps, held_tensors, sums_of_elements, sums_of_tensors
from torchtitan_ext.errors import Problem, WrongValueError, check_argument, check_counts, refusal
from torchtitan_ext.layout.layout import ShardOrder, Steps
from torchtitan_ext.ranks.exchange import check_usable
from torchtitan_ext.transfer.changed.changes import Changes
from torchtitan_ext.transfer.changed.kept import KeptHashes, KeptValues
from torchtitan_ext.transfer.endpoint import Endpoint, State, describe_endpoint
from torchtitan_ext.transfer.phases import transfer_phases

Keep = Literal["values", "hashes"]
"""What a snapshot keeps of each tensor: all of it, or hashes of its blocks."""


class Snapshot:
    """A version of the tensors of a state, to find what later versions change.

    Args:
        state: A nested state dict of tensors, of any layout that ``tte.save`` takes, or a module; ``None`` on a rank
            that has no part of it. Values that are no tensors are refused.
        version: The number of this version, such as the training step.
        keep: ``"values"`` copies the tensors to host memory. ``"hashes"`` keeps 8 bytes per 65,536 elements: of these
            all are sent if any has changed, and a run over a plan compares versions only, not the old bits.
        group: Ranks that hold the state; the default group if left out. Collective over it.
        layouts: Sharding orders that placements cannot express, by canonical fqn or glob.
        timeout_seconds: How long a rank waits for the others.

    Attributes:
        version: Of the state that it holds now.

    Raises:
        StateRefusedError: (a subclass) The state cannot be described, on some rank; the same on every rank.
        LostRankError: A rank is gone or does not take part.
    """

    def __init__(
        self,
        state: State,
        *,
        version: int = 0,
        keep: Keep = "values",
        group: dist.ProcessGroup | None = None,
        layouts: Mapping[str, ShardOrder] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        check_argument("Snapshot", "group", group, (dist.ProcessGroup, NoneType), "a process group or None")
        check_usable("Snapshot", group)
        with checking_arguments("Snapshot", group):
            check_counts("Snapshot", version=version)
            check_seconds("Snapshot", timeout_seconds)
            if keep not in get_args(Keep):
                raise WrongValueError(f"Snapshot: got keep={keep!r}, expected 'values' or 'hashes'")
        self.version = version
        self._layouts = layouts
        with transfer_phases(group, timeout_seconds, "snapshot") as phases:
            self._endpoint, steps, names = agree_on_steps(
                phases, lambda: self._described(state), "snapshot", needs_all_ranks=True
            )
            doing = "ranks made a snapshot of their tensors"
            all_names = phases.to_coordinator("keep", lambda: self._keep(steps, keep), lambda _: names, doing=doing)
            self._elsewhere = tuple(fqn for fqn in all_names if fqn not in self._endpoint.entries)
        self._changes: Changes | None = None

    @property
    def num_bytes(self) -> int:
        """The host memory that the snapshot takes on this rank."""
        return self._kept.num_bytes

    def changes(self, state: State = None, *, version: int | None = None) -> Changes:
        """What differs from the snapshot now, by bits. Not collective; reads both versions once.

        Args:
            state: The later version: of the same keys, shapes and layouts; by default what the snapshot was made of.
            version: Its number; one more than the snapshot's by default.

        Raises:
            StateRefusedError: The state has other tensors or another layout than the snapshot.
        """
        version = self.version + 1 if version is None else version
        check_counts("Snapshot.changes", version=version)
        if version <= self.version:
            raise WrongValueError(f"Snapshot.changes: got version={version}, expected more than {self.version}")
        if state is None:  # tensors of it may have been replaced since
            state = self._endpoint.state if self._endpoint.module is None else self._endpoint.module
        endpoint = self._described(state)
        problems, kinds = list(endpoint.problems), endpoint.kinds()
        if endpoint.names != self._endpoint.names or kinds != self._endpoint.kinds():
            what = "has other tensors or layouts than the snapshot; make a new snapshot"
            problems.append(Problem("cannot_reshard", "state", what))
        if problems:
            raise refusal("changes", problems)
        self._changes = None
        found = self._kept.find(endpoint.memory_to_read())
        replaced, new = (sums_of_elements(endpoint, self._held, sums) for sums in (found.old_sums, found.new_sums))
        self._changes = Changes(
            base_version=self.version,
            version=version,
            tensors=self._held,
            elsewhere=self._elsewhere,
            kinds=kinds,
            item_bytes=self._item_bytes,
            counts=found.counts,
            positions=found.positions,
            values=found.values,
            whole=found.whole,
            base=self._kept.base,
            before=self._sums,
            replaced=replaced,
            after=self._sums.changed(replaced, new),
        )
        return self._changes

    def advance(self) -> None:
        """Makes the version of the last ``changes`` the snapshot's own. Not collective.

        To be called when the changes were saved or sent: after an error there they are found again, from the same base.

        Raises:
            WrongValueError: ``changes`` was not called since.
        """
        changes = self._changes
        if changes is None:
            raise WrongValueError("Snapshot.advance: call changes() first")
        self._changes = None
        self._kept.advance(changes)
        self._sums = changes.after
        self.version = changes.version

    def _described(self, state: State) -> Endpoint:
        return describe_endpoint("source", state, self._layouts, is_filled=False)

    def _keep(self, steps: Mapping[str, Steps], keep: Keep) -> None:
        self._held = held_tensors(self._endpoint, steps)
        tensors = self._endpoint.memory_to_read()
        self._item_bytes = [tensor.itemsize for tensor in tensors]
        self._kept = (KeptValues if keep == "values" else KeptHashes)(tensors, self._held)
        self._sums = sums_of_tensors(self._endpoint, steps)
