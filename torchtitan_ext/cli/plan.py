"""``torchtitan-ext plan``: what a load of a checkpoint on another mesh, and a save there, would do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from torchtitan_ext.checkpoint.policy import ElasticPolicy
from torchtitan_ext.cli.options import Json, Mesh, Shard, refusing_wrong_usage
from torchtitan_ext.cli.output import DIFFERS, print_json, print_text
from torchtitan_ext.cli.pictures import plotter
from torchtitan_ext.cli.pictures.files import bytes_of_ranks
from torchtitan_ext.offline.amounts import parse_amount
from torchtitan_ext.offline.dry_run import dry_run
from torchtitan_ext.offline.host_memory import Device
from torchtitan_ext.offline.placement_rules import parse_mesh, parse_rules


def run(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint of any format.")],
    mesh: Mesh,
    component: Annotated[list[str] | None, typer.Option(help="Component or glob of keys; by default all.")] = None,
    shard: Shard = None,
    policy: Annotated[list[str] | None, typer.Option(help="What becomes of a component: dataloader=reset.")] = None,
    device: Annotated[str | None, typer.Option(help="Of the job: cuda (by default) or cpu.")] = None,
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
        found = dry_run(
            path,
            mesh=parse_mesh(mesh),
            components=component or (),
            placements=parse_rules(shard or ()),
            policy=ElasticPolicy(_parse_actions(policy or ())),
            device=cast("Device | None", device),  # dry_run refuses others
            bandwidth_bytes_per_second=None if bandwidth is None else parse_amount(bandwidth),
            shared_bandwidth_bytes_per_second=None if shared_bandwidth is None else parse_amount(shared_bandwidth),
        )
    if plot is not None and found.load is not None:
        before = bytes_of_ranks(found.load.file_bytes)
        after = [one.num_bytes for one in found.load.ranks]
        plotter("bytes_plot", plot).plot_bytes(
            plot, before, after, title=f"{path}: files, and what is read by {found.world}"
        )
    if json:
        print_json(found.to_dict())
    else:
        print_text(str(found))
    if found.problems:
        raise typer.Exit(DIFFERS)


def _parse_actions(texts: Sequence[str]) -> dict[str, Any]:
    """``["dataloader=reset"]`` as the actions of a policy, which checks them."""
    return {name: action for name, _, action in (text.rpartition("=") for text in texts)}
