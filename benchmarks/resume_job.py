"""The job that bench_resume.py starts by torchrun: a model on FSDP2 x TP that resumes, trains a step, and may save.

Every rank notes when it has passed each phase, by the machine's clock, which all its processes share, and by the time
that its own threads have computed.
"""

import time

PASSED: list[tuple[str, float, float]] = []


def passed(phase: str) -> None:
    PASSED.append((phase, time.monotonic(), time.process_time()))


passed("start")


import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
from functools import wraps  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

passed("import torch")

NUM_LAYERS, DIM, FFN_DIM, VOCAB, SEQ_LEN = 12, 512, 2048, 4096, 32
TP, GLOBAL_BATCH, NUM_ROWS = 2, 16, 1024


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, FFN_DIM)
        self.down = nn.Linear(FFN_DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.output = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embeddings(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.output(x).flatten(0, 1), tokens[:, 1:].flatten())


class Job:
    """The model, its optimizer and its data on one rank; built on the meta device, as large models are."""

    def __init__(self) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
        self.dp_rank, self.dp_size = mesh["dp"].get_local_rank(), mesh["dp"].size()
        passed("groups")
        with torch.device("meta"):
            self.model = Model()
        for layer in self.model.layers:
            parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(self.model, mesh=mesh["dp"])
        self.model.to_empty(device="cpu")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 100))
        self.rows = torch.arange(NUM_ROWS * SEQ_LEN).view(NUM_ROWS, SEQ_LEN) * 7919 % VOCAB
        passed("model")

    def fill(self) -> None:
        torch.manual_seed(self.dp_rank)  # parameters that TP leaves alone are equal on its ranks
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.to_local().normal_(std=0.02)  # type: ignore[attr-defined]

    def train_step(self, tokens: torch.Tensor, scheduler: Any) -> None:
        self.model(tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        scheduler.step()


class Ours:
    """``tte.save`` and ``tte.load``: the state, the data loader, the LR scheduler, the counters."""

    def __init__(self) -> None:
        import torchtitan_ext as tte
        from torchtitan_ext import elastic
        from torchtitan_ext.storage import FileReader

        self.save, self.load, self.elastic = tte.save, tte.load, elastic
        self.reader: Any = FileReader

    def parts(self, job: Job) -> dict[str, Any]:
        loader = self.elastic.ElasticDataLoader(
            job.rows, global_batch_size=GLOBAL_BATCH, dp_rank=job.dp_rank, dp_size=job.dp_size
        )
        scheduler = self.elastic.ElasticLRScheduler(job.scheduler, global_batch_size=GLOBAL_BATCH)
        return {"dataloader": loader, "lr_scheduler": scheduler, "train_state": self.elastic.TrainState()}

    def resume(self, state: dict[str, Any], path: str) -> None:
        self.load(state, path, policy=self.elastic.ElasticPolicy())

    def batch(self, parts: dict[str, Any]) -> torch.Tensor:
        tokens: torch.Tensor = next(iter(parts["dataloader"]))
        parts["train_state"].advance(samples=GLOBAL_BATCH)
        return tokens


class Stock:
    """``dcp.save`` and ``dcp.load``: the same without the data loader; a count tells where the data stood."""

    def __init__(self) -> None:
        import torch.distributed.checkpoint as dcp

        self._dcp = dcp
        self.reader: Any = dcp.FileSystemReader

    def parts(self, job: Job) -> dict[str, Any]:
        self._rows = job.rows
        self._share = slice(job.dp_rank, GLOBAL_BATCH, job.dp_size)
        return {"lr_scheduler": job.scheduler, "num_batches": torch.tensor(0)}

    def save(self, state: dict[str, Any], path: str) -> None:
        self._dcp.save(state, checkpoint_id=path)

    def resume(self, state: dict[str, Any], path: str) -> None:
        self._dcp.load(state, checkpoint_id=path)

    def batch(self, parts: dict[str, Any]) -> torch.Tensor:
        first = int(parts["num_batches"]) * GLOBAL_BATCH
        parts["num_batches"] += 1
        return self._rows[first : first + GLOBAL_BATCH][self._share]


def note_reads(reader: Any) -> None:
    """Planning ends where the first values are read, reading where the last have been."""
    read_data = reader.read_data

    @wraps(read_data)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if PASSED[-1][0] != "read":
            passed("plan")
        else:
            PASSED.pop()
        future = read_data(*args, **kwargs)
        future.wait()
        passed("read")
        return future

    reader.read_data = noted


def fingerprint(state: dict[str, Any]) -> dict[str, str]:
    import torchtitan_ext as tte

    return dict(tte.fingerprint({"model": state["model"], "optimizer": state["optimizer"]["state"]}).values)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=["ours", "stock"])
    parser.add_argument("--load")
    parser.add_argument("--save")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--notes", type=Path, required=True)
    arguments = parser.parse_args()
    contender: Ours | Stock = Ours() if arguments.contender == "ours" else Stock()
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    note_reads(contender.reader)
    passed("import checkpointing")
    dist.init_process_group("gloo")
    job = Job()
    parts = contender.parts(job)
    if not arguments.load:
        job.fill()
    model, optimizer = get_state_dict(job.model, job.optimizer)
    state = {"model": model, "optimizer": optimizer, **parts}
    passed("state dict")
    if arguments.load:
        contender.resume(state, arguments.load)
        set_state_dict(job.model, job.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        passed("components")
    loaded = fingerprint(state) if arguments.check else {}
    job.train_step(contender.batch(parts), parts["lr_scheduler"])
    passed("first step")
    if arguments.save:
        state["model"], state["optimizer"] = get_state_dict(job.model, job.optimizer)
        contender.save(state, arguments.save)
    saved = fingerprint(state) if arguments.save else {}
    notes = {"passed": PASSED, "loaded": loaded, "saved": saved}
    Path(arguments.notes, f"{dist.get_rank()}.json").write_text(json.dumps(notes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # what Python and gloo do at their end is no part of a restart
