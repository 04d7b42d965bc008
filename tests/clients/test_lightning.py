"""Lightning's own Fabric and Trainer with ``ModelParallelStrategy``, which call DCP without a planner."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from models import EVEN, Sizes, TinyModel, build_whole
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader

import torchtitan_ext as tte

pytest.importorskip("lightning")
from lightning import Fabric, LightningModule, Trainer
from lightning.fabric import strategies as of_fabric
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import strategies as of_trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

pytestmark = pytest.mark.nightly("clients")

Mesh = tuple[int, int]  # data parallel x tensor parallel
NUM_STEPS, BATCH, LENGTH = 3, 12, 5  # steps of an epoch: one in the job that saves, another in the one that resumes
SIDES = ("stock", "ours")


def of_side(side: str) -> AbstractContextManager[None]:
    return tte.integrations.installed() if side == "ours" else nullcontext()


def whole_batches(sizes: Sizes) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, sizes.vocab, (NUM_STEPS, BATCH, LENGTH + 1), generator=generator)


def own_batches(sizes: Sizes, mesh: DeviceMesh) -> list[Tensor]:
    """The rows of this rank's data parallel coordinate, of each batch."""
    data_parallel = mesh["data_parallel"]
    return [tokens.chunk(data_parallel.size())[data_parallel.get_local_rank()] for tokens in whole_batches(sizes)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # One tensor after the other: those of the 2D mesh cannot be mixed with those of one axis.
    return torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def losses_without_a_stop(sizes: Sizes, decay: float) -> list[float]:
    """Of two epochs, in this process alone and without Lightning."""
    model = build_whole(sizes)
    optimizer = build_optimizer(model)
    schedule = ExponentialLR(optimizer, decay)
    losses = []
    for _ in range(2):
        for tokens in whole_batches(sizes):
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        schedule.step()
    return losses


def assert_goes_on(before: list[float], after: list[float], sizes: Sizes, decay: float = 1.0) -> None:
    """Equal but for the order in which ranks add."""
    assert before + after == pytest.approx(losses_without_a_stop(sizes, decay), rel=1e-5)


def parallelize(model: TinyModel, mesh: DeviceMesh) -> TinyModel:
    """What users pass to Fabric as ``parallelize_fn``, and do in the Trainer's ``configure_model``."""
    if mesh["tensor_parallel"].size() > 1:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "block.up": ColwiseParallel(),
            "block.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor_parallel"], plan)
    fully_shard(model.block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


class FabricJob:
    """A training loop on Fabric, on every rank of a mesh."""

    def __init__(self, mesh: Mesh, sizes: Sizes, seed: int) -> None:
        strategy = of_fabric.ModelParallelStrategy(parallelize, *mesh)
        self.fabric = Fabric(accelerator="cpu", devices=mesh[0] * mesh[1], strategy=strategy)
        self.fabric.launch()
        self.batches = own_batches(sizes, strategy.device_mesh)
        model = self.fabric.setup(build_whole(sizes, seed))
        self.state = {"model": model, "optimizer": self.fabric.setup_optimizers(build_optimizer(model)), "step": 0}

    def train(self, num_steps: int) -> list[float]:
        model, optimizer, losses = self.state["model"], self.state["optimizer"], []
        for _ in range(num_steps):
            loss = loss_of(model, self.batches[self.state["step"] % NUM_STEPS])
            self.fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(self.fabric.all_reduce(loss.detach())))
            self.state["step"] += 1
        return losses


def fabric_saves(
    rank: int, world_size: int, mesh: Mesh, sizes: Sizes, path: Path, sides: tuple[str, ...]
) -> list[float]:
    """Saves after each step into one directory, as a job does that keeps the latest checkpoint only."""
    job = FabricJob(mesh, sizes, seed=0)
    losses = []
    for _ in range(NUM_STEPS):
        losses += job.train(1)
        for side in sides:
            with of_side(side):
                job.fabric.save(path / side, job.state)
    return losses


def fabric_resumes(rank: int, world_size: int, mesh: Mesh, sizes: Sizes, path: Path) -> dict[str, list[float]]:
    """The losses after the resume, by who wrote and who read."""
    losses = {}
    for checkpoint in sorted(path.iterdir()):
        for side in SIDES:
            job = FabricJob(mesh, sizes, seed=1)
            with of_side(side):
                job.fabric.load(checkpoint, job.state)
            losses[f"{checkpoint.name} -> {side}"] = job.train(NUM_STEPS)
    return losses


