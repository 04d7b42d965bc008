"""What docs/use/object_stores.md says: its lines run, the requests of each call are counted, other ways lead there."""

import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import obstore.fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fault_proxy import FaultProxy
from object_server import ObjectServer

import torchtitan_ext as tte
from torchtitan_ext.storage.location import Location
from torchtitan_ext.storage.objects.folder import ObjectFolder

pytestmark = pytest.mark.nightly("servers")

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "object_stores.md").read_text()


@pytest.fixture(autouse=True)
def environment(object_server: ObjectServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in object_server.at(proxy.endpoint).environment.items():
        monkeypatch.setenv(name, value)


def test_its_lines_run(url: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {"tte": tte, "state": {"w": torch.arange(3000.0), "step": 1}, "bucket": url}
    exec(code, names)
    assert names["step"] == 1 and tte.latest(f"{url}/run") == f"{url}/run/step-2"
    (commands,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
    told = subprocess.run(
        ["bash", "-euc", commands],
        env=os.environ
        | {"bucket": url, "disk": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert f"{url}/run/step-2" in told.stdout and "all checksums match" in told.stdout and "freed" in told.stdout


def requests(proxy: FaultProxy) -> Counter[str]:
    """The requests since the last call, by what the page calls them."""
    found: Counter[str] = Counter()
    for one in proxy.log():
        is_list = one.method == "GET" and "list-type=2" in one.path
        found["LIST" if is_list else "DELETE" if "?delete" in one.path else one.method] += 1
    proxy.clear()
    return found


def test_the_requests_of_each_call(url: str, proxy: FaultProxy) -> None:
    run = f"{url}/run"
    state = {"w": torch.arange(300_000.0)}
    tte.save(state, f"{run}/step-1", no_dist=True)
    assert requests(proxy) == {"LIST": 1, "HEAD": 1, "GET": 1, "PUT": 5, "DELETE": 1}
    tte.load(state, f"{run}/step-1", no_dist=True)
    assert requests(proxy) == {"HEAD": 1, "GET": 4}
    tte.save(state, f"{run}/step-2", no_dist=True)
    requests(proxy)
    assert tte.latest(run) == f"{run}/step-2"
    assert requests(proxy) == {"LIST": 1, "HEAD": 1}
    ObjectFolder(Location(f"{run}/step-3")).put("unfinished", b"")
    requests(proxy)
    assert tte.latest(run) == f"{run}/step-2"
    assert requests(proxy) == {"LIST": 1, "HEAD": 2}


def test_a_large_object_is_put_and_got_in_parts(url: str, proxy: FaultProxy) -> None:
    state = {"w": torch.zeros(35 << 20, dtype=torch.int32)}  # 140 MiB
    tte.save(state, url, no_dist=True)
    counts = requests(proxy)
    # 9 parts, the POST that begins them and the one that ends them.
    assert counts["PUT"] == 4 + 9 and counts["POST"] == 2 and counts["LIST"] == 1
    tte.load(state, url, no_dist=True)
    assert requests(proxy) == {"HEAD": 1, "GET": 2 + 1 + 9}


def test_a_load_reads_only_what_it_needs(url: str, proxy: FaultProxy, object_server: ObjectServer) -> None:
    state = {"large": torch.zeros(8 << 20, dtype=torch.int32), "small": torch.arange(3.0)}
    tte.save(state, url, no_dist=True)
    name = next(name for name in ObjectFolder(Location(url)).stamps() if name.endswith(".distcp"))
    proxy.clear()
    tte.load({"small": state["small"]}, url, no_dist=True)
    assert sum(name in one.path for one in proxy.log()) == 2  # checksums, and one block


def test_a_load_through_a_transform(url: str) -> None:
    state = {"old": torch.arange(12.0).view(3, 4)}
    tte.save(state, url, no_dist=True)
    found = {"new": torch.zeros(3, 4)}
    tte.load(found, url, transform=tte.transforms.Transform([tte.transforms.Rule("old", "new")]), no_dist=True)
    assert torch.equal(found["new"], state["old"])


def test_an_installed_saver(url: str) -> None:
    obstore.fsspec.register("s3", asynchronous=False)
    state = {"w": torch.arange(5.0)}
    with tte.integrations.installed():
        dcp.save(state, checkpoint_id=url, no_dist=True)
        assert any(name.startswith(".tte_index.") for name in ObjectFolder(Location(url)).stamps())
        found = {"w": torch.zeros(5)}
        dcp.load(found, checkpoint_id=url, no_dist=True)
    assert torch.equal(found["w"], state["w"])


def load_in_a_fork(url: str, told: Any) -> None:
    try:
        tte.load({"w": torch.zeros(5)}, url, no_dist=True)
    except Exception as error:
        told.put(str(error))


def test_a_fork_is_told_and_does_not_wait_for_ever(url: str) -> None:
    tte.save({"w": torch.arange(5.0)}, url, no_dist=True)
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    child = context.Process(target=load_in_a_fork, args=(url, told))
    child.start()
    assert "start it by spawn or forkserver" in told.get()
    child.join()
