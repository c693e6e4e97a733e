"""Whether all is right on a GPU: random packings beyond its memory, a fault among trials, and the tests marked gpu."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_day_stages.place import Place
from gpu_day_stages.results import Figures

_ROOT = Path(__file__).resolve().parents[2]
#: Random packings at most, in each way.
_PACKINGS = 20
#: Seconds that the fault and the end of a session take, in each way.
_FAULT_S = 12.0
#: Processes that run tests.
_WORKERS = 5
#: Seconds of a test, so that one that hangs does not take the time of the others.
_TEST_S = 60
#: Characters that are kept of why a test failed.
_TAIL = 600
#: The variable that names the file of the outcomes of tests.
_OUTCOMES = "GPU_DAY_OUTCOMES"
#: The variable by which pytest-xdist tells its processes.
_WORKER = "PYTEST_XDIST_WORKER"


def safety(place: Place, figures: Figures) -> None:
    """Random packings that want more memory than there is, and a trial that faults among four."""
    import packing_safety
    import torch  # noqa: F401  so that lanes find it loaded

    device, _, ways = packing_safety.find_device("gpu" if place.gpus else "cpu")
    packings = _PACKINGS if place.gpus else 1
    for number, way in enumerate(ways):
        figures.attempt(f"fault, {way}", lambda w=way: packing_safety.fault(device, w))
        share = place.left() / (len(ways) - number) - _FAULT_S
        figures.attempt(
            f"packings, {way}",
            lambda w=way, s=share, n=number: packing_safety.random_packings(packings, n, device, w, max(1.0, s)),
        )


def tests(place: Place, figures: Figures) -> None:
    """The tests marked gpu, in several processes: how each ended, as it ends. The log has what pytest says."""
    import gpu_day

    several = ["-n", str(_WORKERS)] if importlib.util.find_spec("xdist") else []
    # Warnings are no errors: packages of a machine with a GPU may be any.
    options = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-W", "default", "-o", f"timeout={_TEST_S}"]
    command = [sys.executable, *gpu_day.gpu_tests(), "-p", __name__, *several, *options]
    path = os.pathsep.join([str(_ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, _OUTCOMES: str(figures.path), "PYTHONPATH": path}
    environment.pop(_WORKER, None)  # This process may be pytest's own, as a test runs this stage.
    status = subprocess.run(command, cwd=_ROOT, env=environment, check=False).returncode
    if status:
        raise SystemExit(f"pytest ended with status {status}")


def pytest_runtest_logreport(report: Any) -> None:
    """Notes how a test ended, in the process that starts the tests: pytest loads this module as a plugin."""
    if _OUTCOMES not in os.environ or _WORKER in os.environ:
        return
    if report.when == "call" or report.outcome != "passed":
        figures = Figures(Path(os.environ[_OUTCOMES]), "tests")
        why = str(report.longrepr)[-_TAIL:] if report.failed else ""
        figures[report.nodeid] = {"outcome": report.outcome, "seconds": report.duration, "why": why}
