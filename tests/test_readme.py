"""The example of the README runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"

# What a thread of ProcessGroupGloo says when Python ends under it: https://github.com/pytorch/pytorch/issues/190489
GLOO_AT_EXIT = "terminate called without an active exception"


def test_the_example_runs_on_four_processes(tmp_path):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    script = tmp_path / "readme.py"
    script.write_text(code.replace("/tmp/ckpt", str(tmp_path / "checkpoint")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        if GLOO_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 4
