"""What differs between two versions of the tensors that one rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from torchtitan_ext._core import SumTable
from torchtitan_ext.checkpoint.tables.key_table import KeyEntry
from torchtitan_ext.errors import Problem, differing
from torchtitan_ext.layout.layout import Box, LocalShard


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of a rank, and which part of its global tensor it is.

    Attributes:
        box: The box, where the tensor is one of those that a value describes; ``None`` of a shard.
    """

    fqn: str
    shard: LocalShard
    global_shape: tuple[int, ...]
    box: Box | None


@dataclass(frozen=True)
class Changes:
    """What changed since a ``delta.Snapshot``, on one rank, in host memory; one of the changes of all ranks.

    To be saved (``delta.save``) or sent (``TransferPlan.run(changes=)``) before the snapshot goes on by ``advance``.

    Attributes:
        base_version, version: Of the state before and after.
        tensors: What this rank holds, in the order of its keys.
        elsewhere: Keys of the state that other ranks hold and this one does not.
        kinds: Per key its dtype, shape and layout, as ``Endpoint.kinds`` has them.
        item_bytes: Size of an element of each tensor.
        counts: How many elements of each tensor have changed; 0 of those that are whole.
        positions: Which, as ``ops.changed_elements_`` gives them: 1-d int64, tensor after tensor.
        values: Their new bits, 1-d uint8.
        whole: By position among the tensors: those of which so much changed that all of it takes fewer bytes. Copies.
        base: The tensors before the changes; empty where the snapshot keeps hashes only.
        before, replaced, after: The sums of this rank's parts: before, of the old bits of the changed elements,
            and after.
    """

    base_version: int
    version: int
    tensors: Sequence[HeldTensor]
    elsewhere: Sequence[str] = field(repr=False)
    kinds: Mapping[str, KeyEntry] = field(repr=False)
    item_bytes: Sequence[int]
    counts: Sequence[int]
    positions: Tensor
    values: Tensor
    whole: Mapping[int, Tensor]
    base: Sequence[Tensor] = field(repr=False)
    before: SumTable = field(repr=False)
    replaced: SumTable = field(repr=False)
    after: SumTable = field(repr=False)

    @property
    def whole_keys(self) -> list[str]:
        """Keys of this rank of which a tensor goes whole."""
        return sorted({self.tensors[at].fqn for at in self.whole})

    @property
    def num_changed(self) -> int:
        """Elements of this rank's tensors that travel."""
        return sum(self.counts) + sum(tensor.numel() for tensor in self.whole.values())

    @property
    def num_bytes(self) -> int:
        """Host memory of the changes."""
        held = (self.positions, self.values, *self.whole.values())
        return sum(tensor.numel() * tensor.itemsize for tensor in held)


def differing_versions(versions: Sequence[tuple[int, int] | None]) -> list[Problem]:
    """The problem that ranks give changes of several versions: by rank the base version and the version."""
    given = {rank: of_rank for rank, of_rank in enumerate(versions) if of_rank is not None}
    return differing(
        "changes",
        list(given.values()),
        ranks=list(given),
        verb="lead from version",
        show="{0[0]} to {0[1]}".format,
        advice="give changes of the same two versions on every rank",
    )
