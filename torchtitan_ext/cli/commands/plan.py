"""``torchtitan-ext plan``: what a load of a checkpoint on another mesh, and a save there, would do."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchtitan_ext.cli.lazy import lazy
from torchtitan_ext.cli.options import Json, Mesh, Shard, refusing_wrong_usage
from torchtitan_ext.cli.output import DIFFERS, print_json, print_text
from torchtitan_ext.cli.pictures import plotter, say_written
from torchtitan_ext.cli.pictures.files import bytes_of_ranks
from torchtitan_ext.offline.amounts import parse_amount

if TYPE_CHECKING:
    from torchtitan_ext.checkpoint.rules import policy as policies
    from torchtitan_ext.offline import placement_rules
    from torchtitan_ext.offline.dry_run import run as dry_runs
else:
    dry_runs = lazy("torchtitan_ext.offline.dry_run.run")
    placement_rules = lazy("torchtitan_ext.offline.placement_rules")
    policies = lazy("torchtitan_ext.checkpoint.rules.policy")


class _Device(str, Enum):
    CUDA = "cuda"
    CPU = "cpu"


def run(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint of any format.")],
    mesh: Mesh,
    component: Annotated[list[str] | None, typer.Option(help="Component or glob of keys; by default all.")] = None,
    shard: Shard = None,
    policy: Annotated[list[str] | None, typer.Option(help="What becomes of a component: dataloader=reset.")] = None,
    device: Annotated[_Device | None, typer.Option(metavar="cuda|cpu", help="Of the job; by default cuda.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Of one rank: 2GB/s.")] = None,
    shared_bandwidth: Annotated[str | None, typer.Option(help="Of the storage, for all ranks together.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the bytes of each rank, .svg, .png.")] = None,
    json: Json = False,
) -> None:
    """What a load on another mesh would read, and what would be refused.

    And the same of a save there. Reads the metadata, and what RngState saved. Exits with 1 where the load is refused.

    Example: torchtitan-ext plan run/step-100 --mesh dp=8,tp=2 --bandwidth 2GB/s
    """
    if plot is not None:
        plotter("bytes_plot", plot)  # what it refuses, before the work
    with refusing_wrong_usage():
        found = dry_runs.dry_run(
            path,
            mesh=placement_rules.parse_mesh(mesh),
            components=component or (),
            placements=placement_rules.parse_rules(shard or ()),
            policy=policies.ElasticPolicy(_parse_actions(policy or ())),
            device=None if device is None else device.value,
            bandwidth_bytes_per_second=None if bandwidth is None else parse_amount(bandwidth),
            shared_bandwidth_bytes_per_second=None if shared_bandwidth is None else parse_amount(shared_bandwidth),
        )
    if plot is not None and found.load is not None:
        before = bytes_of_ranks(found.load.file_bytes)
        after = [one.num_bytes for one in found.load.ranks]
        plotter("bytes_plot", plot).plot_bytes(
            plot, before, after, title=f"{path}: files, and what is read by {found.world}"
        )
        say_written(plot)
    if json:
        print_json(found.to_dict())
    else:
        print_text(str(found))
    if found.problems:
        raise typer.Exit(DIFFERS)


def _parse_actions(texts: Sequence[str]) -> dict[str, Any]:
    """``["dataloader=reset"]`` as the actions of a policy, which checks them."""
    return {name: action for name, _, action in (text.rpartition("=") for text in texts)}
