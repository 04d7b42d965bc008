"""docs/use/tutorial.md: its script is of the example, and its commands, run in their order, print what it shows."""

import os
import re
from pathlib import Path

import pytest
import torch
from test_cli_docs import plain
from torch import nn
from tutorial_page import PAGE, ROOT, STEPS, run

from torchtitan_ext.elastic import ElasticDataLoader

LOSS = re.compile(r"^(step \d+: loss )(\d+\.\d+)$", re.M)


def lines(text: str) -> list[str]:
    """Losses depend on the processor; sizes of pickles and options of an optimizer on the version of torch."""
    stable = LOSS.sub(r"\1<loss>", text)
    if not torch.__version__.startswith(re.findall(r"torch (\d+\.\d+)", PAGE)[0]):
        stable = re.sub(r"\d[\d.,]*(\+\w+,?)?", "<n>", stable)
    return plain(stable)


def losses(text: str) -> list[float]:
    return [float(loss) for _, loss in LOSS.findall(text)]


def losses_without_checkpoints(num_steps: int) -> list[float]:
    """As the example trains, on one rank, without a save or load."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(1003, 64), nn.Tanh(), nn.Linear(64, 1003))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _, batch in zip(
        range(num_steps),
        ElasticDataLoader(torch.arange(96) % 8 * 100, global_batch_size=12, dp_rank=0, dp_size=1),
        strict=False,
    ):
        loss = nn.functional.cross_entropy(model(batch), (batch + 2) % 1003)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_the_script_is_a_part_of_the_example() -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert script in (ROOT / "examples" / "first_hour.py").read_text()


@pytest.mark.nightly("pages")
def test_the_commands_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(ROOT / "examples", tmp_path / "examples")
    printed = {}
    for command, output in STEPS:
        printed[command] = run(command)
        assert lines(printed[command]) == lines(output), f"{command}: python docs/make_pages.py writes the page anew"
    first, second = (text for command, text in printed.items() if command.startswith("torchrun"))
    assert losses(first) + losses(second) == pytest.approx(losses_without_checkpoints(8), abs=2e-3)
    assert "step 4, 48 samples seen" in second and "saved step 8 of [4, 8]" in second
    assert printed["torchtitan-ext diff run/step-4 one-rank"].startswith("0 keys differ")
    assert os.listdir("run") == ["step-8"], "verify, then gc"
