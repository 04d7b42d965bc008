"""`CheckpointManager`: a run goes on from its newest good step as if it had never stopped, and keeps what it should."""

import errno
import random
import re
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import warm_processes
from checkpoints import flip_byte
from lost_worlds import end_rank, run_losing_world
from models import BY_NAME, EVEN, UNEVEN, build_model, build_optimizer, build_whole, differences, leaves, take_steps
from signals import die
from tier import num_cases
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation import choose_step
from torchtitan_ext.checkpoint.operation.save_job import OnStorageError
from torchtitan_ext.errors import (
    AbsentRunError,
    CheckpointFailedError,
    LostRankError,
    MissingStateError,
    NoCheckpointError,
)
from torchtitan_ext.runs.objects import _FLAT
from torchtitan_ext.storage.inspect.verify import find_damage
from torchtitan_ext.storage.native import file_writer

Manager = tte.CheckpointManager


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((300, 20), float(step)), "step": step}


def resumed(manager: Manager) -> int:
    """What the run resumes at, with a look at what it has loaded."""
    state = state_of(0)
    step = manager.resume(state)
    assert state["step"] == step and bool(state["w"].eq(step).all())
    return step


def damage(step: Path) -> None:
    file = max((path for path in step.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    flip_byte(file, file.stat().st_size // 2)


@pytest.mark.parametrize("options", [{}, {"asynchronous": False}, {"stager": tte.checkpoint.CpuStager(num_buffers=2)}])
def test_a_run_stops_and_goes_on(tmp_path: Path, options: dict[str, Any]) -> None:
    run = tmp_path / "run"
    with Manager(run, every=2, keep=2, **options) as manager:
        assert resumed(manager) == 0 and manager.report is None and manager.wait() is None
        assert (manager.steps(), manager.latest) == ([], None)
        for step in range(1, 10):
            if manager.should_save(step):
                manager.save(state_of(step), step)
        result = manager.wait()
        assert result is not None and Path(result.path) == run / "step-8"
        assert (manager.steps(), manager.latest) == ([6, 8], 8)
    with Manager(run) as manager:
        assert resumed(manager) == 8
        assert "saved by 1 rank, loaded by 1 rank" in str(manager.report)
        assert [step for step in range(20) if manager.should_save(step)] == []
    with pytest.raises(ValueError, match="the manager is closed; make a new one"):
        manager.resume(state_of(0))


def test_steps_that_others_load(tmp_path: Path) -> None:
    with Manager(tmp_path / "run") as manager:
        assert manager.find() is None and manager.pending is None
        for step in (1, 2):
            manager.save(state_of(step), step)
        assert manager.pending is not None
        assert manager.find() == tmp_path / "run" / "step-2" and manager.pending is None
        assert manager.find(1) == tmp_path / "run" / "step-1"
        with pytest.raises(NoCheckpointError, match="no finished checkpoint of step 7"):
            manager.find(7)
    place = OnStorageError(fallback=tmp_path / "fallback").place_of(tmp_path / "lost" / "step-5")
    tte.save(state_of(5), place)
    with Manager(tmp_path / "lost", fallback=tmp_path / "fallback") as manager:
        assert str(manager.find(5)) == place
        with pytest.raises(AbsentRunError, match="pass step=5"):
            manager.find()


class SeveralOptimizers(torch.optim.Optimizer, Stateful):
    """One object for several optimizers, with a state of its own, as torchtitan's."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})
        self.moments = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"a.weight.moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = state["a.weight.moments"]


def test_optimizers_with_a_state_of_their_own(tmp_path: Path) -> None:
    optimizer = SeveralOptimizers()
    optimizer.moments += 7
    with Manager(tmp_path) as manager:
        manager.save({"optimizer": optimizer}, 1)
    other = SeveralOptimizers()
    assert Manager(tmp_path, optimizer=other).resume() == 1 and other.moments.eq(7).all()


def test_steps_that_stay_for_good(tmp_path: Path) -> None:
    with Manager(tmp_path, keep=2, keep_every=10) as manager:
        for step in range(5, 45, 5):
            manager.save(state_of(step), step)
    assert manager.steps() == [10, 20, 30, 35, 40]


def test_steps_that_are_proved(tmp_path: Path) -> None:
    frozen = torch.randn(4000, 50)
    options = {"keep": 1, "fingerprints": True, "prove": True, "step_pattern": "iter_{step:07d}"}
    with Manager(tmp_path, frozen=frozen, **options) as manager:
        for step in (1, 2, 3):
            manager.save(state_of(step), step)
        manager.wait()
        assert (tmp_path / "iter_0000003").is_dir() and manager.steps() == [3]
        copy = frozen.clone()
        frozen.zero_()
        assert resumed(manager) == 3 and torch.equal(frozen, copy)
        assert manager.report is not None and manager.report.proof is not None
        assert {"frozen", "w"} <= set(manager.report.proof.proved)


def test_a_run_is_set_back(tmp_path: Path) -> None:
    with Manager(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            manager.save(state_of(step), step)
    with Manager(tmp_path / "run") as manager:
        state = state_of(0)
        assert manager.resume(state, step=1) == 1 and state["step"] == 1
        with pytest.raises(NoCheckpointError, match="no finished checkpoint of step 7"):
            manager.resume(state, step=7)
        with pytest.warns(UserWarning, match="these are abandoned"):
            manager.save(state_of(2), 2)
            manager.wait()
        assert manager.steps() == [1, 2] and resumed(manager) == 2
    (tmp_path / "fallback").mkdir()
    place = OnStorageError(fallback=tmp_path / "fallback").place_of(tmp_path / "lost" / "step-5")
    tte.save(state_of(5), place)
    with Manager(tmp_path / "lost", fallback=tmp_path / "fallback") as manager:
        with pytest.raises(AbsentRunError, match="pass step=5 to go on from the fallback"):
            manager.resume(state_of(0))
        assert manager.resume(state_of(0), step=5) == 5


def test_damaged_steps_are_passed_over(tmp_path: Path) -> None:
    with Manager(tmp_path, asynchronous=False) as manager:
        for step in (1, 2, 3):
            manager.save(state_of(step), step)
        damage(tmp_path / "step-3")
        with pytest.warns(UserWarning, match="step 2 is loaded, 1 newer skipped: step 3"):
            assert resumed(manager) == 2
        damage(tmp_path / "step-2")
        damage(tmp_path / "step-1")
        with pytest.raises(NoCheckpointError, match="has no good checkpoint: step 3"):
            manager.resume(state_of(0))
        (tmp_path / "other" / "step-4").mkdir(parents=True)  # a save that never finished
        assert Manager(tmp_path / "other").resume(state_of(0)) == 0


def test_files_are_verified_where_a_load_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[str] = []

    def note(path: Path, **options: Any) -> Any:
        verified.append(path.name)
        return find_damage(path, **options)

    monkeypatch.setattr(choose_step, "find_damage", note)
    with Manager(tmp_path, asynchronous=False) as manager:
        for step in (1, 2):
            manager.save(state_of(step), step)
        assert resumed(manager) == 2 and verified == []
        with pytest.raises(MissingStateError):  # for another reason: nothing is read for it
            manager.resume({"v": torch.zeros(2)})
        with pytest.raises(CheckpointFailedError, match="it does not want it"):  # and the files are good
            manager.resume({"step": Unwilling()})
        assert verified == ["step-2"]
        for name in (".metadata", ".tte_index", "__0_0.distcp"):
            verified.clear()
            whole = (tmp_path / "step-2" / name).read_bytes()
            flip_byte(tmp_path / "step-2" / name, len(whole) // 2)
            with pytest.warns(UserWarning, match="step 1 is loaded, 1 newer skipped: step 2"):
                assert resumed(manager) == 1
            assert verified == ["step-2", "step-1"]
            (tmp_path / "step-2" / name).write_bytes(whole)


class Unwilling:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise RuntimeError("it does not want it")


def test_the_error_of_a_pending_save_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager, write = Manager(tmp_path), file_writer.FileWriter.write_data

    def refuse(*args: Any) -> None:
        raise OSError("no space")

    for call in (lambda: manager.save(state_of(2), 2), manager.wait, manager.close):
        monkeypatch.setattr(file_writer.FileWriter, "write_data", refuse)
        manager.save(state_of(1), 1)
        with pytest.raises(CheckpointFailedError, match="no space"):
            call()
        monkeypatch.setattr(file_writer.FileWriter, "write_data", write)
        if call != manager.close:
            manager.save(state_of(3), 3)
            assert manager.wait() is not None and manager.steps() == [3]
    monkeypatch.setattr(file_writer.FileWriter, "write_data", refuse)
    with pytest.raises(KeyError, match="training"):  # which is not hidden by the save that failed
        with Manager(tmp_path) as manager:
            manager.save(state_of(4), 4)
            raise KeyError("training")
    assert "the last save failed too" in caplog.text and "no space" in caplog.text


def test_a_save_that_waits_for_the_one_before_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, may_go_on = file_writer.FileWriter.write_data, threading.Event()

    def wait_and_write(*args: Any) -> Any:
        assert may_go_on.wait(60)
        return write(*args)

    monkeypatch.setattr(file_writer.FileWriter, "write_data", wait_and_write)
    monkeypatch.setattr(tte.runs.checkpoint_manager, "_TOLD_SECONDS", -1.0)
    with Manager(tmp_path) as manager:
        manager.save(state_of(1), 1)
        wait = manager.wait
        monkeypatch.setattr(manager, "wait", lambda: (may_go_on.set(), wait())[1])
        manager.save(state_of(2), 2)
    assert re.search(r"the save of step 2 waited \d+\.\d s for that of step 1", caplog.text)
    assert manager.steps() == [1, 2]


def test_where_storage_refuses_saves_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, fallback = tmp_path / "run", tmp_path / "fallback"
    with Manager(run, fallback=fallback, asynchronous=False) as manager:
        manager.save(state_of(1), 1)
        write = file_writer.FileWriter.write_data

        def refuse_the_run(writer: Any, *args: Any) -> Any:
            if Path(writer.path).is_relative_to(run):
                raise OSError(errno.ENOSPC, "no space")
            return write(writer, *args)

        monkeypatch.setattr(file_writer.FileWriter, "write_data", refuse_the_run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager.save(state_of(2), 2)
        result = manager.wait()
        assert result is not None and Path(result.path).is_relative_to(fallback)
        assert manager.steps() == [1, 2] and resumed(manager) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"every": 0}, "got every=0, expected at least 1"),
        ({"keep": True}, "got keep=True, expected a whole number"),
        ({"keep": 0}, "CheckpointManager: got keep=0, expected at least 1"),
        ({"evry": 5}, "got evry=5, no option, and no object to fill; perhaps every"),
        ({"samples": 5}, "no object to fill; pass it in the state of save and resume: {'samples': ...}"),
        ({"run": ""}, "got run='', expected a directory"),
        ({"asynchronous": "no"}, "got asynchronous='no', expected True or False"),
        ({"policy": 3}, "got policy=3, expected an ElasticPolicy"),
        ({"keep_every": 5}, "got keep_every=5 and no keep: all steps stay"),
        ({"step_pattern": "epoch=*-step={step}"}, "expected one without stars"),
        ({"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])}, "whose parameters no one module"),
        ({"run": __file__}, "a file; expected a directory"),
        ({"run": "memory://run", "keep": 2}, "got keep=2 and 'memory://run/step-1', expected a directory"),
        ({"retries": -1}, "got retries=-1, expected a whole number of at least 0"),
        ({"asynchronous": False, "stager": tte.checkpoint.CpuStager()}, "got a stager and asynchronous=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        Manager(**{"run": tmp_path, **arguments})


def test_wrong_calls(tmp_path: Path) -> None:
    manager = Manager(tmp_path, w=torch.ones(3))
    for call, told in (
        (lambda: manager.save({"w": torch.ones(1)}, 1), "got 'w' in the state and as an object"),
        (lambda: manager.save(), "got step=None, expected the number of a step"),
        (lambda: manager.save(step=0), "got step=0, expected the number of a step of at least 1"),
        (lambda: manager.save(7), "save\\(step=step\\) of objects"),
        (lambda: Manager(tmp_path).resume(), "got neither a state nor objects"),
        (lambda: Manager(tmp_path).resume([1]), "got state="),
        (lambda: manager.should_save("1"), "got step='1', expected a whole number"),
    ):
        with pytest.raises((TypeError, ValueError), match=told):
            call()


@pytest.mark.nightly("pages")
def test_the_program_of_the_page_goes_on(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "use" / "resume.md").read_text()
    program = page.split("```python\n")[1].split("```")[0].replace("/tmp/small", str(tmp_path))
    for shown in (
        "trained to step 10, kept [5, 10]",
        "trained to step 20, kept [15, 20]",
        "step 30, kept [20, 25, 30]",
    ):
        done = warm_processes.run(["-c", program], capture_output=True)
        assert done.returncode == 0 and shown in done.stdout, done.stdout + done.stderr


def refuse_on_one_rank(rank: int, world_size: int, path: Path) -> None:
    manager = Manager(path, timeout_seconds=60)
    for call in (
        lambda: manager.save(state_of(1), 0 if rank == 1 else 1),
        lambda: manager.resume([] if rank == 1 else state_of(0)),
    ):
        with pytest.raises((TypeError, ValueError), match="expected the number of a step|expected a state dict"):
            call()
    manager.save(state_of(1), 1)
    assert resumed(manager) == 1


def test_what_one_rank_refuses_is_refused_by_all(run_world: Callable[..., Any], tmp_path: Path) -> None:
    run_world(3, refuse_on_one_rank, tmp_path)


class Interrupting(dict[str, Any]):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}


def interrupt_a_resume(rank: int, world_size: int, path: Path) -> str:
    component = Interrupting()
    manager = Manager(path, timeout_seconds=60, component=component)
    for step in (1, 2):
        manager.save(state_of(step), step)
    if rank == 0:
        component.load_state_dict = component.update  # type: ignore[method-assign]
    with pytest.raises(BaseException) as caught:
        manager.resume(state_of(0))
    if rank == 0:
        assert isinstance(caught.value, CheckpointFailedError) and caught.value.was_interrupted
    dist.monitored_barrier()
    manager.close()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_no_rank_searches_for_damage_without_one_that_was_interrupted(
    run_world: Callable[..., Any], tmp_path: Path
) -> None:
    text, own = run_world(2, interrupt_a_resume, tmp_path)
    assert own == "KeyboardInterrupt: "
    assert text.startswith("CheckpointFailedError: load failed on 1 rank(s): rank 1: KeyboardInterrupt: ")


# ---- models and optimizers as objects ----


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_FLAT),
    }


def train_on(rank: int, world_size: int, layout: str, path: Path, at: int, until: int) -> list[str]:
    """One job: resumes and trains. Compared with a run in one process that knows no checkpoints."""
    sizes = EVEN if "dim1" in layout else UNEVEN
    model = build_model(BY_NAME[layout], sizes, seed=0 if at == 0 else 7)
    optimizer = build_optimizer(model, lr=0.01 if at == 0 else 0.5)
    truth = build_whole(sizes)
    truth_optimizer = build_optimizer(truth, lr=0.01)
    with Manager(path, every=2, keep=2, model=model, optimizer=optimizer) as manager:
        assert manager.resume() == at
        for step in range(1, until + 1):
            take_steps(truth, truth_optimizer, 1)
            if step > at:
                take_steps(model, optimizer, 1)
                if manager.should_save(step):
                    manager.save(step=step)
    return differences(states(model, optimizer), dict(leaves(states(truth, truth_optimizer))))


def test_a_model_and_its_optimizer_go_on_on_other_meshes(run_world: Callable[..., Any], tmp_path: Path) -> None:
    """A fresh optimizer each time, and a learning rate that is not the run's."""
    at = 0
    for layout in ("fsdp2_tp2", "fsdp2", "hsdp2x2_tp2", "tp4"):
        size = BY_NAME[layout].world_size
        assert run_world(size, train_on, layout, tmp_path, at, at + 2) == [[]] * size
        at += 2


def test_stages_of_a_pipeline_share_one_state(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Module, list[nn.Module], list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        whole = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 2))
        stages = [nn.ModuleDict({"0": whole[0]}), nn.ModuleDict({"1": whole[1], "2": whole[2]})]
        return whole, stages, [torch.optim.AdamW(stage.parameters(), lr=0.1) for stage in stages]

    whole, stages, optimizers = made(0)
    for step in range(3):
        for number, param in enumerate(whole.parameters()):
            param.grad = torch.full_like(param, 0.1 * (number + step))
        for optimizer in optimizers:
            optimizer.step()
    with Manager(tmp_path, model=stages, optimizer=optimizers) as manager:
        manager.save(step=3)
    other, _, _ = made(1)
    joined = torch.optim.AdamW(other.parameters(), lr=0.7)
    assert Manager(tmp_path, model=other, optimizer=joined).resume() == 3
    again, parts, several = made(2)
    assert Manager(tmp_path, model=parts, optimizer=several).resume() == 3
    for model in (other, again):
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), whole.parameters(), strict=True))
    assert joined.param_groups[0]["lr"] == 0.1
    moments = [optimizer.state[param]["exp_avg"] for optimizer in optimizers for param in optimizer.state]
    for found in ([joined], several):
        got = [optimizer.state[param]["exp_avg"] for optimizer in found for param in optimizer.state]
        assert all(torch.equal(*pair) for pair in zip(got, moments, strict=True))


