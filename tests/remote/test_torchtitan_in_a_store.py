"""torchtitan 0.3.0's own trainer with its checkpoints in an object store: saved by two ranks, resumed by one."""

from pathlib import Path

import pytest
from object_server import ObjectServer

pytest.importorskip("torchtitan")
pytest.importorskip("datasets")
pytest.importorskip("triton")
pytest.importorskip("tokenizers")

from titan_training import ON_CPU, OVERRIDES, make_assets, train

import torchtitan_ext as tte
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ObjectFolder

pytestmark = pytest.mark.nightly("servers")

# torchtitan looks by fsspec whether there are steps.
SCRIPT = """
import runpy
import obstore.fsspec
obstore.fsspec.register("s3", asynchronous=False)
runpy.run_path({path!r}, run_name="__main__")
"""


@pytest.mark.timeout(900)
def test_two_ranks_to_one(
    tmp_path: Path, url: str, object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    make_assets(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(path=str(ON_CPU)))
    options = [
        *("--override.imports", f"{OVERRIDES}.elastic_checkpoint", f'{OVERRIDES}.elastic_data={{"num_shards": 2}}'),
        *(f"--checkpoint.folder={url}", "--checkpoint.async_mode=async", "--checkpoint.keep_latest_k=2"),
    ]
    whole, _ = train(tmp_path, 2, *options, script=script)
    assert tte.latest(url) == f"{url}/step-3"
    assert any(name.startswith(".tte_index.") for name in ObjectFolder(Location(f"{url}/step-2")).stamps())
    resumed, log = train(tmp_path, 1, "--checkpoint.load_step=2", *options, script=script)
    assert list(whole) == [1, 2, 3] and list(resumed) == [3]
    assert resumed[3] == pytest.approx(whole[3], rel=1e-3)
    assert "saved by 2 ranks (dp_shard 2), loaded by 1 rank (dp_shard 1)" in log
