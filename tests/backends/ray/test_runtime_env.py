"""Jobs that have a runtime environment: lanes of every node get it, those of the driver's node, too."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_drive import OTHER_MACHINE, PATIENCE, ROOT, THIS_MACHINE, Drive

from fluid.resources import Device

ray = pytest.importorskip("ray")

# Ray leaves sockets and processes to the garbage collector, and warns of what will change in it.
pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

SEEN = {
    "variable": "os.environ.get('OF_THE_JOB')",
    "module": "__import__('of_the_module').VALUE",
    "beside": "__import__('beside_the_driver').VALUE",
    "file": "open('data.txt').read()",
    "host": "os.getppid()",
}
EXPECTED = {"variable": "yes", "module": 1, "beside": 2, "file": "data"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("environment")
    work, module = folder / "work", folder / "of_the_module"
    work.mkdir()
    module.mkdir()
    (module / "__init__.py").write_text("VALUE = 1\n", encoding="utf-8")
    (work / "beside_the_driver.py").write_text("VALUE = 2\n", encoding="utf-8")
    (work / "data.txt").write_text("data", encoding="utf-8")
    (work / "driver.py").write_text(DRIVER, encoding="utf-8")
    return {"env_vars": {"OF_THE_JOB": "yes"}, "working_dir": str(work), "py_modules": [str(module)]}


@pytest.fixture(scope="module")
def cluster(two_nodes: Any, environment: dict[str, Any]) -> Iterator[Any]:
    """The shared cluster of two nodes, to which this process is connected with a runtime environment."""
    ray.init(two_nodes.address, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    yield two_nodes
    ray.shutdown()


def test_lanes_of_every_node_have_it(make: Callable[..., Drive]) -> None:
    drive = make([Device(0, host=THIS_MACHINE), Device(1, host=OTHER_MACHINE)])
    seen = [drive.evaluate(lane, **SEEN) for lane in drive.lanes(0, 1)]
    assert len({each.pop("host") for each in seen}) == 2
    assert seen == [EXPECTED, EXPECTED]


#: What a job runs: it tells what lanes of both nodes see.
DRIVER = """
import json, sys
from ray_drive import OTHER_MACHINE, THIS_MACHINE, Drive
from fluid.backends.ray import RayBackend
from fluid.resources import Device
if __name__ == "__main__":
    with RayBackend([Device(0, host=THIS_MACHINE), Device(1, host=OTHER_MACHINE)], preload=[], timeout=60) as backend:
        drive = Drive(backend)
        seen = [drive.evaluate(lane, **json.loads(sys.argv[1])) for lane in drive.lanes(0, 1)]
    with open(sys.argv[2], "w") as file:
        json.dump(seen, file)
"""


def test_a_submitted_job_has_it(cluster: Any, environment: dict[str, Any], tmp_path: Path) -> None:
    """By the manager that ``ray job submit`` speaks to: without the dashboard there is no HTTP server before it."""
    job_manager = pytest.importorskip("ray.dashboard.modules.job.job_manager")
    uploaded = dict(ray.get_runtime_context().runtime_env)  # What a client of the server does with its folders.
    told = tmp_path / "told.json"
    path = ":".join((ROOT, str(Path(ROOT) / "tests")))
    entrypoint = shlex.join(["env", f"PYTHONPATH={path}", sys.executable, "driver.py", json.dumps(SEEN), str(told)])

    async def submit() -> tuple[str, str]:
        manager = job_manager.JobManager(ray._private.worker.global_worker.gcs_client, str(tmp_path))
        # On a node with another loopback address the driver would look for the cluster at that address.
        head = {"node:__internal_head__": 0.001}
        job = await manager.submit_job(entrypoint=entrypoint, runtime_env=uploaded, entrypoint_resources=head)
        while not (status := await manager.get_job_status(job)).is_terminal():
            await asyncio.sleep(0.1)
        return status, manager.get_job_logs(job)

    status, log = asyncio.run(asyncio.wait_for(submit(), PATIENCE))
    assert status == "SUCCEEDED", log
    seen = json.loads(told.read_text(encoding="utf-8"))
    assert len({each.pop("host") for each in seen}) == 2
    assert seen == [EXPECTED, EXPECTED]
