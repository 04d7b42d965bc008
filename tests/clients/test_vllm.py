"""vLLM's engines of weight transfer over transfers and deltas: real base classes, factories, layers and loaders of
vLLM, in processes that play the trainer's ranks and vLLM's workers."""

import json
import os
import socket
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import torchtitan_ext as tte
from torchtitan_ext.errors import WrongBaseError
from torchtitan_ext.transforms import Rule, Transform

pytest.importorskip(
    "vllm.distributed.weight_transfer", reason="vLLM is in no environment with the other clients", exc_type=ImportError
)

NUM_TRAINERS, NUM_WORKERS = 2, 2
HIDDEN, HEAD, HEADS, KV_HEADS, INNER, VOCABULARY = 8, 4, 4, 2, 12, 70  # 70: padded to 2 times 64 rows
SHAPES = {
    "embed_tokens.weight": (VOCABULARY, HIDDEN),
    "attention.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "attention.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "attention.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "attention.q_proj.bias": (HEADS * HEAD,),
    "attention.k_proj.bias": (KV_HEADS * HEAD,),
    "attention.v_proj.bias": (KV_HEADS * HEAD,),
    "attention.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "attention.o_proj.bias": (HIDDEN,),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "router.weight": (3, HIDDEN),
    "norm.weight": (HIDDEN,),
}


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Of version 1 and later, a few elements differ from those of the version before."""
    drawn = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=drawn).bfloat16() for name, shape in SHAPES.items()}
    for step in range(1, version + 1):
        for number, weight in enumerate(weights.values()):
            weight.view(-1)[(7 * step + number) % weight.numel()] = step + number / 16
    return weights


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Model(nn.Module):
    """The layers of a decoder, as vLLM's own models have them."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def __init__(self) -> None:
        super().__init__()
        from vllm.model_executor.layers.linear import (
            MergedColumnParallelLinear,
            QKVParallelLinear,
            ReplicatedLinear,
            RowParallelLinear,
        )
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        dtype: Any = {"params_dtype": torch.bfloat16}
        self.embed_tokens = VocabParallelEmbedding(VOCABULARY, HIDDEN, **dtype)
        self.attention = nn.Module()
        self.attention.qkv_proj = QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=True, **dtype)
        self.attention.o_proj = RowParallelLinear(HEADS * HEAD, HIDDEN, bias=True, **dtype)
        self.mlp = nn.Module()
        self.mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False, **dtype)
        self.mlp.down_proj = RowParallelLinear(INNER, HIDDEN, bias=False, **dtype)
        self.router = ReplicatedLinear(HIDDEN, 3, bias=False, **dtype)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> set[str]:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        params, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            for fused, parts in self.packed_modules_mapping.items():
                for number, part in enumerate(parts):
                    if f".{part}." in name:
                        param = params[name.replace(part, fused)]
                        param.weight_loader(param, weight, part[0] if fused == "qkv_proj" else number)
                        loaded.add(name)
            if name not in loaded:
                param = params[name]
                getattr(param, "weight_loader", default_weight_loader)(param, weight)
                loaded.add(name)
        return loaded


class Client:
    """What vLLM calls a client, and its workers, over a store."""

    def __init__(self, path: Path) -> None:
        self.store = dist.FileStore(str(path), -1)
        self.num_calls = 0

    def _call(self, method: str, *arguments: Any) -> None:
        self.num_calls += 1
        self.store.set(f"call/{self.num_calls}", json.dumps([method, arguments]))
        answers = [self.store.get(f"answer/{self.num_calls}/{worker}").decode() for worker in range(NUM_WORKERS)]
        if any(answers):
            raise RuntimeError("\n".join(answers))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def check(self, version: int) -> None:
        self._call("check", version)

    def spoil(self) -> None:
        self._call("spoil")

    def stop(self) -> None:
        self._call("stop")

    def serve(self, worker: int, methods: dict[str, Any]) -> None:
        """Does what the client calls, until it says stop."""
        method = ""
        while method != "stop":
            self.num_calls += 1
            method, arguments = json.loads(self.store.get(f"call/{self.num_calls}"))
            answer = ""
            try:
                methods[method](*arguments)
            except Exception:
                answer = traceback.format_exc()
            self.store.set(f"answer/{self.num_calls}/{worker}", answer)


def train(rank: int, address: str, folder: Path, *, has_other_names: bool) -> list[int]:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    from torchtitan_ext.integrations.vllm import StateSource, TrainerEngineInfo

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "trainer"), NUM_TRAINERS), rank=rank, world_size=NUM_TRAINERS
    )
    mesh = init_device_mesh("cpu", (NUM_TRAINERS,))
    below, dtype = ("trained.", torch.float32) if has_other_names else ("", torch.bfloat16)
    state = {
        below + name: tte.full.distribute_tensor(
            weight.to(dtype), mesh, [Replicate() if name == "norm.weight" else Shard(0)]
        )
        for name, weight in weights_of(0).items()
    }

    def become(version: int) -> None:
        for name, weight in weights_of(version).items():
            of_name = state[below + name]
            of_name.copy_(tte.full.distribute_tensor(weight.to(dtype) * (1 + 2**-12), mesh, of_name.placements))

    client = Client(folder / "calls")
    info = TrainerEngineInfo(
        rank=rank, address=address, num_trainer_ranks=NUM_TRAINERS, num_workers=NUM_WORKERS, timeout_seconds=100
    )
    source = StateSource(state)
    if has_other_names:
        source = StateSource(state, transform=Transform([Rule("trained.**", "**")]), dtype=torch.bfloat16)
    assert {of.dtype for of in source.metadata()} == {torch.bfloat16}
    assert [of.name for of in source.metadata()] == list(SHAPES)
    engine: Any = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    bytes_sent = []
    for version in range(3):
        become(version)
        bytes_sent.append(engine.send_weights().bytes_sent)
        if rank == 0:
            client.check(version)
    become(3)
    dist.barrier()
    if rank == 0:
        client.spoil()
    dist.barrier()
    with pytest.raises(WrongBaseError, match=r"other bits than the changes replace"):
        engine.send_weights(version=7)
    bytes_sent.append(engine.send_weights(version=8).bytes_sent)
    if rank == 0:
        client.check(3)
        client.stop()
    dist.barrier()
    dist.destroy_process_group()
    return bytes_sent


