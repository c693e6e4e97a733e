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

def paced(config):
    for iteration in range(1, 10**6):
        time.sleep(0.02)
        yield {"loss": config["x"] + 1.0 / iteration}

with fluid.FluidExecutor("local", 2, run_dir=sys.argv[1], verbose=0) as executor:
    try:
        fluid.run(paced, {"x": uniform(0.0, 1.0)}, metric="loss", samples=10_000, budget=27)
    except fluid.SweepInterrupted as cut:
        (handle,) = executor.handles
        print(handle.wait(timeout=60.0), len(handle.trials) == len(cut.result.trials))
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


def test_a_sweep_hears_a_signal_that_another_thread_received(tmp_path: Path) -> None:
    with driver(DRIVER, tmp_path, False, least=20_000) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out.startswith("cut ")


def test_who_waits_for_a_group_hears_a_signal_that_another_thread_received(tmp_path: Path) -> None:
    with driver(WAITER, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert out == "heard\n", err


def test_an_interrupted_sweep_starts_nothing_more_in_an_executor_that_stays(tmp_path: Path) -> None:
    with driver(SHARER, tmp_path, least=2_000) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert out == "True True\n", err