@pytest.mark.parametrize(("old", "new"), [((2, 2), (1, 2)), ((4, 1), (2, 1)), ((2, 1), (4, 1))])
def test_fabric_resumes_on_another_mesh(run_world, tmp_path: Path, old: Mesh, new: Mesh) -> None:
    before = run_world(old[0] * old[1], fabric_saves, old, EVEN, tmp_path, SIDES)[0]
    resumed = run_world(new[0] * new[1], fabric_resumes, new, EVEN, tmp_path)[0]
    assert resumed.keys() == {"stock -> stock", "stock -> ours", "ours -> stock", "ours -> ours"}
    for after in resumed.values():
        assert_goes_on(before, after, EVEN)


def fabric_saves_refused(rank: int, world_size: int, mesh: Mesh, sizes: Sizes, path: Path) -> str:
    job = FabricJob(mesh, sizes, seed=0)
    job.train(1)
    try:
        job.fabric.save(path, job.state)
    except CheckpointException as error:
        return str(error)
    return "saved"


# Rows that two tensor parallel ranks cannot share evenly, nor three data parallel ranks what these get.
SEVEN_ROWS, THIRTEEN_ROWS = (Sizes("uneven vocabulary", rows, hidden=9, feed_forward=32) for rows in (7, 13))


def test_what_stock_makes_of_uneven_rows(run_world, tmp_path: Path) -> None:
    for answer in run_world(6, fabric_saves_refused, (3, 2), THIRTEEN_ROWS, tmp_path / "13"):
        assert "overlapping chunks" in answer
    assert set(run_world(6, fabric_saves_refused, (3, 2), SEVEN_ROWS, tmp_path / "7")) == {"saved"}
    with pytest.raises(CheckpointException, match="mismatch sizes"):
        _load_distributed_checkpoint(tmp_path / "7")


@pytest.mark.parametrize("sizes", [SEVEN_ROWS, THIRTEEN_ROWS], ids=["7 rows", "13 rows"])
def test_fabric_resumes_uneven_rows(run_world, tmp_path: Path, sizes: Sizes) -> None:
    before = run_world(6, fabric_saves, (3, 2), sizes, tmp_path, ("ours",))[0]
    for after in run_world(2, fabric_resumes, (1, 2), sizes, tmp_path)[0].values():
        assert_goes_on(before, after, sizes)
    whole = _load_distributed_checkpoint(tmp_path / "ours")
    assert whole["model"]["head.weight"].shape == (sizes.vocab, sizes.hidden)


DECAY = 0.5


class TrainerModule(LightningModule):
    """What a user of the Trainer writes; its schedule is part of what is resumed."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        super().__init__()
        self.sizes, self.model = sizes, build_whole(sizes, seed)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        parallelize(self.model, self.device_mesh)

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self)
        return [optimizer], [ExponentialLR(optimizer, DECAY)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(own_batches(self.sizes, self.device_mesh), batch_size=None)

    def training_step(self, tokens: Tensor) -> Tensor:
        loss = loss_of(self.model, tokens)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss


def trainer_of(mesh: Mesh, num_epochs: int, callback: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=mesh[0] * mesh[1],
        strategy=of_trainer.ModelParallelStrategy(*mesh),
        max_epochs=num_epochs,
        callbacks=[callback],
        use_distributed_sampler=False,  # It shuffles.
        logger=False,
        enable_progress_bar=False,
        **options,
    )


def train_epochs(mesh: Mesh, sizes: Sizes, seed: int, num_epochs: int, save_to: Path, load_from: str | None) -> Any:
    """Losses of the Trainer's epochs, and where its own callback has saved the last of them."""
    module, trainer = TrainerModule(sizes, seed), trainer_of(mesh, num_epochs, ModelCheckpoint(save_to))
    trainer.fit(module, ckpt_path=load_from)
    return module.losses, trainer.checkpoint_callback.best_model_path


def trainer_saves(rank: int, world_size: int, mesh: Mesh, sizes: Sizes, path: Path, sides: tuple[str, ...]) -> Any:
    """The losses before the stop, and the checkpoint of each side."""
    losses, checkpoints = [], {}
    for side in sides:
        with of_side(side):
            losses, checkpoints[side] = train_epochs(mesh, sizes, 0, 1, path / side, None)
    return losses, checkpoints


