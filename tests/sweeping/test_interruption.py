"""Signals to a driver that runs a sweep."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually

import fluid

DRIVER = """
import signal
import sys
import time
import fluid
from fluid.search import uniform
from sweep_trainables import Counter

class Paced(Counter):
    def step(self):
        time.sleep(0.001)
        return super().step()

space, run_dir, wakes = {"x": uniform(0.0, 1.0)}, sys.argv[1], sys.argv[2] == "True"
options = dict(metric="loss", samples=9, budget=10**9, algorithm="random")
try:
    if wakes:
        fluid.run(Paced, space, **options, run_dir=run_dir)
    else:
        with fluid.FluidExecutor("local", 2, run_dir=run_dir, keep="best:1") as executor:
            # Other threads receive the signals now. This one, which runs their handlers, is not woken by them.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            fluid.run(Paced, space, **options, executor=executor)
except fluid.SweepInterrupted as cut:
    print("cut", len(cut.cut_off), cut.result.state, cut.result.best.value > 0.0)
    raise
"""

WAITER = """
import signal
import sys
import time
from pathlib import Path
import fluid

def slow(config):
    yield {"loss": 1.0}
    time.sleep(1000)

with fluid.FluidExecutor("local", 1, run_dir=sys.argv[1]) as executor:
    handle = executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(slow, budget=10**9)]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        handle.wait()
    except KeyboardInterrupt:
        print("heard")
"""


SHARER = """
import sys
import time
import fluid
from fluid.search import uniform

def paced(config, state):
    for iteration in range(1 + (state or 0), 10**6):
        time.sleep(0.02)
        yield {"loss": config["x"] + 1.0 / iteration}, iteration

def sweep(**options):
    return fluid.run(paced, {"x": uniform(0.0, 1.0)}, metric="loss", samples=24, budget=9, seed=0, **options)

if sys.argv[2] == "again":
    done = sweep(run_dir=sys.argv[1], resume=True)
    print(done.state, len(done.trials), sorted({trial.iteration for trial in done.trials}))
    sys.exit()
with fluid.FluidExecutor("local", 2, run_dir=sys.argv[1], verbose=0) as executor:
    try:
        sweep()
    except fluid.SweepInterrupted as cut:
        (handle,) = executor.handles
        while set(handle.states.values()) - {"PAUSED", "DONE", "STOPPED"}:
            time.sleep(0.01)
        print(cut.result.state, len(handle.trials) == len(cut.result.trials) < 24)
        fluid.run(paced, {"x": [0.5]}, algorithm="grid", metric="loss", budget=2, name="another")
"""


@contextlib.contextmanager
def driver(code: str, tmp_path: Path, *arguments: object, least: int = 1) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a script on ``tmp_path / "run"``, once it has written ``least`` bytes of results."""
    script = tmp_path / "driver.py"
    script.write_text(code, encoding="utf-8")
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""), str(Path(fluid.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "run"), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        results = tmp_path / "run" / "results.jsonl"
        eventually(lambda: (results.is_file() and results.stat().st_size >= least) or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_sweep_with_what_there_is(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with driver(DRIVER, tmp_path, True, least=20_000) as process:
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == status, err
    assert out == "cut 9 UNFINISHED True\n"
    assert f"fluid: interrupted by {number.name}: 9 of 9 trials had not ended" in err
    assert "Traceback" not in err
    assert fluid.load(tmp_path / "run").best.metrics["count"] > 0


@pytest.mark.slow
def test_a_sweep_hears_a_signal_that_another_thread_received(tmp_path: Path) -> None:
    with driver(DRIVER, tmp_path, False, least=20_000) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.startswith("cut ")


@pytest.mark.slow
def test_who_waits_for_a_group_hears_a_signal_that_another_thread_received(tmp_path: Path) -> None:
    with driver(WAITER, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert out == "heard\n", err


@pytest.mark.slow
def test_an_interrupted_sweep_rests_in_an_executor_that_stays_and_can_be_resumed(tmp_path: Path) -> None:
    with driver(SHARER, tmp_path, "first", least=2_000) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert out == "UNFINISHED True\n", err
    cut = fluid.load(tmp_path / "run")
    assert cut.state == "UNFINISHED" and {trial.state for trial in cut.trials if trial.group == "another"} == {"DONE"}
    with driver(SHARER, tmp_path, "again", least=0) as process:
        out, err = process.communicate(timeout=120)
    assert out == "DONE 24 [1, 3, 9]\n", err
    trials = [trial for trial in fluid.load(tmp_path / "run").trials if trial.group != "another"]
    assert all([one.iteration for one in trial.results] == [*range(1, trial.iteration + 1)] for trial in trials)


INTERRUPTED_LATE = """
import os
import signal
import sys
import fluid
from fluid.executor import FluidExecutor
from fluid.search import uniform
from sweep_trainables import curve

close = FluidExecutor.close

def interrupted(self):
    FluidExecutor.close = close
    os.kill(os.getpid(), signal.SIGINT)
    close(self)

FluidExecutor.close = interrupted
try:
    options = dict(samples=3, budget=2, algorithm="random", run_dir=sys.argv[1])
    fluid.run(curve, {"x": uniform(0.0, 1.0)}, metric="loss", **options)
except fluid.SweepInterrupted as cut:
    print(cut.result.state, [trial.iteration for trial in cut.result.trials])
"""


def test_an_interrupt_while_the_executor_is_closed_loses_no_result(tmp_path: Path) -> None:
    with driver(INTERRUPTED_LATE, tmp_path, least=0) as process:
        out, err = process.communicate(timeout=120)
    assert out == "DONE [2, 2, 2]\n", err
