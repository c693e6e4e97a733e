"""Studies that continue after their driver was killed."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

from fluid.executor import FluidExecutor
from fluid.integrations.optuna import optimize, private_api, stale_trials
from fluid.processes.identity import begun_at

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution  # noqa: E402
from optuna.trial import TrialState  # noqa: E402
from optuna_trainables import wait_for_a_file  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]

#: Prints on stdout when two trials have reported. Then it waits for them without writing to the storage: a kill during
#: a write would leave the lock of a journal behind.
DRIVER = textwrap.dedent(
    """
    import sys
    sys.path += {path!r}
    import optuna
    from optuna_trainables import wait_for_a_file
    from test_stale_trials import space, storage_of
    from fluid import FluidExecutor
    from fluid.integrations.optuna import optimize

    seen = set()

    class Watching(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            if trial.number not in seen:
                seen.add(trial.number)
                print(trial.number, flush=True)
            return False

    storage = storage_of({kind!r}, {folder!r})
    study = optuna.create_study(study_name="left", storage=storage, pruner=Watching())
    executor = FluidExecutor(backend="local", devices=2, run_dir={folder!r} + "/run", verbose=0)
    optimize(study, wait_for_a_file, 2, executor=executor, space=space({folder!r}), metric="loss", budget=500_000)
    """
)


def storage_of(kind: str, folder: str | Path) -> Any:
    if kind == "sqlite":
        return f"sqlite:///{folder}/study.db"
    storages = optuna.storages
    if hasattr(storages, "journal"):
        return storages.JournalStorage(storages.journal.JournalFileBackend(f"{folder}/journal.log"))
    with warnings.catch_warnings():  # Before Optuna 4.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return storages.JournalStorage(storages.JournalFileStorage(f"{folder}/journal.log"))


def space(folder: str | Path) -> dict[str, Any]:
    return {"x": FloatDistribution(0.0, 10.0), "go": CategoricalDistribution([f"{folder}/go"])}


def interrupted_study(kind: str, folder: Path, number: int) -> Any:
    """A study whose driver was sent a signal while two trials were running."""
    path = [str(Path(__file__).parent), str(ROOT)]
    script = folder / "driver.py"
    script.write_text(DRIVER.format(path=path, kind=kind, folder=str(folder)))
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert driver.stdout is not None
        said = sorted(driver.stdout.readline() for _ in range(2))
        driver.send_signal(number)
        driver.wait()
    assert said == ["0\n", "1\n"]
    (folder / "go").touch()  # From here on, trials end.
    return optuna.load_study(study_name="left", storage=storage_of(kind, folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_a_killed_study_goes_on(kind: str, tmp_path: Path, executor: FluidExecutor) -> None:
    study = interrupted_study(kind, tmp_path, signal.SIGKILL)
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING] * 2
    study.sampler = optuna.samplers.RandomSampler(seed=0)
    optimize(study, wait_for_a_file, 3, executor=executor, space=space(tmp_path), metric="loss", budget=2)
    left, others = study.trials[:2], study.trials[2:]
    assert [trial.state for trial in left] == [TrialState.FAIL] * 2
    # Both stale trials run again first, as two of the three trials asked for.
    assert [trial.state for trial in others] == [TrialState.COMPLETE] * 3
    assert [trial.params for trial in others[:2]] == [trial.params for trial in left]
    assert others[2].params["x"] not in [trial.params["x"] for trial in left]
    assert [trial.system_attrs.get("retry_history") for trial in others] == [[0], [1], None]


@pytest.mark.slow
def test_an_interrupted_study_leaves_nothing(tmp_path: Path, executor: FluidExecutor) -> None:
    study = interrupted_study("sqlite", tmp_path, signal.SIGINT)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * 2
    optimize(study, wait_for_a_file, 1, executor=executor, space=space(tmp_path), metric="loss", budget=2)
    assert [trial.state for trial in study.trials[2:]] == [TrialState.COMPLETE]


def test_a_trial_of_a_live_run_is_left_alone(executor: FluidExecutor) -> None:
    study = optuna.create_study()
    unknown = study.ask()
    parents = study.ask()
    with stale_trials.StudyRun(study) as run, stale_trials.StudyRun(study) as of_parent:
        of_parent.record.update(pid=os.getppid(), started=begun_at(os.getppid()))
        of_parent.under_way([parents.number])
        own = study.ask()
        run.under_way([own.number])
        assert stale_trials.retry_stale_trials(study) == []
    assert stale_trials.retry_stale_trials(study) == [own.number]
    numbers = [trial.number for trial in study.get_trials(states=(TrialState.RUNNING,))]
    assert numbers == [unknown.number, parents.number]


@pytest.mark.slow
def test_a_process_has_one_attribute_of_a_study_and_its_trials_have_none(executor: FluidExecutor) -> None:
    study, stock = optuna.create_study(), optuna.create_study()
    for _ in range(2):
        optimize(study, lambda trial: trial.suggest_float("x", 0.0, 1.0), 2, executor=executor)
    stock.optimize(lambda trial: trial.suggest_float("x", 0.0, 1.0), 4)
    assert len(study._storage.get_study_system_attrs(study._study_id)) == 1
    assert list(study.trials_dataframe().columns) == list(stock.trials_dataframe().columns)


def test_a_trial_is_not_queued_again_for_ever() -> None:
    study = optuna.create_study()
    study.enqueue_trial({"x": 3.0})
    for _ in range(stale_trials.MAX_RETRY + 1):
        with stale_trials.StudyRun(study) as run:
            trial = study.ask({"x": FloatDistribution(0.0, 10.0)})
            assert trial.params == {"x": 3.0}
            run.under_way([trial.number])
        assert stale_trials.retry_stale_trials(study) == [trial.number]
    assert study.get_trials(states=(TrialState.WAITING, TrialState.RUNNING)) == []


def test_what_can_be_seen_of_a_run() -> None:
    with stale_trials.StudyRun(optuna.create_study()) as study_run:
        run = study_run.record
        assert json.loads(json.dumps(run)) == run  # Storages keep it as JSON.
        assert not stale_trials.has_ended(run)
        assert stale_trials.has_ended({**run, "started": run["started"] - 1})
        assert not stale_trials.has_ended({**run, "started": 0, "boot": "another"})
        assert not stale_trials.has_ended({**run, "started": 0, "pids": "pid:[1]"})
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            theirs = {**run, "pid": other.pid, "started": begun_at(other.pid)}
            assert not stale_trials.has_ended(theirs)
            other.kill()
            # It is a zombie until it is waited for.
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
            assert stale_trials.has_ended(theirs)
        assert stale_trials.has_ended(theirs)
    assert stale_trials.has_ended(run)


@pytest.mark.slow
def test_a_storage_with_heartbeats_handles_stale_trials_itself(tmp_path: Path, executor: FluidExecutor) -> None:
    # Renamed in Optuna 4.9.
    name = next(name for name in ("heartbeat_stale_trial_callback", "failed_trial_callback") if _takes(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        storage = optuna.storages.RDBStorage(
            storage_of("sqlite", tmp_path), heartbeat_interval=60, **{name: stale_trials._retry_callback()}
        )
    study = optuna.create_study(storage=storage)
    with pytest.warns(UserWarning, match="Heartbeat"):
        stale = study.ask(space(tmp_path))
    storage.record_heartbeat(stale._trial_id)
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute("update trial_heartbeats set heartbeat = '2020-01-01 00:00:00'")
    database.close()
    (tmp_path / "go").touch()
    optimize(study, wait_for_a_file, 2, executor=executor, space=space(tmp_path), metric="loss", budget=2)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE", "COMPLETE"]
    assert study.trials[1].params == stale.params
    with sqlite3.connect(tmp_path / "study.db") as database:
        beaten = {row[0] for row in database.execute("select trial_id from trial_heartbeats")}
    database.close()
    assert len(beaten) == 3
    assert private_api.has_heartbeat(study)
    storage.remove_session()
    storage.engine.dispose()


def _takes(name: str) -> bool:
    return name in inspect.signature(optuna.storages.RDBStorage).parameters
