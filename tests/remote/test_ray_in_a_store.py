"""``RayCheckpointManager`` where the storage of Ray Train's run is in an object store."""

import pytest
import torch
from object_server import REGION, ObjectServer

pytest.importorskip("ray.train", reason="`make clients` installs Ray", exc_type=ImportError)

from pyarrow.fs import S3FileSystem
from ray_controller import Controller

from torchtitan_ext.integrations.ray import RayCheckpointManager

pytestmark = pytest.mark.nightly("servers")


def test_a_run_in_s3(
    object_server: ObjectServer, bucket_prefix: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    files = S3FileSystem(
        endpoint_override=object_server.endpoint,
        access_key=object_server.access_key_id,
        secret_key=object_server.secret_access_key,
        region=REGION,
    )
    model = torch.nn.Linear(2, 2)
    with Controller(files, f"{object_server.bucket}/{bucket_prefix}").in_place() as controller:
        for _ in range(2):
            with RayCheckpointManager(every=2, model=model) as manager:
                assert manager.run == url
                step = manager.resume()
                manager.report_step({}, step=step + 1)
                manager.report_step({}, step=step + 2)
    assert [name for _, name in controller.reported] == [None, "step-2", None, "step-4"]