@pytest.mark.parametrize(
    "save", [tte.save, lambda state, path: dcp.save(state, checkpoint_id=path)], ids=["ours", "stock"]
)
def test_a_run_of_get_state_dict_goes_on(tmp_path: Path, save: Callable[..., Any]) -> None:
    """An optimizer in groups; a model whose names are numbers, as those of groups are."""

    def made(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        return model, torch.optim.AdamW(
            [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}], lr=lr
        )

    model, optimizer = made(0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, tmp_path / "step-7")
    for _ in range(2):  # from groups, then from what the manager has saved
        again, other = made(0.5)
        with Manager(tmp_path, model=again, optimizer=other) as manager:
            at = manager.resume()
            assert all(torch.equal(*pair) for pair in zip(again.parameters(), model.parameters(), strict=True))
            assert [group["lr"] for group in other.param_groups] == [0.1, 0.1]
            assert all(float(state["step"]) == 1 for state in other.state.values()) and len(other.state) == 4
            manager.save(step=at + 1)
    assert manager.steps() == [7, 8, 9]


def test_a_refused_resume_leaves_a_fresh_optimizer_fresh(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Manager(tmp_path, model=model, optimizer=optimizer) as manager:
        with pytest.raises(ValueError, match="optimizer has taken no step and has no state yet"):
            manager.save(step=1)
        model.weight.grad, model.bias.grad = torch.ones(2, 3), torch.ones(2)
        optimizer.step()
        manager.save(step=1)
    other = nn.Linear(3, 2)
    before = [param.clone() for param in other.parameters()]
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(MissingStateError, match="schedule"):
        Manager(tmp_path, model=other, optimizer=fresh, schedule=torch.ones(1)).resume()
    assert not fresh.state and all(torch.equal(*pair) for pair in zip(other.parameters(), before, strict=True))
    assert Manager(tmp_path, model=other, optimizer=fresh).resume() == 1
    assert torch.equal(other.weight, model.weight) and float(fresh.state[other.weight]["step"]) == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(9, 4), nn.LayerNorm(4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)))


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, lr=0.001),  # which has no state, ever
        lambda params: torch.optim.SGD(params, lr=0.001, momentum=0.9),
        lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), amsgrad=True),
        lambda params: torch.optim.Adafactor(params),
        lambda params: torch.optim.AdamW(
            [{"params": params[:1], "lr": 0.3, "betas": (0.8, 0.9)}, {"params": params[1:], "weight_decay": 0.0}]
        ),
    ],
    ids=["sgd", "momentum", "amsgrad", "adafactor", "groups"],
)
def test_every_optimizer_goes_on_bit_for_bit(tmp_path: Path, make: Callable[[list[Any]], Any]) -> None:
    """Tied and frozen parameters, and gradients that are there at a resume, which it leaves."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(torch.arange(step, step + 5) % 9).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = Tied()
        return model, make([param for param in model.parameters() if param.requires_grad])

    truth, truth_optimizer = made(0)
    train(truth, truth_optimizer, range(6))
    model, optimizer = made(0)
    train(model, optimizer, range(3))
    with Manager(tmp_path, model=torch.compile(model, backend="eager"), optimizer=optimizer) as manager:
        manager.save(step=3)
    again, other = made(1)
    again(torch.arange(5)).sum().backward()
    grads = [None if param.grad is None else param.grad.clone() for param in again.parameters()]
    assert Manager(tmp_path, model=again, optimizer=other).resume() == 3
    for param, grad in zip(again.parameters(), grads, strict=True):
        assert param.grad is None if grad is None else torch.equal(param.grad, grad)
    other.zero_grad()
    train(again, other, range(3, 6))
    assert all(torch.equal(*pair) for pair in zip(again.parameters(), truth.parameters(), strict=True))
    assert all(bool(param.isfinite().all()) for param in truth.parameters())


# ---- lost ranks ----


def lose_a_rank_in_a_pending_save(rank: int, port: int, channels: Any, path: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    manager = Manager(path, timeout_seconds=3)
    manager.save(state_of(1), 1)
    manager.wait()
    if rank == 1:
        file_writer.FileWriter.write_data = die  # type: ignore[assignment]
    manager.save(state_of(2), 2)
    for call in (lambda: manager.save(state_of(3), 3), lambda: manager.resume(state_of(0))):
        try:
            call()
        except LostRankError as error:
            channels[0].put((rank, error.silent))
    if rank != 1:
        assert manager.steps() == [1]
    end_rank(channels)


@pytest.mark.nightly("lost")
def test_a_rank_that_dies_in_a_pending_save_is_seen_at_the_next_call(tmp_path: Path) -> None:
    results, _ = run_losing_world(lose_a_rank_in_a_pending_save, tmp_path, kind="kill")
    assert results == {0: [((1,),)] * 2, 1: [], 2: [((1,),)] * 2}


# ---- random runs against a plain account of them ----


class Account:
    """What a run must have: by step whether its files are whole. No step is lost or kept but by the rules of `keep`."""

    def __init__(self, keep: int | None, keep_every: int | None) -> None:
        self.keep, self.keep_every = keep, keep_every
        self.whole: dict[int, bool] = {}

    def save(self, step: int) -> None:
        self.whole = {other: is_whole for other, is_whole in self.whole.items() if other < step}  # a run set back
        self.whole[step] = True
        if self.keep is None:
            return
        newest = [other for other in sorted(self.whole, reverse=True) if self.whole[other]][: self.keep]
        limit = newest[-1] if len(newest) == self.keep else 0
        for other in [other for other in self.whole if other < limit]:
            if self.keep_every is None or other % self.keep_every:
                del self.whole[other]

    @property
    def good(self) -> int | None:
        return max((step for step, is_whole in self.whole.items() if is_whole), default=None)


def random_run(rank: int, world_size: int, seeds: list[int], folder: Path) -> list[str]:
    wrong = []
    for seed in seeds:
        draw = random.Random(seed)
        every, keep = draw.choice([1, 2, 5]), draw.choice([None, 1, 2, 3])
        account = Account(keep, None if keep is None else draw.choice([None, 4, 10]))
        run = folder / f"{world_size} {seed}"
        for job in range(4):
            options = {"keep": keep, "keep_every": account.keep_every, "asynchronous": draw.random() < 0.5}
            with warnings.catch_warnings(), Manager(run, every=every, **options) as manager:
                warnings.simplefilter("ignore")
                if account.whole and account.good is None:
                    try:
                        manager.resume(state_of(0))
                        wrong.append(f"seed {seed}, job {job}: resumed from damaged files")
                    except NoCheckpointError:
                        break
                step = resumed(manager)
                if step != (account.good or 0):
                    wrong.append(f"seed {seed}, job {job}: resumed at {step}, expected {account.good}")
                for next_step in range(step + 1, step + draw.randrange(1, 12)):
                    if manager.should_save(next_step):
                        manager.save(state_of(next_step), next_step)
                        account.save(next_step)
                manager.wait()
                if world_size > 1:
                    dist.barrier()  # one rank removes old steps
                if manager.steps() != sorted(account.whole):
                    wrong.append(f"seed {seed}, job {job}: has {manager.steps()}, expected {sorted(account.whole)}")
            for step in sorted(account.whole, reverse=True)[: draw.choice([0, 0, 1, 2])]:
                if account.whole[step] and rank == 0:
                    damage(run / f"step-{step}")
                account.whole[step] = False
            if world_size > 1:
                dist.barrier()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 4, pytest.param(8, marks=pytest.mark.nightly("kills"))])
def test_random_runs(run_world: Callable[..., Any], tmp_path: Path, world_size: int) -> None:
    seeds = list(range(num_cases(20, 0.15)))
    for first in range(0, len(seeds), 20):  # a world has four minutes
        assert run_world(world_size, random_run, seeds[first : first + 20], tmp_path) == [[]] * world_size