def trainer_resumes(
    rank: int, world_size: int, mesh: Mesh, sizes: Sizes, path: Path, checkpoints: dict[str, str]
) -> dict[str, list[float]]:
    losses = {}
    for written, checkpoint in checkpoints.items():
        for side in SIDES:
            way = f"{written} -> {side}"
            with of_side(side):
                losses[way] = train_epochs(mesh, sizes, 1, 2, path / way, checkpoint)[0]
    return losses


@pytest.mark.parametrize(
    ("old", "new", "sizes", "sides"),
    [((2, 2), (1, 2), EVEN, SIDES), ((4, 1), (2, 1), EVEN, SIDES), ((3, 2), (1, 2), SEVEN_ROWS, ("ours",))],
)
def test_trainer_resumes_on_another_mesh(
    run_world, tmp_path: Path, old: Mesh, new: Mesh, sizes: Sizes, sides: tuple[str, ...]
) -> None:
    before, checkpoints = run_world(old[0] * old[1], trainer_saves, old, sizes, tmp_path, sides)[0]
    resumed = run_world(new[0] * new[1], trainer_resumes, new, sizes, tmp_path, checkpoints)[0]
    assert len(resumed) == 2 * len(sides)
    for after in resumed.values():
        assert_goes_on(before, after, sizes, DECAY)


def callback_of_the_page(run: Path, **options: Any) -> Any:
    page = (Path(__file__).parents[2] / "docs" / "use" / "adoption.md").read_text()
    names: dict[str, Any] = {"Callback": Callback, "tte": tte}
    exec(page.split("# Lightning: a run\n")[1].split("```")[0], names)
    return names["RunCheckpoints"](run, **options)


def fit_by_manager(
    rank: int, world_size: int, mesh: Mesh, sizes: Sizes, run: Path, num_epochs: int, max_steps: int
) -> tuple[list[float], list[int], int]:
    """The Trainer with the callback of the page: losses, the steps that are kept, and the Trainer's count."""
    callback = callback_of_the_page(run, every=NUM_STEPS, keep=2)
    module = TrainerModule(sizes, seed=int(max_steps < 0))
    trainer = trainer_of(mesh, num_epochs, callback, enable_checkpointing=False, max_steps=max_steps)
    trainer.fit(module)
    return module.losses, callback.manager.steps(), trainer.global_step


@pytest.mark.parametrize(("old", "new"), [((2, 2), (1, 2)), ((3, 1), (2, 1))])
def test_trainer_goes_on_by_a_manager(run_world, tmp_path: Path, old: Mesh, new: Mesh) -> None:
    # The first job ends in the second epoch: the other one begins after the first, with other weights.
    before, kept, _ = run_world(old[0] * old[1], fit_by_manager, old, EVEN, tmp_path, 2, NUM_STEPS + 1)[0]
    assert len(before) == NUM_STEPS + 1 and kept == [NUM_STEPS]
    for after, kept, step in run_world(new[0] * new[1], fit_by_manager, new, EVEN, tmp_path, 2, -1):
        assert_goes_on(before[:NUM_STEPS], after, EVEN, DECAY)
        assert kept == [NUM_STEPS, 2 * NUM_STEPS] and step == 2 * NUM_STEPS  # keep=2 removes none


def fit_steps_of_several_batches(rank: int, world_size: int, run: Path) -> list[int]:
    """The steps that are saved, in the order of the calls, of four epochs of one step in two jobs."""
    calls: list[int] = []
    save = tte.CheckpointManager.save

    def note(manager: Any, state: Any = None, step: int | None = None) -> None:
        calls.append(step or 0)
        save(manager, state, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tte.CheckpointManager, "save", note)
        for num_epochs in (2, 4):
            options = {"enable_checkpointing": False, "accumulate_grad_batches": NUM_STEPS}
            trainer = trainer_of((world_size, 1), num_epochs, callback_of_the_page(run, every=1), **options)
            trainer.fit(TrainerModule(EVEN, seed=0))
            assert trainer.global_step == num_epochs
    return calls


def test_a_step_of_several_batches_is_saved_once(run_world, tmp_path: Path) -> None:
    assert run_world(2, fit_steps_of_several_batches, tmp_path) == [[1, 2, 3, 4]] * 2
