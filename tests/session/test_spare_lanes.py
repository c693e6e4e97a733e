"""Spare lanes of real sessions: in which process a trial goes on whose lane was killed."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.errors import InvalidFieldError


def born() -> float:
    """When this process was started, seconds since the machine was."""
    after_name = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2]
    return float(after_name.split()[19]) / os.sysconf("SC_CLK_TCK")


class Telling:
    """Tells in which process it runs, and whether the module that it loads was there already."""

    def setup(self, config: dict[str, Any]) -> None:
        self.found = config["module"] in sys.modules
        importlib.import_module(config["module"])
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        time.sleep(0.02)
        return {"pid": os.getpid(), "born": born(), "found": self.found, "loss": 1.0 / self.count}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count").write_text(str(self.count), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self.count = int(Path(folder, "count").read_text(encoding="utf-8"))


def lanes_of(session: FluidExecutor) -> int:
    return session.status().devices[0].lanes


@pytest.mark.slow
@pytest.mark.parametrize("spares", [0, 1])
def test_the_trial_of_a_killed_lane_goes_on_in_a_spare_one_with_what_it_had_loaded(
    spares: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Installed, and Fluid cannot see that the trial loads it.
    module, loaded = "found_late", tmp_path / "loaded"
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / f"{module}.py").write_text(
        f"import os\nwith open({str(loaded)!r}, 'a') as file:\n    file.write(f'{{os.getpid()}}\\n')\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(installed)
    options: dict[str, Any] = {"devices": 1, "packing": "off", "verbose": 0}
    with FluidExecutor("local", run_dir=tmp_path / "run", spare_lanes=spares, **options) as session:
        trial = Trial(Telling, {"module": module}, budget=100_000)
        results = session.submit_trialgroup(TrialGroup([trial])).results()
        before = next(results).metrics
        assert not before["found"]
        eventually(lambda: lanes_of(session) == 1 + spares)
        eventually(lambda: len(loaded.read_text(encoding="utf-8").split()) == 2)  # The trial, and a fork server.
        time.sleep(0.5)  # By then the process of a spare lane that has it, too, is there.
        killed = time.clock_gettime(time.CLOCK_BOOTTIME)
        os.kill(before["pid"], signal.SIGKILL)
        after = next(result.metrics for result in results if result.metrics["pid"] != before["pid"])
        assert (after["born"] < killed - 0.1) == (spares == 1)
        assert after["found"], "a spare lane that was forked before has made way"
        eventually(lambda: lanes_of(session) == 1 + spares)


def test_a_number_of_spare_lanes_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="spare_lanes"):
        FluidExecutor("local", devices=1, run_dir=tmp_path / "run", spare_lanes=-1)
