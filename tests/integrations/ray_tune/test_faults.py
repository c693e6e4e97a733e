"""Failures in a sweep on Fluid affect one trial only: processes and drivers are really killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from ray.tune import CheckpointConfig
from ray.tune.schedulers import ASHAScheduler, HyperBandScheduler, PopulationBasedTraining

from fluid import FluidExecutor, LimitReachedError, tune

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_HERE := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_HERE)
from tune_sweeps import Climber, Left, Sweep, sweep

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

#: Seconds after which a test gives up. Far longer than needed, as the machine may be busy.
PATIENCE = 90.0
#: Eight trials: HyperBand compares only the last four.
RATES = [0.5, 2.0, 1.0, 1.5, 0.6, 3.0, 0.8, 1.2]
#: The best one, which no scheduler stops.
VICTIM = 5
SCORE = {"metric": "score", "mode": "max", "time_attr": "training_iteration"}


def lock_step() -> PopulationBasedTraining:
    return PopulationBasedTraining(**SCORE, perturbation_interval=4, hyperparam_mutations={"x": [0.1, 3.0]}, synch=True)


SCHEDULERS: dict[str, Callable[[], Any]] = {
    "fifo": lambda: None,
    "asha": lambda: ASHAScheduler(**SCORE, max_t=8, grace_period=2, reduction_factor=2),
    "hyperband": lambda: HyperBandScheduler(**SCORE, max_t=8, reduction_factor=2),
    "pbt": lock_step,
}
scheduled = pytest.mark.parametrize("scheduler", SCHEDULERS)


@pytest.fixture
def run(executor: Any, tmp_path: Path) -> Callable[..., Sweep]:
    """Runs eight trials of up to 8 iterations on Fluid; the best one has the failure."""

    def run(scheduler: str, trouble: dict[str, Any], **options: Any) -> Sweep:
        (notes := tmp_path / "notes").mkdir()
        config = {"x": tune.grid_search(RATES), "folder": str(notes), "seconds": 0.01, "victim": VICTIM, **trouble}
        defaults = {
            "config": config,
            "scheduler": SCHEDULERS[scheduler](),
            "stop": {"training_iteration": 8},
            "checkpoint_config": CheckpointConfig(checkpoint_frequency=2),
        }
        return sweep(Climber, tmp_path / "sweep", executor, {**defaults, **options})

    return run


def assert_never_noticed(trials: list[Left]) -> None:
    """Checks that no iteration is missing, and none was reported or logged twice."""
    for trial in trials:
        assert trial.iterations == list(range(1, len(trial.rows) + 1))
        assert [row["training_iteration"] for row in trial.logged] == trial.iterations
        assert trial.failures == 0


def assert_right(trial: Left, length: int = 8) -> None:
    """Checks that a trial ran to its end, from its own states only."""
    assert trial.status == "TERMINATED"
    assert trial.iterations[-1] == length
    assert set(trial.iterations) == set(range(1, length + 1))
    assert all(row["steps"] == row["training_iteration"] for row in trial.rows)


def steps_back(iterations: list[int]) -> list[tuple[int, int]]:
    """Returns where a log goes back: the last iteration before, and the first one after it."""
    return [(a, b) for a, b in itertools.pairwise(iterations) if b != a + 1]


def others(done: Sweep) -> list[Left]:
    return [trial for index, trial in enumerate(done.trials) if index != VICTIM]


@scheduled
def test_a_process_that_is_killed(run: Callable[..., Sweep], scheduler: str, tmp_path: Path) -> None:
    done = run(scheduler, {"dies_at": 4})
    victim = done.trials[VICTIM]
    assert [note.name.partition("-")[0] for note in (tmp_path / "notes").iterdir()] == ["death"]
    assert done.statuses == ["TERMINATED"] * 8
    assert_right(victim)
    assert_never_noticed(others(done))
    # It continued from its newest checkpoint: Tune's of iteration 2, or a later one of Fluid's.
    assert all(after >= 3 for _, after in steps_back(victim.iterations))


def test_a_process_that_is_killed_before_the_first_checkpoint(run: Callable[..., Sweep]) -> None:
    done = run("fifo", {"dies_at": 1})
    assert_right(done.trials[VICTIM])
    assert_never_noticed(others(done))


@scheduled
def test_a_trial_that_raises_twice(run: Callable[..., Sweep], scheduler: str) -> None:
    done = run(scheduler, {"raises_at": [3, 6]}, max_failures=2)
    victim = done.trials[VICTIM]
    assert_right(victim)
    assert_never_noticed(others(done))
    assert victim.failures == 2
    assert victim.iterations == [1, 2, 3, 4, 5, 5, 6, 7, 8], "it continues from the checkpoints at 2 and at 4"


# Not the synchronous population, which waits for ever for a failed trial, also with Ray alone.
@pytest.mark.parametrize("scheduler", ["fifo", "asha", "hyperband"])
def test_a_trial_that_is_given_up(run: Callable[..., Sweep], scheduler: str) -> None:
    done = run(scheduler, {"raises_at": [3]})
    assert [status for status in done.statuses if status != "TERMINATED"] == ["ERROR"]
    assert done.trials[VICTIM].iterations == [1, 2]
    assert_never_noticed(others(done))


@pytest.mark.parametrize("end", ["ends_at", "raises_at"])
@pytest.mark.parametrize("rung", [1, 3])
def test_a_slow_save_in_hyperband_while_another_trial_ends(executor: Any, tmp_path: Path, end: str, rung: int) -> None:
    (notes := tmp_path / "notes").mkdir()
    slow, leaver, trials = 8, 9, 17
    # The last nine are one bracket with rungs at 1 and 3; the two with failures are its best, so both reach the second.
    config: dict[str, Any] = {"number": tune.grid_search(list(range(trials))), "folder": str(notes), "waits_at": rung}
    config["x"] = tune.sample_from(
        lambda config: {slow: 3.0, leaver: 2.0}.get(config["number"], 1.0 / (1 + config["number"]))
    )
    config["waits_for"] = tune.sample_from(lambda config: "left" if config["number"] == slow else None)
    config["leaves"] = tune.sample_from(lambda config: "left" if config["number"] == leaver else None)
    ends = [rung] if end == "raises_at" else rung
    config[end] = tune.sample_from(lambda config: ends if config["number"] == leaver else None)
    options = {
        "config": config,
        "scheduler": HyperBandScheduler(**SCORE, max_t=9, reduction_factor=3),
        "time_budget_s": PATIENCE,
    }
    done = sweep(Climber, tmp_path / "sweep", executor, options)
    lengths = [len(trial.rows) for trial in done.trials]
    assert lengths[slow] == 9, "the best trial runs to its end"
    assert lengths[leaver] == (rung if end == "ends_at" else rung - 1)
    assert sorted(lengths[10:]) in ([1] * 6 + [3], [1] * 5 + [3] * 2)
    ended = ["ERROR" if end == "raises_at" and number == leaver else "TERMINATED" for number in range(trials)]
    assert done.statuses == ended
    assert_never_noticed([trial for number, trial in enumerate(done.trials) if number != leaver])


# --- Drivers that are killed or interrupted

LENGTH = 24
DRIVER = """
import os
import sys
import threading

