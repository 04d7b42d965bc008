"""What foreign checkpoints do not say is refused by name, all at once, and nothing is written."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign_checkpoints import (
    Trained,
    names_of_deepspeed,
    optim_name,
    write_torch_dist,
    write_universal,
    write_zero_2,
    write_zero_3,
)
from torch.distributed.tensor import DTensor, Partial, Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import DamagedCheckpointError, ReshardError, StateRefusedError, UnsafePickleError
from torchtitan_ext.offline.rewrite.convert import ConvertReport, convert
from torchtitan_ext.offline.selection import Selection
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.location import place_at

RunWorld = Callable[..., list[Any]]
MODEL_2 = "mp_rank_00_model_states.pt"
MODEL_3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def to_dcp(source: Path, *, only: tuple[str, ...] = ()) -> ConvertReport:
    target = source.parent / "new"
    try:
        return convert(open_source(source), target, to="dcp", num_processes=1, selection=Selection(only))
    except Exception:
        assert not target.exists()
        raise


def refused(source: Path, *reasons: str, kind: type[StateRefusedError] = ReshardError) -> None:
    """Refused for all of these reasons at once."""
    with pytest.raises(kind) as error:
        to_dcp(source)
    found = list(map(str, error.value.problems))
    for reason in reasons:
        assert any(reason in problem for problem in found), found
    assert len(found) == len(reasons), found


def changed(path: Path, change: Callable[[Any], object]) -> None:
    """Writes a file anew with a changed value."""
    with names_of_deepspeed():
        value = torch.load(path, weights_only=False)
        change(value)
        torch.save(value, path)


def optim_of(value: Any) -> Any:
    return value["optimizer_state_dict"]


@pytest.fixture
def zero_2(tmp_path: Path) -> Path:
    return write_zero_2(tmp_path / "saved", Trained(), 3)


@pytest.fixture
def zero_3(tmp_path: Path) -> Path:
    return write_zero_3(tmp_path / "saved", Trained(), 3)


def test_files_of_ranks_that_are_missing(zero_2: Path) -> None:
    for rank in (1, 2):
        os.remove(zero_2 / optim_name(rank))
    refused(zero_2, "rank 1: its file *_optim_states.pt is missing, of 3 ranks", "rank 2: its file")


def test_model_states_of_ranks_that_are_missing(zero_3: Path) -> None:
    os.remove(zero_3 / MODEL_3.format(2))
    refused(zero_3, "rank 2: its file *_model_states.pt is missing, of 3 ranks; copy it to the others")


def test_files_of_several_saves(zero_3: Path) -> None:
    changed(zero_3 / MODEL_3.format(1), lambda value: value.update(global_steps=1))
    refused(zero_3, "global_steps: are [1, 2] in files of ranks; copy those of one save")
    os.link(zero_3 / optim_name(1), zero_3 / optim_name(1).replace("bf16", "fp16"))
    refused(zero_3, "is of a rank that has another file; remove what another save has left")


def test_model_states_of_the_first_rank_alone(zero_3: Path) -> None:
    for rank in (1, 2):
        os.remove(zero_3 / MODEL_3.format(rank))
    refused(zero_3, "rank 1: its file *_model_states.pt is missing", "rank 2: its file *_model_states.pt is missing")


def test_no_model_states(zero_2: Path) -> None:
    os.remove(zero_2 / MODEL_2)
    refused(zero_2, "no *_model_states.pt is there; copy it once more")


def test_no_partitions(zero_2: Path) -> None:
    for rank in range(3):
        os.remove(zero_2 / optim_name(rank))
    refused(zero_2, "no *_optim_states.pt is there")


def test_ranks_of_a_larger_world_that_were_left(zero_2: Path, tmp_path: Path) -> None:
    other = write_zero_2(tmp_path / "other", Trained(), 4)
    os.rename(other / optim_name(3), zero_2 / optim_name(3))
    refused(zero_2, "rank 3: has a file *_optim_states.pt, and 3 ranks saved; remove what another save has left")


def test_cut_and_damaged_files(zero_2: Path) -> None:
    for rank in (0, 2):
        os.truncate(zero_2 / optim_name(rank), 3000)
    refused(zero_2, f"{optim_name(0)}: cannot be read", f"{optim_name(2)}: cannot be read")


class Attack:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", [MODEL_2, optim_name(1)])
def test_a_pickle_that_would_run_code(zero_2: Path, tmp_path: Path, name: str) -> None:
    changed(zero_2 / name, lambda value: value.update(epoch=Attack(tmp_path / "attacked")))
    with pytest.raises(UnsafePickleError, match=r"mkdir"):
        to_dcp(zero_2)
    assert not (tmp_path / "attacked").exists()


def test_code_in_the_place_of_an_inert_object(zero_2: Path, tmp_path: Path) -> None:
    changed(zero_2 / optim_name(0), lambda value: optim_of(value).update(loss_scaler=Attack(tmp_path / "attacked")))
    with pytest.raises(UnsafePickleError, match=r"mkdir"):
        to_dcp(zero_2)
    assert not (tmp_path / "attacked").exists()


def test_more_padding_than_there_can_be(zero_2: Path) -> None:
    def grow(value: Any) -> None:
        optim_of(value)["single_partition_of_fp32_groups"][0] = torch.zeros(40)

    changed(zero_2 / optim_name(2), grow)
    refused(zero_2, "parameter group 0: its partitions have", kind=ReshardError)


def test_partitions_that_are_too_short(zero_2: Path) -> None:
    def shrink(value: Any) -> None:
        masters = optim_of(value)["single_partition_of_fp32_groups"]
        masters[:] = [one[:0] for one in masters]

    changed(zero_2 / optim_name(2), shrink)
    refused(zero_2, "parameter group 0: flat partitions: they have")


def test_partitions_that_the_files_place_otherwise(zero_2: Path) -> None:
    def move(value: Any) -> None:
        optim_of(value)["param_slice_mappings"][0]["a.weight"].start += 1

    changed(zero_2 / optim_name(1), move)
    refused(zero_2, "a.weight: rank 1 has it at")


def test_partitions_of_stage_3_of_another_length(zero_3: Path) -> None:
    def grow(value: Any) -> None:
        optim_of(value)["fp32_flat_groups"][1] = torch.zeros(9)

    changed(zero_3 / optim_name(2), grow)
    refused(zero_3, "that of rank 2 has 9 elements, expected 2")


def test_parts_of_a_frozen_parameter_of_another_length(zero_3: Path) -> None:
    changed(zero_3 / MODEL_3.format(1), lambda value: value["frozen_param_fragments"].update({"f.bias": torch.ones(4)}))
    refused(zero_3, "f.bias: flat partitions: that of rank 1 has 4 elements, expected 1")


def test_a_tie_to_nothing(zero_2: Path) -> None:
    changed(zero_2 / MODEL_2, lambda value: value["shared_params"].update({"head.weight": "gone"}))
    refused(zero_2, "model.head.weight: is tied to a parameter that no file holds; leave it out")
    assert to_dcp(zero_2, only=("model.a.*", "optimizer.*")).num_keys == 1 + 5 * 3 + 5 * 2


def test_parameters_that_may_be_tied_in_files_of_older_versions(zero_2: Path) -> None:
    def forget(value: Any) -> None:
        value.update(shared_params=None, frozen_param_shapes=None)

    changed(zero_2 / MODEL_2, forget)
    what = "is no parameter, no buffer and tied to nothing, as far as the files say; leave it out"
    refused(zero_2, *(f"model.{name}: {what}" for name in ("head.weight", "f.weight", "f.bias")))


def test_state_of_the_optimizer_that_is_not_of_its_parameters(zero_2: Path) -> None:
    def cut(value: Any) -> None:
        optim_of(value)["base_optimizer_state"]["state"][1]["exp_avg"] = torch.ones(1)

    changed(zero_2 / optim_name(0), cut)
    what = "has other elements than its parameter on some rank; leave it out"
    refused(zero_2, f"optimizer.state.b.exp_avg: {what}")


@pytest.mark.parametrize(
    "name",
    [
        "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt",
        "mp_rank_01_model_states.pt",
        "layer_03-model_00-model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_ranks_that_cut_tensors_otherwise(zero_2: Path, name: str) -> None:
    os.link(zero_2 / MODEL_2, zero_2 / name)
    refused(zero_2, f"{name}: is of tensor, pipeline or expert parallel ranks")


def test_tensor_parallel_ranks_that_the_state_tells_of(zero_2: Path) -> None:
    changed(zero_2 / MODEL_2, lambda value: value.update(mp_world_size=2))
    refused(zero_2, "mp_world_size 2: is of tensor")


def test_a_number_of_ranks_that_cannot_be(zero_2: Path) -> None:
    changed(zero_2 / optim_name(0), lambda value: optim_of(value).update(partition_count=10**15))
    with pytest.raises(ReshardError, match=r"rank 3 \(and 65532 more.*its file \*_optim_states.pt is missing"):
        to_dcp(zero_2)


@pytest.mark.parametrize("key", ["param_shapes", "buffer_names"])
def test_files_of_something_else(zero_2: Path, key: str) -> None:
    changed(zero_2 / MODEL_2, lambda value: value.update({key: 3}))
    with pytest.raises(DamagedCheckpointError, match="its files are not what DeepSpeed writes"):
        to_dcp(zero_2)


def test_shapes_that_cannot_be(zero_2: Path) -> None:
    changed(zero_2 / MODEL_2, lambda value: value["param_shapes"][0].update({"a.weight": (2**62, 4)}))
    with pytest.raises(DamagedCheckpointError, match="OverflowError"):
        to_dcp(zero_2)


def test_parts_of_a_universal_checkpoint_that_are_missing(tmp_path: Path) -> None:
    source = write_universal(tmp_path / "saved", Trained())
    os.remove(source / "zero" / "b" / "exp_avg.pt")
    for path in list((source / "zero" / "one").iterdir()):
        os.remove(path)
    missing = [f"zero/one/{part}.pt: is missing" for part in ("fp32", "exp_avg", "exp_avg_sq", "step")]
    refused(source, "zero/b/exp_avg.pt: is missing", *missing)


def test_a_buffer_of_several_tensor_parallel_ranks(tmp_path: Path) -> None:
    source = write_universal(tmp_path / "saved", Trained())
    os.link(source / MODEL_2, source / "mp_rank_01_model_states.pt")
    assert to_dcp(source).num_keys > 0
    os.remove(source / "zero" / "norm.mean" / "fp32.pt")
    os.rename(tmp_path / "new", tmp_path / "old")
    refused(source, "model.norm.mean: is no parameter, no buffer")


def test_a_flat_part_of_a_universal_checkpoint_without_a_shape(tmp_path: Path) -> None:
    source = write_universal(tmp_path / "saved", Trained(), flat=True)
    torch.save(torch.ones(14), source / "zero" / "a.weight" / "exp_avg.pt")
    what = "is flat, of 14 elements: its shape cannot be known"
    refused(source, f"optimizer.state.a.weight.exp_avg: {what}")


def save_each_rank(rank: int, world_size: int, path: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (world_size,))
    state = {
        "w": tte.full.distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]),
        "sum": DTensor.from_local(torch.ones(2), mesh, [Partial()]),
        "own": torch.full((2,), float(rank)),
        "seed": rank,
    }
    torch.save({"w": state["w"]} if path.name == "plain" else state, path / f"rank{rank}.pt")


@pytest.fixture
def rank_files(run_world: RunWorld, tmp_path: Path) -> Path:
    (tmp_path / "plain").mkdir()
    run_world(3, save_each_rank, tmp_path / "plain")
    return tmp_path / "plain"


def test_a_file_of_a_rank_that_is_missing(rank_files: Path) -> None:
    os.remove(rank_files / "rank1.pt")
    refused(rank_files, "rank 1: its file is missing, of ranks 0, 1, 2; copy it to the others")


def test_two_files_of_a_rank_and_one_of_none(rank_files: Path) -> None:
    (rank_files / "rank9.pt").write_bytes((rank_files / "rank1.pt").read_bytes())
    torch.save({"w": torch.ones(3)}, rank_files / "other.pt")
    refused(rank_files, "is of rank 1, as rank9.pt is; remove one of them", "other.pt: holds no DTensor")


def test_a_file_of_a_rank_that_is_cut(rank_files: Path) -> None:
    os.truncate(rank_files / "rank2.pt", 900)
    refused(rank_files, "rank2.pt: cannot be read")


def test_what_nothing_says_of_ranks(run_world: RunWorld, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    run_world(2, save_each_rank, tmp_path / "saved")
    differs = "is no DTensor and differs between ranks: nothing says what each of them has; leave it out"
    refused(tmp_path / "saved", "sum: mesh axis 0 holds Partial", f"own: {differs}", f"seed: {differs}")
    assert to_dcp(tmp_path / "saved", only=("w",)).num_keys == 1


def save_bound(rank: int, world_size: int, path: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (world_size,))
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
    part = tte.full.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    write_torch_dist(path, {"decoder.w": part, key: part})


def test_an_optimizer_that_follows_buckets(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(2, save_bound, tmp_path / "saved")
    refused(tmp_path / "saved", "follows the buckets of the ranks that saved it", kind=ReshardError)
    assert to_dcp(tmp_path / "saved", only=("decoder.*",)).num_keys == 1


def test_a_key_of_torch_dist_in_two_places(run_world: RunWorld, tmp_path: Path) -> None:
    run_world(2, save_bound, tmp_path / "saved")
    torch.save({"decoder.w": 3}, tmp_path / "saved" / "common.pt")
    refused(tmp_path / "saved", "decoder.w: is in common.pt too; remove it there")


@pytest.mark.parametrize(("config", "is_needed"), [({"common_backend": "torch"}, True), ({}, False)])
def test_torch_dist_without_its_common_file(
    run_world: RunWorld, tmp_path: Path, config: dict[str, str], is_needed: bool
) -> None:
    run_world(2, save_bound, tmp_path / "saved")
    os.remove(tmp_path / "saved" / "common.pt")
    (tmp_path / "saved" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", **config}))
    if is_needed:
        with pytest.raises(FileNotFoundError, match=r"common\.pt"):
            to_dcp(tmp_path / "saved")
    else:
        assert to_dcp(tmp_path / "saved", only=("decoder.*",)).num_keys == 1


def test_a_load_says_what_to_call(zero_2: Path) -> None:
    with pytest.raises(
        StateRefusedError, match=r"is a foreign checkpoint \(deepspeed\), which no load.*torchtitan-ext convert"
    ):
        tte.load({"w": torch.zeros(1)}, zero_2)


def test_a_tag_that_is_elsewhere(tmp_path: Path) -> None:
    write_zero_2(tmp_path / "saved" / "tag", Trained(), 1)
    (tmp_path / "saved" / "latest").write_text("../saved/tag")
    with pytest.raises(Exception, match="is no checkpoint"):
        open_source(place_at(tmp_path / "saved"))
