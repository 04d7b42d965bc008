"""What a run of `LlamaJob` came to, and the table that compares runs on several meshes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

# Float32 sums in another order differ by about 1e-6 here, losses without the AdamW moments by more than 1e-2.
LOSS_TOLERANCE = 1e-5


class Outcome(NamedTuple):
    mesh: str
    digests: dict[str, str]  # of every full tensor, right after save or load
    losses: list[float]  # of the steps after that
    stock: dict[str, str] | str = ""  # the digests that PyTorch's own load comes to, or why it refuses
    num_proved: int = 0  # tensors whose fingerprints are those of the save, by the load itself


def print_table(saved: Outcome, resumed: Sequence[Outcome]) -> None:
    print(f"\n{'mesh':34}  bit-equal   losses after the checkpoint, largest difference")
    for outcome in [saved, *resumed]:
        losses = " ".join(f"{loss:.4f}" for loss in outcome.losses)
        equal = f"{num_equal(saved, outcome.digests):3} of {len(saved.digests)}"
        print(f"{outcome.mesh:34}  {equal}  {losses}  {largest_difference(saved, outcome):.0e}")
        if outcome.num_proved:
            print(f"{'  proved by the load':34}  {outcome.num_proved:3} tensors")
        if isinstance(outcome.stock, dict):
            print(f"{'  stock PyTorch':34}  {num_equal(saved, outcome.stock):3} of {len(saved.digests)}")
        elif outcome.stock:
            print(f"{'  stock PyTorch':34}  refused: {outcome.stock[:80]}")


def went_on_as_before(saved: Outcome, resumed: Outcome) -> bool:
    return (
        num_equal(saved, resumed.digests) == len(saved.digests) and largest_difference(saved, resumed) <= LOSS_TOLERANCE
    )


def num_equal(saved: Outcome, digests: dict[str, str]) -> int:
    return sum(digests.get(fqn) == digest for fqn, digest in saved.digests.items())


def largest_difference(saved: Outcome, resumed: Outcome) -> float:
    """Between the losses of the same steps; infinite where there are none."""
    pairs = zip(saved.losses, resumed.losses, strict=False)
    return max((abs(before - after) for before, after in pairs), default=math.inf)