def generate(rank: int, address: str, folder: Path) -> None:
    from vllm.config import ParallelConfig, VllmConfig, WeightTransferConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    import torchtitan_ext.integrations.vllm as ours

    os.environ.update({"LOCAL_RANK": str(rank), "VLLM_DIST_IDENT": f"generator-{address.rpartition(chr(58))[2]}"})
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_index=0, world_size=NUM_WORKERS, rank=rank, pipeline_parallel_size=1
        ),
        model_config=SimpleNamespace(dtype=torch.bfloat16, quantization=None),
    )
    with set_current_vllm_config(VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=1))):
        init = f"file://{folder / 'generator'}"
        parallel_state.init_distributed_environment(NUM_WORKERS, rank, init, rank, "gloo")
        parallel_state.initialize_model_parallel(NUM_WORKERS)
        model, expected = Model(), Model()
    record_metadata_for_reloading(model)
    for param in (*model.parameters(), *expected.parameters()):
        param.data.zero_()
    engine: Any = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=ours.BACKEND), config, torch.device("cpu"), model
    )

    def check(version: int) -> None:
        expected.load_weights(weights_of(version).items())
        wrong = [
            name
            for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True)
            if not same_bits(param.data, other.data)
        ]
        assert wrong == [], wrong
        assert list(engine.whole) == ["norm.weight"], list(engine.whole)

    def spoil() -> None:
        for param in (model.attention.o_proj.weight, model.mlp.gate_up_proj.weight):
            param.data.fill_(9)

    client = Client(folder / "calls")
    client.serve(
        rank,
        {
            "init_weight_transfer_engine": lambda info: engine.init_transfer_engine(engine.parse_init_info(info)),
            "start_weight_update": engine.start_weight_update,
            "update_weights": lambda info: engine.receive_weights(engine.parse_update_info(info)),
            "finish_weight_update": engine.finish_weight_update,
            "check": check,
            "spoil": spoil,
            "stop": engine.shutdown,
        },
    )
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def trainer_and_workers(
    position: int, world_size: int, address: str, folder: Path, has_other_names: bool
) -> list[int] | None:
    if position < NUM_TRAINERS:
        return train(position, address, folder, has_other_names=has_other_names)
    return generate(position - NUM_TRAINERS, address, folder)


@pytest.mark.parametrize("has_other_names", [False, True])
def test_a_trainer_fills_vllms_layers_and_then_sends_what_changed(
    run_world: Any, tmp_path: Path, has_other_names: bool
) -> None:
    """Equal to what vLLM's own loaders put there, also of a trainer in fp32 with other names; after an error all of it
    is sent again."""
    address = free_address()
    try:
        results = run_world(4, trainer_and_workers, address, tmp_path, has_other_names, process_group=False)
    finally:
        for left in Path("/dev/shm").glob(f"generator-{address.rpartition(':')[2]}-*"):  # vLLM leaves it there
            left.unlink()
    for first, second, third, after_error in results[:NUM_TRAINERS]:
        assert 0 < second < first / 2
        assert 0 < third < first / 2
        assert after_error == first


def test_changes_of_a_file_are_patches_that_vllm_loads(tmp_path: Path) -> None:
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerWeightTransferEngine
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    from torchtitan_ext.integrations.vllm import weight_patches

    class Loaded(nn.Module):
        def __init__(self, weights: dict[str, torch.Tensor]) -> None:
            super().__init__()
            self.weights = weights

        def load_weights(self, weights: Any) -> None:
            for name, weight in weights:
                self.weights[name].copy_(weight)

    state = {**weights_of(0), "all": torch.zeros(3, 5, dtype=torch.bfloat16), "same": torch.ones(4)}
    model = Loaded({name: weight.clone() for name, weight in state.items()})
    base = tte.delta.Snapshot(state)
    for name, weight in weights_of(2).items():
        state[name].copy_(weight)
    state["all"].copy_(torch.arange(15).view(3, 5) + 1)
    tte.delta.save(base.changes(), tmp_path / "changes.safetensors")
    patches = weight_patches(tte.delta.load(tmp_path / "changes.safetensors"))
    assert sorted(patch.name for patch in patches) == sorted({*SHAPES, "all"})
    for patch in patches:
        SparseNCCLTrainerWeightTransferEngine._validate_patch(patch)
    load_checkpoint_weight_patches(
        model,
        [
            CheckpointWeightPatch(patch.name, patch.full_shape, patch.values.dtype, patch.values, patch.indices)
            for patch in patches
        ],
    )
    assert [name for name, weight in model.weights.items() if not same_bits(weight, state[name])] == []
