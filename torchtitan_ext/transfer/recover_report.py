"""What a recovery did, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchtitan_ext.checkpoint.rules.report import ComponentLine
from torchtitan_ext.errors import MAX_NAMED, named


@dataclass(frozen=True)
class RecoverReport:
    """What ``recover`` did. The same on every rank, but for ``seconds``.

    Attributes:
        step: The training step of the survivors, which is that of the recovered state.
        survivors: The old ranks whose memory was taken, in the order of the new ranks.
        bytes_kept: Bytes that survivors had for themselves, over all ranks.
        bytes_moved: Bytes that went from rank to rank.
        bytes_from_checkpoint: Bytes of tensors that no survivor held, over all ranks.
        checkpoint: Where these and other values came from; empty where nothing did.
        checkpoint_step: Its training step; ``None`` where nothing came from one.
        keys_from_checkpoint: Keys of which something came from there, and components.
        distrusted: Old ranks that survived, of which some copies were not taken: the keys, or all of them for a rank of
            another step (``("step 7",)``).
        num_proved: How many copies were equal to the fingerprints of a checkpoint of the same step.
        components: What became of each entry with a rule of its own.
        seconds: How long each phase took on this rank.
    """

    step: int
    survivors: tuple[int, ...]
    bytes_kept: int
    bytes_moved: int
    distrusted: Mapping[int, tuple[str, ...]]
    num_proved: int
    bytes_from_checkpoint: int = 0
    checkpoint: str = ""
    checkpoint_step: int | None = None
    keys_from_checkpoint: tuple[str, ...] = ()
    components: tuple[ComponentLine, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        taken = f"{self.bytes_kept:,} bytes kept, {self.bytes_moved:,} bytes moved"
        lines = [f"step {self.step}, from the memory of old rank(s) {named(self.survivors)}: {taken}"]
        if self.keys_from_checkpoint:
            keys = named(self.keys_from_checkpoint)
            lines.append(f"  from {self.checkpoint}: {self.bytes_from_checkpoint:,} bytes of tensors; {keys}")
        for rank, keys_of_rank in list(self.distrusted.items())[:MAX_NAMED]:
            lines.append(f"  not taken from old rank {rank}: {named(keys_of_rank)}")
        width = max((len(line.name) for line in self.components), default=0)
        lines += [f"  {line.name:<{width}}  {line.action:<7}  {line.outcome}" for line in self.components]
        return "\n".join(lines)
