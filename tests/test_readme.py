"""The example of the README runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_on_four_processes(tmp_path):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    script = tmp_path / "readme.py"
    script.write_text(code.replace("/tmp/ckpt", str(tmp_path / "checkpoint")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 4