import ray
from ray.tune import CheckpointConfig

from fluid import FluidExecutor, tune
from tune_sweeps import Climber, await_uploads


class Teller(tune.Callback):
    saves = steps = 0

    def on_checkpoint(self, **info):
        self.saves += 1

    def on_step_end(self, iteration, trials, **info):
        self.steps += self.saves > 0
        if self.saves >= 4 and self.steps >= 3:
            # No upload is under way while this waits: a sweep cannot be restored from a half-written file.
            await_uploads()
            print("READY", flush=True)
            threading.Event().wait(float(os.environ.get("PAUSE", "0.3")))


if __name__ == "__main__":
    address, storage, folder, length = sys.argv[1:]
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    executor = FluidExecutor(backend="local", devices=2, run_dir=folder, verbose=0)
    tuner = tune.Tuner(
        Climber,
        param_space={"x": tune.grid_search([0.5, 2.0, 1.0, 1.5]), "seconds": 0.05},
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=storage,
            stop={"training_iteration": int(length)},
            checkpoint_config=CheckpointConfig(checkpoint_frequency=2),
            callbacks=[Teller()],
            verbose=0,
        ),
        executor=executor,
    )
    tuner.fit()
    print("ENDED", flush=True)
"""


@pytest.fixture
def driver(cluster: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A driver in its own process group, in the middle of a sweep: Tune has written checkpoints and recorded them."""
    script = tmp_path / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    command = [sys.executable, str(script), cluster, str(tmp_path), str(tmp_path / "fluid"), str(LENGTH)]
    # Tune writes the experiment's state after every step. The script imports the trainables of this folder.
    path = os.pathsep.join(filter(None, (_HERE, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TUNE_GLOBAL_CHECKPOINT_S": "0", "PYTHONPATH": path}
    # The kill may take a while on a busy machine; the driver must not have continued by then.
    environment["PAUSE"] = "3.0" if "killed" in request.node.name else "0.3"
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True, errors="replace"
    )
    assert started.stdout is not None
    said: list[str] = []
    for line in started.stdout:
        said.append(line.strip())
        assert "ENDED" not in said, "it ended before it could be killed"
        if "READY" in said:
            break
    else:
        pytest.fail(f"the driver ended with {started.wait()}: {said}")
    yield started
    if started.poll() is None:
        started.kill()
    started.stdout.close()
    started.wait()


def descendants(pid: int) -> list[int]:
    """Returns the descendants of a process."""
    found: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in tasks.read_text().split()]
        except OSError:  # The thread has ended.
            continue
        for child in children:
            found += [child, *descendants(child)]
    return found


def assert_goes_on(tmp_path: Path, executor: Any, *, logs_are_whole: bool = True) -> None:
    """Restores the sweep of the driver, which continues where it was; every trial runs to its end."""
    path = tmp_path / "sweep"
    restored = tune.Tuner.restore(str(path), Climber, executor=executor)
    grid = restored.fit()
    assert not grid.errors
    assert len(grid) == 4
    trials = [Left.by(trial) for trial in grid._experiment_analysis.trials]
    for trial in trials:
        if logs_are_whole:
            assert_right(trial, LENGTH)
        assert trial.iterations[-1] == LENGTH
        assert all(row["steps"] == row["training_iteration"] for row in trial.rows)
        assert all(row["score"] == trial.config["x"] * row["steps"] for row in trial.rows)
    assert sorted(trial.config["x"] for trial in trials) == [0.5, 1.0, 1.5, 2.0]
    begun = [row["training_iteration"] for t in trials for row in t.rows if row["iterations_since_restore"] == 1]
    assert max(begun) > 1, "every trial started again"


def is_noted_whole(sweep: Path) -> bool:
    """Whether Tune's state of a sweep can be read: Tune writes it in place, so it may be half-written."""
    notes = [path.read_text() for path in sweep.glob("experiment_state-*.json")]
    try:
        return bool(notes) and all(json.loads(note) for note in notes)
    except ValueError:
        return False


def test_a_killed_driver_leaves_a_sweep_that_goes_on(
    driver: subprocess.Popen[str], executor: Any, tmp_path: Path, processes: Any
) -> None:
    processes.watch(*descendants(driver.pid))
    deadline = time.monotonic() + PATIENCE
    while not is_noted_whole(tmp_path / "sweep"):  # It only finishes the write that it has begun.
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.kill()
    driver.wait(PATIENCE)
    assert processes.have_ended(within=PATIENCE), "lanes outlived their driver"
    # A log whose upload was interrupted by the kill loses its lines.
    assert_goes_on(tmp_path, executor, logs_are_whole=False)


@pytest.mark.parametrize("goes_on_with", ["fluid", pytest.param("stock", marks=pytest.mark.long)])
def test_an_interrupted_driver_leaves_no_process_and_a_sweep_that_goes_on(
    driver: subprocess.Popen[str], executor: Any, tmp_path: Path, processes: Any, goes_on_with: str
) -> None:
    watched = descendants(driver.pid)
    assert len(watched) >= 3, "there should be two lanes and their fork server"
    processes.watch(*watched)
    os.killpg(driver.pid, signal.SIGINT)  # As a terminal does: the lanes receive it too.
    driver.wait(PATIENCE)
    assert processes.have_ended(within=PATIENCE)
    assert_goes_on(tmp_path, executor if goes_on_with == "fluid" else None)


def test_a_deadline_ends_the_sweep_with_an_error_of_its_own(cluster: str, tmp_path: Path) -> None:
    options = {"config": {"x": tune.grid_search(RATES), "seconds": 0.05}, "stop": {"training_iteration": 4000}}
    with (
        FluidExecutor("local", 2, run_dir=tmp_path / "run", verbose=0, deadline=4.0) as own,
        pytest.raises(LimitReachedError, match="the deadline of 4 s has come"),
    ):
        sweep(Climber, tmp_path / "sweep", own, options)
