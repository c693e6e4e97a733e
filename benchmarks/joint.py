"""Measures several drivers on one sweep, through a shared folder, against one driver with all of their devices.

    python benchmarks/joint.py [--folder DIR] [--rounds 3] [--seconds 0.2]

* makespan: 4 processes with one device each, and one process with 4 devices, run the same 64 trials. Training is
  simulated by sleeping, so that 4 devices are 4 devices also on a machine with 2 cores. Clocks run from the first
  iteration to the last; all drivers have joined before.
* cost: CPU time of a member whose devices are busy elsewhere, with 1,000 trials in the log: what it costs to look.
* delay: from the end of a rung in one member until another one runs the trial that this promotes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import fluid
from fluid.joint.entries import Begun, Ended, Founded, Iterated
from fluid.joint.folders import MembersReader
from fluid.joint.membership import Entry, Membership
from fluid.joint.state import JointState
from fluid.search import loguniform

_DRIVERS, _SAMPLES, _BUDGET = 4, 64, 27
#: Trials of the log that is looked at, and for how many seconds.
_TRIALS, _LOOKED_S = 1000, 20.0


def train(config: Mapping[str, Any], state: int | None = None) -> Iterator[Any]:
    """Sleeps, and tells when it began and ended to."""
    iteration = state or 0
    while True:
        began = time.time()
        time.sleep(config["seconds"] * config["pace"])
        iteration += 1
        loss = abs(config["lr"] - 0.01) + 1.0 / iteration
        yield {"loss": loss, "began": began, "ended": time.time()}, iteration


def driver(folder: str, algorithm: str, seconds: float, devices: int, drivers: int) -> None:
    """One driver; with several it waits until all have joined."""
    shared: dict[str, Any] = {"run_dir": folder, "join": True} if drivers > 1 else {"run_dir": folder}
    space = {"lr": loguniform(1e-4, 1.0), "pace": loguniform(0.7, 1.4), "seconds": seconds}
    with fluid.FluidExecutor("local", devices, packing="off", verbose=0, **shared):
        members = MembersReader(Path(folder))
        while drivers > 1 and len(members.read()) < drivers:
            time.sleep(0.02)
        result = fluid.run(
            train, space, metric="loss", mode="min", samples=_SAMPLES, algorithm=algorithm, budget=_BUDGET
        )
    done = [one.metrics for trial in result.trials for one in trial.results]
    began, ended = min(one["began"] for one in done), max(one["ended"] for one in done)
    busy = sum(one["ended"] - one["began"] for one in done)
    print(json.dumps({"makespan": ended - began, "iterations": len(done), "busy": busy}), flush=True)


def makespan(folder: Path, algorithm: str, seconds: float, drivers: int) -> dict[str, float]:
    """Runs the sweep; returns its makespan, its iterations and their seconds."""
    devices = _DRIVERS // drivers
    command = [sys.executable, __file__, "--driver", str(folder), algorithm, str(seconds), str(devices), str(drivers)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(drivers)]
    told = [json.loads(each.communicate()[0].splitlines()[-1]) for each in running]
    assert all(one == told[0] for one in told)
    found: dict[str, float] = told[0]
    return found


def compare(folder: Path, seconds: float, rounds: int, console: Console) -> None:
    """Prints the makespans."""
    table = Table("algorithm", "1 driver, 4 devices", "4 drivers, 1 device each", "ratio", "busy, 1", "busy, 4")
    for algorithm in ("asha", "hyperband"):
        alone, joined = [], []
        for number in range(rounds):
            alone.append(makespan(folder / f"{algorithm}-{number}-alone", algorithm, seconds, 1))
            joined.append(makespan(folder / f"{algorithm}-{number}-joined", algorithm, seconds, _DRIVERS))
        # An asynchronous algorithm promotes by the order of arrivals: the makespan is that for as much work.
        work = statistics.median(one["busy"] for one in alone)
        spans = [statistics.median(one["makespan"] * work / one["busy"] for one in each) for each in (alone, joined)]
        shares = [
            statistics.median(one["busy"] / one["makespan"] / _DRIVERS for one in each) for each in (alone, joined)
        ]
        table.add_row(
            algorithm,
            *(f"{span:.1f} s" for span in spans),
            f"{spans[1] / spans[0]:.3f}",
            *(f"{share:.1%}" for share in shares),
        )
    console.print(table)


class _Counts:
    """A member that only counts what the log tells."""

    def __init__(self, folder: Path) -> None:
        self.state = JointState()
        self.seen: list[float] = []
        self.membership = Membership(folder)
        self.membership.hear(self._take, lambda error: print(error, file=sys.stderr))

    def _take(self, entries: list[Entry]) -> None:
        for number, writer, items in entries:
            for item in items:
                self.seen += [
                    time.monotonic() for _ in self.state.apply(number, writer, item) if isinstance(item, Ended)
                ]


def cost(folder: Path, console: Console) -> None:
    """Prints what it costs a member to look at a log of 1,000 trials, and how soon it sees what another one tells."""
    other, ours = _Counts(folder), _Counts(folder)
    other.membership.start({0: "cpu"})
    other.membership.post(Founded("sweep", {}))
    for number in range(_TRIALS):
        other.membership.post(Begun("sweep", {"lr": 0.1}, _TRIALS))
        if number % 100 == 99:
            time.sleep(0.1)
    time.sleep(1.0)
    for trial in list(other.state.trials.values()):
        metrics = ('{"loss": 0.5}',)
        lease = trial.lease or 0
        other.membership.post(
            Iterated(
                *(trial.trial_id, lease), iteration=1, metrics=metrics, seconds=(1.0,), at=0.0, ages=(0.0,), width=1.0,
                device_ids=(0,),
            )
        )  # fmt: skip
    time.sleep(1.0)
    ours.membership.start({0: "cpu"})
    time.sleep(3.0)
    assert len(ours.state.trials) == _TRIALS
    # The other member of this process looks as often: each has half of the time.
    began, used = time.monotonic(), time.process_time()
    time.sleep(_LOOKED_S)
    share = (time.process_time() - used) / (time.monotonic() - began) / 2
    delays = []
    for trial in list(other.state.trials.values())[:20]:
        told = time.monotonic()
        other.membership.post(Ended(trial.trial_id, trial.lease or 0, state="DONE", iteration=1))
        time.sleep(0.7)
        delays.append(ours.seen[-1] - told)
    console.print(f"a member that waits, {_TRIALS:,} trials in the log: {share:.2%} of a core")
    console.print(
        f"from the end of a rung until another member knows: median {statistics.median(delays) * 1e3:.0f} ms, "
        f"worst of {len(delays)} {max(delays) * 1e3:.0f} ms"
    )
    for each in (other, ours):
        each.membership.close()


def main() -> None:
    """Measures all."""
    if sys.argv[1:2] == ["--driver"]:
        folder, algorithm, seconds, devices, drivers = sys.argv[2:]
        driver(folder, algorithm, float(seconds), int(devices), int(drivers))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where the shared folders are made; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.2, help="of an iteration, in the mean")
    given = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        console.print(f"{os.cpu_count()} cores; a folder in {given.folder or tempfile.gettempdir()}")
        cost(Path(folder) / "cost", console)
        compare(Path(folder), given.seconds, given.rounds, console)


if __name__ == "__main__":
    main()
