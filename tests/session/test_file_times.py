"""Sessions that resume one folder on clocks of other origins: after a reboot, on another machine, in a container."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fluid._clock import ClockReading, read_clock
from fluid.engine.commands import NoteResize, Report
from fluid.reports.run.loader import load_run
from fluid.results.loading import EarlierResults
from fluid.results.run_files import clock_facts, time_in_files
from fluid.session.folder.folder import RunFolder
from fluid.trainables.encoded_metrics import encode_metrics

WALL = 1.8e9
BOOT, OTHER = "0b3f", "77aa"


def session(folder: Path, clock: ClockReading, *ends: float, last_at: float | None = None) -> float:
    """A session that begins as the clock shows, and reports iterations of 1 s that end so many seconds later."""
    files = RunFolder.create(folder) if last_at is None else RunFolder.reopen(folder)
    if last_at is not None:
        files.go_on_after(last_at)
    files.write_session(clock=files.begin(clock))
    for after in ends:
        at = clock.at + after
        number = len((folder / "results.jsonl").read_text().splitlines()) + 1
        metrics, fields = encode_metrics({"loss": 1.0}), {"width": 1.0, "device_ids": (0,)}
        report = Report("a", "0", iteration=number, metrics=metrics, seconds=1.0, at=at, rows=1, **fields)  # type: ignore[arg-type]
        files.journal((), [report, NoteResize("a", at=at, seconds=0.0, begun_at=at - 0.5, **fields)])  # type: ignore[arg-type]
    files.write_forecasts([{"at": clock.at + ends[-1], "group": "0", "seconds": {"0.5": 1.0}}])
    files.close()
    return clock.at + ends[-1] + files.shift


@pytest.mark.parametrize(
    ("second", "begins_at"),
    [
        (ClockReading(260.0, WALL + 9999.0, BOOT), 260.0),  # One clock: it tells, and not the wall clock.
        (ClockReading(5.0, WALL + 160.0, OTHER), 260.0),
        (ClockReading(864_000.0, WALL + 160.0, OTHER), 260.0),
        (ClockReading(864_000.0, WALL + 160.0, ""), 260.0),
        (ClockReading(864_000.0, WALL - 50.0, OTHER), 130.0),  # The wall clock was set back.
        (ClockReading(2.0, WALL + 160.0, BOOT), 130.0),  # No clock can go back: a copy of a machine that was stopped.
    ],
)
def test_times_of_all_sessions_are_on_one_axis(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, second: ClockReading, begins_at: float
) -> None:
    last_at = session(tmp_path, ClockReading(100.0, WALL, BOOT), 10.0, 30.0)
    last_at = session(tmp_path, second, 4.0, last_at=last_at)
    third = ClockReading(second.at + 10.0, second.wall + 10.0, second.name)
    session(tmp_path, third, 4.0, last_at=last_at)
    ends = [110.0, 130.0, begins_at + 4.0, begins_at + 14.0]
    for name, times in (("results.jsonl", ends), ("forecasts.jsonl", ends[1:])):
        found = [json.loads(line)["at"] for line in (tmp_path / name).read_text().splitlines()]
        assert found == pytest.approx(times)
    journal = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    resizes = [entry for entry in journal if entry["what"] == "NoteResize"]
    assert [entry["at"] for entry in resizes] == pytest.approx(ends)
    assert [entry["at"] - entry["begun_at"] for entry in resizes] == pytest.approx([0.5] * 4)
    run = load_run(tmp_path)
    assert run.makespan == pytest.approx(ends[-1] - 109.0)
    earlier = EarlierResults.scan(tmp_path)
    assert (earlier.axis.latest, earlier.axis.offsets) == (pytest.approx(ends[-1]), [0.0])
    assert ("behind the end of the session before" in caplog.text) == (begins_at == 130.0)


def test_a_folder_of_an_older_fluid_goes_on_as_its_readers_take_it(tmp_path: Path) -> None:
    last_at = session(tmp_path, ClockReading(5000.0, WALL, BOOT), 10.0)
    facts = json.loads((tmp_path / "session.json").read_text())
    facts["clock"] = {"at": 5000.0, "time": "2027-01-15 08:00:00"}
    (tmp_path / "session.json").write_text(json.dumps(facts))
    shutil.copytree(tmp_path, tmp_path / "copy")
    session(tmp_path, ClockReading(7000.0, WALL + 60.0, OTHER), 4.0, last_at=last_at)
    assert load_run(tmp_path).makespan == 1995.0, "which of the two clocks it was is not known"
    session(tmp_path / "copy", ClockReading(70.0, WALL + 60.0, OTHER), 4.0, last_at=last_at)
    assert load_run(tmp_path / "copy").makespan == 5.0, "only a clock that went back tells of a reboot"


def test_a_session_tells_other_processes_what_time_it_is_in_its_files() -> None:
    facts = clock_facts(ClockReading(50.0, WALL, BOOT), 1000.0)
    assert time_in_files(facts, ClockReading(57.0, WALL - 1.0, BOOT)) == 1057.0
    assert time_in_files(facts, ClockReading(3.0, WALL + 7.0, OTHER)) == 1057.0
    for broken in (None, 7, {}, {"at": 50.0, "time": "2027-01-15 08:00:00"}, {**facts, "wall": "late"}):
        assert time_in_files(broken, ClockReading(57.0, WALL, BOOT)) is None


def test_a_clock_has_one_name_as_long_as_the_machine_runs() -> None:
    here = read_clock()
    code = "from fluid._clock import read_clock; clock = read_clock(); print(clock.at, clock.name)"
    at, name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert name == here.name and here.at < float(at) < here.at + 90.0


DRIVER = """
    import os, sys, time
    from fluid import FluidExecutor, Trial, TrialGroup

    def train(config, state):
        step = state or 0
        while True:
            time.sleep(0.05)
            step += 1
            yield {"step": step}, step

    if __name__ == "__main__":
        folder, options = sys.argv[2], {"backend": "local", "devices": 1, "verbose": 0}
        if sys.argv[1] == "begin":
            executor = FluidExecutor(run_dir=folder, price_per_device_hour=1.0, **options)
            handle = executor.submit_trialgroup(TrialGroup([Trial(train, budget=40, trial_id="a")]))
            for result in handle.results():
                if result.iteration == 20:
                    os._exit(0)
        with FluidExecutor.resume(folder, **options) as executor:
            (handle,) = executor.handles
            assert handle.wait(60)
        print(handle.makespan)
