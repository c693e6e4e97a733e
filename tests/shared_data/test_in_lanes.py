"""``fluid.shared`` in lanes of the local backend: who loads, what is mapped, and what stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import eventually

import fluid
from fluid import FluidExecutor, Trial, TrialGroup
from fluid.backends.hosts import memory as host_memory

LANES = 4
SIZE = 1 << 20


def load(folder: str, what: str) -> dict[str, Any]:
    """Notes the process that loads; the first one fails as it is told."""
    with open(Path(folder, "loads"), "a") as file:
        file.write(f"{os.getpid()}\n")
    is_first = len(Path(folder, "loads").read_text().splitlines()) == 1
    if what == "raise" and is_first:
        raise ValueError("not today")
    if what == "die" and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"rows": np.arange(SIZE)}


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Tells which file the data are mapped from, and what was raised before they came."""
    raised = ""
    try:
        data = fluid.shared(load, config["folder"], config["what"])
    except ValueError as error:
        raised = str(error)
        data = fluid.shared(load, config["folder"], config["what"])
    rows = data["rows"]
    address = rows.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            yield {
                "total": int(rows.sum()),
                "is_writable": rows.flags.writeable,
                "path": line.split()[-1],
                "pid": os.getpid(),
                "raised": raised,
                "is_same": fluid.shared(load, config["folder"], config["what"]) is data,
            }


def results(folder: Path, what: str = "", trials: int = LANES) -> list[dict[str, Any]]:
    """The metrics of trials on four lanes."""
    group = TrialGroup([Trial(train, {"folder": str(folder), "what": what}, budget=1) for _ in range(trials)])
    with FluidExecutor(backend="local", devices=LANES, max_packing=1, run_dir=folder / "run") as executor:
        handle = executor.submit_trialgroup(group)
        found = [dict(result.metrics) for result in handle.results()]
    assert len(found) == trials
    assert {metrics["total"] for metrics in found} == {SIZE * (SIZE - 1) // 2}
    return found


def loads(folder: Path) -> list[str]:
    return (folder / "loads").read_text().split()


@pytest.fixture
def ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the RAM disk."""
    (tmp_path / "ram").mkdir()
    monkeypatch.setattr(host_memory, "RAM_DISK", str(tmp_path / "ram"))
    return tmp_path / "ram"


@pytest.mark.slow
def test_one_lane_loads_and_all_map_its_file(tmp_path: Path, ram: Path) -> None:
    found = results(tmp_path, trials=2 * LANES)
    assert len(loads(tmp_path)) == 1
    assert len({metrics["pid"] for metrics in found}) == 2 * LANES, "a process for each trial"
    (path,) = {metrics["path"] for metrics in found}
    assert path.startswith(str(ram))
    assert not any(metrics["is_writable"] for metrics in found)
    assert all(metrics["is_same"] for metrics in found)
    assert list(ram.iterdir()) == [], "it is gone with the session"


@pytest.mark.slow
def test_without_host_memory_they_map_a_file_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "RAM_DISK", "/proc/there/is/none")
    (path,) = {metrics["path"] for metrics in results(tmp_path)}
    assert path.startswith(str(tmp_path / "run"))
    assert not os.path.exists(path), "it is gone with the session"
    assert len(loads(tmp_path)) == 1


@pytest.mark.slow
def test_an_error_goes_to_the_trial_and_the_next_call_loads(tmp_path: Path) -> None:
    found = results(tmp_path, "raise")
    assert sorted(metrics["raised"] for metrics in found) == ["", "", "", "not today"]
    assert len(loads(tmp_path)) == 2


@pytest.mark.slow
def test_a_lane_that_dies_while_it_loads_keeps_no_other_from_it(tmp_path: Path) -> None:
    results(tmp_path, "die")
    assert len(set(loads(tmp_path))) == 2


#: Shares data between two trials, tells the file, and trains until it is killed.
DRIVER = """
import json, os, sys, threading
from pathlib import Path
import numpy as np
import fluid
from fluid import FluidExecutor, Trial, TrialGroup

def load():
    return np.arange(1 << 20)

def train(config):
    rows = fluid.shared(load)
    path = [line.split()[-1] for line in open("/proc/self/maps") if "/shared/" in line][0]
    yield {"path": path, "total": int(rows.sum())}
    threading.Event().wait()

executor = FluidExecutor(backend="local", devices=2, max_packing=1, run_dir=sys.argv[1])
handle = executor.submit_trialgroup(TrialGroup([Trial(train, {}, budget=2) for _ in range(2)]))
found = handle.results()
print(json.dumps([next(found).metrics["path"] for _ in range(2)]), flush=True)
threading.Event().wait()
"""


def test_nothing_stays_when_the_driver_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        (path,) = set(json.loads(process.stdout.readline()))
        assert os.path.exists(path)
        process.kill()
    eventually(lambda: not os.path.exists(os.path.dirname(path)))
    session = Path(path).parents[3]
    assert session.name.startswith("fluid-")
    eventually(lambda: not session.exists())
