"""Notice of preemption: real drivers get real signals, save their trials, end, and go on without repeating anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluid import FluidExecutor

DRIVER = """
import os, signal, sys, time
from fluid import FluidExecutor, Trial, TrialGroup

class Count:
    def setup(self, config):
        self.total = 0
    def step(self):
        time.sleep(0.05)
        self.total += 1
        return {"total": self.total}
    def save_checkpoint(self, folder):
        open(folder + "/total", "w").write(str(self.total))
    def load_checkpoint(self, folder):
        self.total = int(open(folder + "/total").read())

class Stuck(Count):
    def setup(self, config):
        self.mark = config["mark"]
    def step(self):
        open(self.mark, "w").close()
        time.sleep(600)

trainable = {"count": Count, "stuck": Stuck}[sys.argv[2]]
before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
with FluidExecutor(backend="local", devices=2, run_dir=sys.argv[1], verbose=1, max_packing=1) as executor:
    mark = sys.argv[1] + ".stuck"
    trials = [Trial(trainable, {"mark": mark}, budget=60, trial_id=name) for name in "abc"]
    handle = executor.submit_trialgroup(TrialGroup(trials))
    if trainable is Stuck:
        while not os.path.exists(mark):
            time.sleep(0.01)
        print("running", flush=True)
    for result in handle.results():
        print(result.trial_id, result.iteration, flush=True)
assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
print("ended", flush=True)
"""


class Driver:
    """A driver process."""

    def __init__(self, folder: Path, trainable: str = "count", script: str = DRIVER) -> None:
        self.run = folder / "run"
        path = folder / "driver.py"
        path.write_text(script)
        self.process = subprocess.Popen(
            [sys.executable, str(path), str(self.run), trainable],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def wait_for(self, lines: int) -> None:
        assert self.process.stdout is not None and self.process.stderr is not None
        for _ in range(lines):
            assert self.process.stdout.readline(), self.process.stderr.read()

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, out, err


@pytest.fixture(autouse=True)
def no_driver_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Driver] = []
    start = Driver.__init__

    def note(self: Driver, *args: object, **options: object) -> None:
        start(self, *args, **options)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Driver, "__init__", note)
    yield
    for driver in made:
        driver.process.kill()
        driver.process.wait()


def reported(run: Path) -> Counter[tuple[str, int, int]]:
    lines = map(json.loads, (run / "results.jsonl").read_text().splitlines())
    return Counter((line["trial"], line["iteration"], line["metrics"]["total"]) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_driver_that_gets_notice_saves_its_trials_and_repeats_nothing_when_it_goes_on(
    tmp_path: Path, number: int, status: int
) -> None:
    driver = Driver(tmp_path)
    driver.wait_for(10)
    driver.process.send_signal(number)
    code, out, err = driver.end()
    assert code == status, err
    assert "ended" not in out
    assert f"3 of 3 unfinished trials are saved; go on with FluidExecutor.resume({str(driver.run)!r})" in err
    assert "dropped" not in err, "nothing was"
    before = reported(driver.run)
    with FluidExecutor.resume(driver.run, backend="local", devices=2, verbose=0) as executor:
        for handle in executor.handles:
            assert handle.wait(timeout=90)
    after = reported(driver.run)
    assert before and before <= after
    assert after == Counter((name, iteration, iteration) for name in "abc" for iteration in range(1, 61))


def test_what_was_saved_is_on_disk_and_current(tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.wait_for(10)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.end()[0] == 143
    saved: dict[str, int] = {}
    for line in (driver.run / "journal.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["what"] == "TrialSaved" and not entry["checkpoint"]["in_memory"]:
            assert Path(entry["checkpoint"]["path"]).is_dir()
            saved[entry["trial_id"]] = entry["checkpoint"]["iteration"]
    last = Counter(trial_id for trial_id, _, _ in reported(driver.run))
    assert saved == dict(last)


def test_a_second_signal_ends_the_driver_at_once(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "stuck")
    driver.wait_for(1)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.process.stderr is not None
    while "SIGTERM" not in (line := driver.process.stderr.readline()):
        assert line
    driver.process.send_signal(signal.SIGTERM)
    assert driver.end()[0] == -signal.SIGTERM


@pytest.mark.slow
def test_a_handler_of_the_users_own_stays(tmp_path: Path) -> None:
    own = DRIVER.replace(
        "trainable = {", "signal.signal(signal.SIGTERM, lambda *_: print('own', flush=True))\ntrainable = {"
    )
    driver = Driver(tmp_path, script=own.replace("budget=60", "budget=20"))
    driver.wait_for(5)
    driver.process.send_signal(signal.SIGTERM)
    code, out, err = driver.end()
    assert code == 0 and "own" in out and "ended" in out, err


def test_an_executor_of_another_thread_sets_no_handler(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    code = (
        "import signal, threading\n"
        "from fluid import FluidExecutor\n"
        f"def run():\n    with FluidExecutor(backend='local', devices=1, run_dir={str(tmp_path)!r}, verbose=0):\n"
        "        print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\n"
        "thread = threading.Thread(target=run); thread.start(); thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.strip() == "True"
    assert signal.getsignal(signal.SIGTERM) == before
