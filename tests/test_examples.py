"""Runs every example as a user does, one of them at commit; where torchrun starts it, by `warm_processes.torchrun`.

The long one runs once; its output serves several tests.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ports import reserved_port
from warm_processes import torchrun

EXAMPLES = Path(__file__).parents[1] / "examples"
CLIENT_EXAMPLES = sorted(
    {
        name
        for test in ("test_client_examples.py", "test_ray.py")
        for name in re.findall(r'"(\w+\.py)"', (Path(__file__).parent / "clients" / test).read_text())
        if (EXAMPLES / name).exists()
    }
)


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_every_example_has_a_test() -> None:
    commands = {path.name for path in EXAMPLES.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    own = {"elastic_8_to_16.py", "first_hour.py", "ops_in_compiled_code.py", "sync_hsdp.py", "train_llama_2d.py"}
    assert commands == {*own, "one_buffer.py", "reshard_live.py", "two_jobs.py", *CLIENT_EXAMPLES}


@pytest.mark.nightly("pages")
def test_ops_in_compiled_code() -> None:
    finished = run_example("ops_in_compiled_code.py")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    losses = re.findall(r"^(?:plain PyTorch|shards, compiled) +((?:\d\.\d{4} ?){8})$", finished.stdout, re.MULTILINE)
    assert len(losses) == 2 and all(row[:6] > row[-6:] for row in losses), finished.stdout


@pytest.mark.nightly("pages")
def test_sync_hsdp_finds_the_broken_replica() -> None:
    finished = run_example("sync_hsdp.py")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert re.search(r"layers.1.ffn.w2.weight: .* rank 3 at \(1, 1\), first at \(5, 7\)", finished.stdout)


def launch_example(name: str, num_ranks: int, *arguments: str) -> str:
    """What an example under torchrun prints."""
    finished = torchrun(num_ranks, EXAMPLES / name, *arguments)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout


@pytest.mark.nightly("pages")
def test_one_buffer_is_taken_up_on_two_meshes() -> None:
    assert launch_example("one_buffer.py", 4, "write").count("2 tensors in 12,") == 4
    assert launch_example("one_buffer.py", 4, "read").count("step 7, equal on both meshes: True") == 4


def test_reshard_live_gives_equal_logits() -> None:
    output = launch_example("reshard_live.py", 4)
    row = r"version (\d): 25,440 bytes received, logits within (\S+)\n"
    assert re.fullmatch(row * 3, output), output
    found = re.findall(row, output)
    assert [version for version, _ in found] == ["1", "2", "3"]
    assert all(float(difference) < 1e-5 for _, difference in found)


@pytest.mark.nightly("pages")
def test_two_jobs_give_equal_logits() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with reserved_port() as port:
        jobs = [
            subprocess.Popen(
                [*launch, num_ranks, str(EXAMPLES / "two_jobs.py"), job],
                env={**os.environ, "TWO_JOBS": f"127.0.0.1:{port}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for job, num_ranks in (("trainer", "2"), ("generator", "1"))
        ]
        try:
            outputs = [job.communicate()[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert re.findall(r"^step (\d): the generator has the trainer's logits$", outputs[1], re.MULTILINE) == [*"012"]


WITHOUT_LIBRARIES = """
import runpy, sys
class NoLibraries:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("accelerate", "lightning", "peft", "ray", "torchao", "torchtitan", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoLibraries())
runpy.run_path(sys.argv[1])
"""


@pytest.mark.nightly("pages")
@pytest.mark.parametrize("name", CLIENT_EXAMPLES)
def test_an_example_says_what_installs_its_library(name: str) -> None:
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, str(EXAMPLES / name)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 1
    assert re.fullmatch(
        r"No module named '\w+[\w.]*': `make clients` installs what this example needs\n", finished.stderr
    )


@pytest.fixture(scope="module")
def llama_2d() -> subprocess.CompletedProcess[str]:
    return run_example("train_llama_2d.py")


@pytest.mark.nightly("pages")
def test_train_llama_2d_succeeds(llama_2d: subprocess.CompletedProcess[str]) -> None:
    assert llama_2d.returncode == 0, llama_2d.stdout + llama_2d.stderr
    assert "Warning" not in llama_2d.stderr


@pytest.mark.nightly("pages")
@pytest.mark.parametrize("mesh", ["dp 2 x tp 2", "dp 4 x tp 2", "dp_replicate 2 x dp_shard 2 x tp 2", "one process"])
def test_train_llama_2d_resumes_bit_for_bit(llama_2d: subprocess.CompletedProcess[str], mesh: str) -> None:
    # 120: 30 parameters, and for each of them step, exp_avg and exp_avg_sq.
    row = re.search(rf"^{mesh} +120 of 120  ((?:\d\.\d{{4}} )+) (\de[+-]\d\d)$", llama_2d.stdout, re.MULTILINE)
    assert row is not None, llama_2d.stdout
    assert len(row.group(1).split()) == 6
    assert float(row.group(2)) <= 1e-5


@pytest.mark.nightly("pages")
def test_train_llama_2d_shows_what_stock_says(llama_2d: subprocess.CompletedProcess[str]) -> None:
    answers = re.findall(r"^  stock PyTorch +(.*)$", llama_2d.stdout, re.MULTILINE)
    assert len(answers) == 3, llama_2d.stdout
    # https://github.com/pytorch/pytorch/issues/168134
    assert answers[0].startswith("refused: ") or answers[0] == "120 of 120", llama_2d.stdout


@pytest.mark.nightly("pages")
def test_elastic_8_to_16() -> None:
    finished = run_example("elastic_8_to_16.py")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.count("rows seen exactly once: 320 of 325, 5 declared as dropped") == 2
    assert finished.stdout.count("global batches equal as sets: True") == 2
    assert "saved by 8 ranks (dp 8 x tp 1), loaded by 16 ranks (dp 16 x tp 1)" in finished.stdout
