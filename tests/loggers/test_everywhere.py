"""All clients at once: the example, and a session that is killed while all of them log it."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_file import offline_runs

from fluid.executor import FluidExecutor
from fluid.loggers import CSV, MLflow, Parquet, TensorBoard, TrialLogger, WandB

pytestmark = [
    pytest.mark.frameworks("mlflow", "pandas", "pyarrow", "sklearn", "tensorboard", "wandb", "prometheus_client"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]
ROOT = Path(__file__).parents[2]
PATIENCE = 300.0


def waits(config: dict[str, Any], state: Any) -> Iterator[Any]:
    """Counts up; after iterations 3 and 5 it waits for a file of that name."""
    step = state or 0
    while True:
        while step in (3, 5) and not Path(config["folder"], str(step)).exists():
            time.sleep(0.01)
        step += 1
        yield {"loss": 1.0 / step}, step


def all_loggers(folder: Path) -> list[TrialLogger]:
    return [
        TensorBoard(folder / "tensorboard"),
        MLflow(f"sqlite:///{folder / 'mlflow.db'}"),
        WandB("digits", mode="offline", folder=folder),
        CSV(),
        Parquet(),
    ]


KILLED = """
    import os, signal, sys
    from fluid import FluidExecutor, TrialGroup, Trial, TrialListener
    from fluid.loggers import CSV, MLflow, Parquet, TensorBoard, TrialLogger, WandB
    from fluid.loggers.sink import read_progress
    from waiting import eventually

    class Killer(TrialListener):
        seen = set()

        def on_result(self, result):
            self.seen.add((result.trial_id, result.iteration))
            if {("a", 5), ("b", 5)} <= self.seen:
                os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(sys.argv[1])
    options = {"run_dir": folder / "run", "verbose": 0, "loggers": [*all_loggers(folder), Killer()]}
    with FluidExecutor("local", 2, **options) as executor:
        trials = [Trial(waits, {"folder": str(folder)}, 8, trial_id=name) for name in "ab"]
        handle = executor.submit_trialgroup(TrialGroup(trials, "sweep"))
        eventually(lambda: [each.results for each in read_progress(folder / "run").values()] == [6] * 4)
        (folder / "3").touch()
        handle.wait()
"""


def test_a_killed_session_goes_on_with_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    imports = "import time\nfrom pathlib import Path\nfrom typing import Any\nfrom collections.abc import Iterator\n"
    functions = [f"from __future__ import annotations\n{imports}", *map(inspect.getsource, (waits, all_loggers))]
    killed = subprocess.run(
        [sys.executable, "-c", "\n".join([*functions, textwrap.dedent(KILLED)]), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (tmp_path / "5").touch()
    loggers = all_loggers(tmp_path)
    resumed = FluidExecutor.resume(tmp_path / "run", backend="local", devices=2, verbose=0, loggers=loggers)
    with resumed as executor:
        assert executor.handles[0].wait(PATIENCE)
    wanted = list(range(1, 9))
    for trial in "ab":
        assert tensorboard_steps(tmp_path / "tensorboard" / "sweep" / trial) == wanted
    assert mlflow_steps(loggers[1]) == {"a": wanted, "b": wanted}
    for tables in (table_steps(tmp_path / "run" / "csv"), table_steps(tmp_path / "run" / "parquet")):
        assert tables == {"a": wanted, "b": wanted}
    parts = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(parts) == 4 and len({name.rpartition("-")[2] for name in parts}) == 2, "two parts of each run"


def tensorboard_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("loss")]


def mlflow_steps(logger: Any) -> dict[str, list[int]]:
    client = logger.client
    runs = client.search_runs([client.get_experiment_by_name("sweep").experiment_id])
    assert [(run.info.status, run.data.tags["fluid.state"]) for run in runs] == [("FINISHED", "DONE")] * 2
    return {
        run.info.run_name: sorted(point.step for point in client.get_metric_history(run.info.run_id, "loss"))
        for run in runs
    }


def table_steps(folder: Path) -> dict[str, list[int]]:
    import pandas

    csv = folder / "iterations.csv"
    table = pandas.read_csv(csv) if csv.exists() else pandas.read_parquet(folder / "iterations.parquet")
    found: dict[str, list[int]] = table.groupby("trial")["iteration"].apply(list).to_dict()
    return found


def test_the_example_logs_everywhere(tmp_path: Path) -> None:
    script = ROOT / "examples" / "frameworks" / "logging_run.py"
    command = [sys.executable, str(script), "--folder", str(tmp_path / "logs"), "--samples", "4", "--devices", "2"]
    environment = {**os.environ, "FLUID_RUNS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert "best: accuracy 0.9" in done.stdout and 'fluid_trials{group="digits"' in done.stdout
    trials = {f"digits-{number:05d}" for number in range(4)}
    logs = tmp_path / "logs"
    assert {path.name for path in (logs / "tensorboard" / "digits").iterdir()} == {*trials, ".fluid_session"}
    assert set(offline_runs(logs)) == trials
    runs = MLflow(f"sqlite:///{logs / 'mlflow.db'}").client
    found = runs.search_runs([runs.get_experiment_by_name("digits").experiment_id])
    assert {run.info.run_name for run in found} == trials
    assert all({"accuracy", "loss/held_out"} <= run.data.metrics.keys() for run in found)
