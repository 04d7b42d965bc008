"""A whole checkpoint as torchtitan 0.3.0 writes it, by stock DCP on 8 ranks, loaded by other numbers of ranks."""

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from simulated_loaders import Ranks
from test_torchtitan_data import ALL_WORDS, SAVED, loader_of, served_before, states_of, words_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, ElasticPolicy
from torchtitan_ext.errors import StateRefusedError


class Part:
    """One of torchtitan's own components: it saves and takes what it is given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def state_of(world_size: int, dataloader: Any, value: float) -> dict[str, Any]:
    """Keys as torchtitan's ``CheckpointManager`` has them: the model at the top, optimizer keys by parameter."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    weight = distribute_tensor(torch.arange(18.0).view(9, 2) + value, mesh, [Shard(0)])
    moment = distribute_tensor(torch.arange(18.0).view(9, 2) * value, mesh, [Shard(0)])
    optimizer = {"state.layers.0.w.exp_avg": moment, "param_groups.layers.0.w.lr": 0.1 + value}
    return {
        "layers.0.w": weight,
        "optimizer": Part(optimizer),
        "lr_scheduler": Part({"last_epoch": int(value)}),
        "train_state": Part({"step": int(value), "ntokens_seen": int(value) * 64}),
        "dataloader": dataloader,
    }


def save_as_torchtitan(rank: int, world_size: int, path: Path, name: str) -> None:
    states = states_of(name)
    ranks = range(rank, states["world_size"], world_size)
    own = {f"dp_rank_{member}": states[f"dp_rank_{member}"] for member in ranks}
    dcp.save(state_of(world_size, Part({**own, "world_size": states["world_size"]}), 3.0), checkpoint_id=path)


def left_over(loader: ElasticDataLoader) -> Counter[int]:
    """The words that the shards of a rank keep for the next epoch."""
    entries = [value[0] for key, value in loader.state_dict().items() if key != "loader"]
    return Counter(token for entry in entries for token in entry["stream"]["inputs"] if token > 2)


def load_and_finish(rank: int, world_size: int, path: Path, num_shards: int) -> tuple[Counter[int], str]:
    """The words that a rank serves until the epoch ends or keeps for the next one, and the report."""
    loader = loader_of(num_shards, last="pad")(rank, world_size)
    state = state_of(world_size, loader, 0.0)
    report = tte.load(state, path, policy=ElasticPolicy())
    assert torch.equal(state["layers.0.w"].full_tensor(), torch.arange(18.0).view(9, 2) + 3)
    optimizer = state["optimizer"].state
    assert torch.equal(optimizer["state.layers.0.w.exp_avg"].full_tensor(), torch.arange(18.0).view(9, 2) * 3)
    assert optimizer["param_groups.layers.0.w.lr"] == 3.1
    assert state["lr_scheduler"].state == {"last_epoch": 3}
    assert state["train_state"].state == {"step": 3, "ntokens_seen": 192}
    words: Counter[int] = Counter()
    for batch in loader:
        words += words_of(batch[: len(batch) - loader.num_padding])
    return words + left_over(loader), str(report)


def test_8_ranks_to_4(run_world, tmp_path: Path) -> None:
    name = "8_ranks_first_epoch"
    run_world(8, save_as_torchtitan, tmp_path, name)
    answers = run_world(4, load_and_finish, tmp_path, 16)
    (report,) = {report for _, report in answers}
    assert sum((words for words, _ in answers), served_before(name)) == ALL_WORDS
    assert report.splitlines() == [
        "saved by an unknown number of ranks, loaded by 4 ranks (fsdp 4)",
        "  optimizer     reshard  2 entries",
        "  lr_scheduler  reshard  1 entry",
        "  train_state   reshard  2 entries",
        "  dataloader    reshard  adopted from torchtitan, goes on after 48 samples in epoch 0, virtual shards "
        "8 -> 16, each dealt to 2, data-parallel ranks 8 -> 4",
        "  model         reshard  1 entry",
    ]


def test_8_ranks_to_16(run_world, tmp_path: Path) -> None:
    """More data-parallel ranks than there are processes here: each loads for itself, and they step in turn."""
    name = "8_ranks_first_epoch"
    run_world(8, save_as_torchtitan, tmp_path, name)
    ranks = Ranks(loader_of(16, last="pad"), 16)
    for loader in ranks.loaders:
        tte.load({"dataloader": loader}, tmp_path, policy=ElasticPolicy(), no_dist=True)
    total = served_before(name)
    while (batches := ranks.step()) is not None:
        for batch, loader in zip(batches, ranks.loaders, strict=True):
            total += words_of(batch[: len(batch) - loader.num_padding])
    for loader in ranks.loaders:
        total += left_over(loader)
    assert total == ALL_WORDS


def test_16_ranks_to_8(run_world, tmp_path: Path) -> None:
    name = "16_ranks_first_epoch"
    run_world(8, save_as_torchtitan, tmp_path, name)
    answers = run_world(8, load_and_finish, tmp_path, 16)
    assert sum((words for words, _ in answers), served_before(name)) == ALL_WORDS


def refuse(rank: int, world_size: int, path: Path) -> list[str]:
    texts = []
    encoded = json.loads((SAVED / "8_ranks_first_epoch.json").read_text())["dataloader"]
    own = {f"dp_rank_{rank}": base64.b64decode(encoded["dp_rank_0"]), "world_size": world_size}
    for dataloader in (Part(own), loader_of(12)(rank, world_size)):
        state = state_of(world_size, dataloader, 0.0)
        try:
            tte.load(state, path, policy=ElasticPolicy())
        except StateRefusedError as error:
            texts.append(str(error))
            assert torch.equal(state["layers.0.w"].full_tensor(), torch.arange(18.0).view(9, 2))
            assert state["train_state"].state["step"] == 0
            tte.load(state, path, policy=ElasticPolicy({"dataloader": "reset"}))
            assert state["train_state"].state["step"] == 3
    return texts


def test_refusals_are_one_report(run_world, tmp_path: Path) -> None:
    run_world(8, save_as_torchtitan, tmp_path, "8_ranks_first_epoch")
    (texts, *others) = run_world(4, refuse, tmp_path)
    assert all(other == texts for other in others)
    saved_and_kept = [
        "load refused, nothing was changed; 1 problem(s):",
        "saved by an unknown number of ranks, loaded by 4 ranks (fsdp 4)",
        "  optimizer     reshard  2 entries",
        "  lr_scheduler  reshard  1 entry",
        "  train_state   reshard  2 entries",
    ]
    assert texts[0].splitlines() == [
        *saved_and_kept,
        "  dataloader    reshard  REFUSED, 5 entries",
        "  model         reshard  1 entry",
        "Per-rank entries that no rank asks for (1):",
        "  dataloader.dp_rank_*: the checkpoint has 8 of these, the 4 rank(s) of this load ask for 4; "
        "dataloader.dp_rank_4 would be dropped; load on as many ranks as saved, give the component a method reshard, "
        "or read torchtitan's text data with ElasticDataLoader and TorchtitanTextStreams, or pass "
        "LoadPlanner(allow_unclaimed=['dataloader.dp_rank_*'])",
    ]
    assert texts[1].splitlines() == [
        *saved_and_kept,
        "  dataloader    reshard  REFUSED",
        "  model         reshard  1 entry",
        "Components that cannot cross to this world (1):",
        "  dataloader: the checkpoint has 8 virtual shards (the data-parallel ranks of torchtitan), this loader 12, "
        "and shards can be split into equal parts only; choose num_shards=8, or another multiple of 8",
    ]