"""


@pytest.mark.slow
@pytest.mark.parametrize("offsets", [(0, 864_000), (500_000, 100)])
def test_the_machine_restarts_between_two_sessions(tmp_path: Path, offsets: tuple[int, int]) -> None:
    def run(offset: int, *command: str) -> str:
        clocks = ["unshare", "-T", "--fork", "--kill-child", f"--monotonic={offset}", f"--boottime={offset}"]
        return subprocess.run([*clocks, *command], capture_output=True, text=True, check=True, timeout=120).stdout

    try:
        run(0, "true")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("time namespaces cannot be made here")
    script, folder = tmp_path / "driver.py", tmp_path / "run"
    script.write_text(textwrap.dedent(DRIVER))
    run(offsets[0], sys.executable, str(script), "begin", str(folder))
    makespan = float(run(offsets[1], sys.executable, str(script), "go on", str(folder)).splitlines()[-1])
    loaded = load_run(folder)
    assert makespan == pytest.approx(loaded.makespan) and 2.0 < makespan < 60.0
    assert loaded.wall is not None and makespan < loaded.wall < 90.0 and not loaded.notes
    costs = loaded.costs
    assert costs is not None and costs.paid.held < 90.0 and costs.paid.busy < 60.0


def test_only_a_real_clock_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    last_at = session(tmp_path, ClockReading(0.0, WALL), 1000.0)
    with caplog.at_level(logging.WARNING):
        assert session(tmp_path, ClockReading(0.0, WALL + 1.0), 5.0, last_at=last_at) == 1005.0
    assert not caplog.records
