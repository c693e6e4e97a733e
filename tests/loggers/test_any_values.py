"""Values that not every file and server can hold: each logger goes on, and leaves out what it must, told once."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.executor import FluidExecutor
from fluid.loggers import CSV, LoggedSession, LoggedTrial, MLflow, Parquet, TensorBoard, TrialLogger, WandB
from fluid.loggers.export import export
from fluid.results.records import Result
from fluid.session.handle import TrialGroupHandle
from fluid.trialgroup import Trial, TrialGroup

pandas = pytest.importorskip("pandas")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
)
PATIENCE = 90.0
CONFIG = {
    "path": "\udce9.csv",
    "n\0": "a\0b",
    "big": 10**400,
    "..": 1,
    "/abs": 2,
    "": 3,
    "long": "q" * 9000,
    "deep": {"list": ["\udcff"]},
}
NAMES = [("plain", "sweep"), ("a\0b", "c\0d"), ("é'\"`\\", "漢'\"`\\"), ("x" * 5000, "y" * 5000)]


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(3):
        more = {"late": "\ud801"} if step == 2 else {}
        yield {
            "loss": float(step),
            "sur\ud800": "\udce9",
            "nul\0": "\0",
            "big": 10**400 if step else 1.5,
            "a//b": 1,
            "../up": 2,
            "": 3,
            "n" * 600: 4,
            "long": "y" * 200_000,
            **more,
        }


def run(folder: Path, *loggers: TrialLogger, **options: Any) -> None:
    """Runs a trial of these values under each of the names."""
    with FluidExecutor("local", 1, loggers=loggers, run_dir=folder, verbose=0, max_failures=0, **options) as executor:
        groups = [TrialGroup([Trial(train, CONFIG, 3, trial_id=one)], name=name) for one, name in NAMES]
        handles: list[TrialGroupHandle] = [executor.submit_trialgroup(group) for group in groups]
        for handle in handles:
            assert handle.wait(PATIENCE) and {str(state) for state in handle.states.values()} == {"DONE"}
        if executor.metrics_address:
            with urllib.request.urlopen(f"http://{executor.metrics_address}/metrics", timeout=PATIENCE) as page:
                assert b"fluid_session_seconds" in page.read()


def in_csv(logger: TrialLogger, folder: Path) -> None:
    trials, iterations = (pandas.read_csv(folder / "csv" / f"{name}.csv") for name in ("trials", "iterations"))
    assert (
        list(trials["config/path"]) == [r"\udce9.csv"] * 4 and list(trials["config/deep/list"]) == [r'["\\udcff"]'] * 4
    )
    assert list(trials["trial"]) == ["plain", r"a\x00b", *(name for name, _ in NAMES[2:])]
    assert len(iterations) == 12 and list(iterations[r"metrics/sur\ud800"]) == [r"\udce9"] * 12
    assert list(iterations["metrics/late"].dropna()) == [r"\ud801"] * 4


def in_parquet(logger: TrialLogger, folder: Path) -> None:
    iterations = pandas.read_parquet(folder / "parquet" / "iterations.parquet")
    assert len(iterations) == 12 and set(iterations["metrics/big"]) == {"1.5", str(10**400)}


def in_tensorboard(logger: TrialLogger, folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / "sweep" / "plain")).Reload()
    assert [one.step for one in events.Scalars("loss")] == [1, 2, 3]
    assert events.Tensors(r"sur\ud800")[0].tensor_proto.string_val[0] == rb"\udce9"
    assert len({path.parent for path in (folder / "tensorboard").rglob("events.out.*")}) == 4


def in_mlflow(logger: TrialLogger, folder: Path) -> None:
    assert isinstance(logger, MLflow)
    found = [
        run
        for experiment in logger.client.search_experiments()
        for run in logger.client.search_runs([experiment.experiment_id])
    ]
    assert len(found) == 4 and {run.info.status for run in found} == {"FINISHED"}
    for one in found:
        assert one.data.metrics["loss"] == 2.0 and one.data.metrics["a/_/b"] == 1 and one.data.metrics["__/up"] == 2
        assert one.data.params["path"] == r"\udce9.csv" and one.data.params["big"] == str(10**400)


def in_wandb(logger: TrialLogger, folder: Path) -> None:
    from wandb_file import offline_runs

    assert len(offline_runs(folder)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "check"),
    [
        pytest.param(lambda folder: CSV(), in_csv, id="csv"),
        pytest.param(lambda folder: Parquet(), in_parquet, id="parquet", marks=pytest.mark.frameworks("pyarrow")),
        pytest.param(
            lambda folder: TensorBoard(), in_tensorboard, id="tensorboard", marks=pytest.mark.frameworks("tensorboard")
        ),
        pytest.param(
            lambda folder: MLflow(f"sqlite:///{folder}.db"),
            in_mlflow,
            id="mlflow",
            marks=pytest.mark.frameworks("mlflow"),
        ),
        pytest.param(
            lambda folder: WandB("any", mode="offline"), in_wandb, id="wandb", marks=pytest.mark.frameworks("wandb")
        ),
    ],
)
def test_values_that_no_file_can_hold(
    make: Callable[[Path], TrialLogger],
    check: Callable[[TrialLogger, Path], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    logger = make(folder)
    run(folder, logger)
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == []
    check(logger, folder)
    # The same from the files alone.
    again = make(folder)
    assert export(folder, [again]) == (4, 12)
    check(again, folder)


@pytest.mark.frameworks("prometheus_client")
def test_metrics_and_dataframes(tmp_path: Path) -> None:
    run(tmp_path / "run", metrics_port=0)
    loaded = fluid.load(tmp_path / "run")
    for every in ("trial", "iteration"):
        loaded.dataframe(every).to_csv(tmp_path / "table.csv")
    assert r"\udce9.csv" in (tmp_path / "table.csv").read_text()


class Refuses(TrialLogger):
    """Refuses one trial, and one result of another, and is down after a number of flushes."""

    def __init__(self, refuse: Callable[[], Exception] = lambda: ValueError("z" * 20_000)) -> None:
        self.told: list[str] = []
        self._refuse = refuse

    def on_trial(self, trial: LoggedTrial) -> None:
        if trial.trial_id == "bad":
            raise self._refuse()
        self.told.append(f"trial {trial.trial_id}")

    def on_result(self, result: Result) -> None:
        assert result.trial_id != "bad"
        if (result.trial_id, result.iteration) == ("half", 2):
            raise OverflowError("that is too much")
        self.told.append(f"{result.trial_id} {result.iteration}")

    def on_broken(self, error: BaseException) -> None:
        self.told.append("closed")


def _count(config: dict[str, Any]) -> Iterator[dict[str, int]]:
    for step in range(3):
        yield {"step": step}


@pytest.mark.slow
def test_a_value_is_left_out_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    live, later = Refuses(), Refuses()
    with FluidExecutor("local", 1, loggers=[live], run_dir=tmp_path / "run", verbose=0) as executor:
        trials = [Trial(_count, {"secret": "s3cr3t"}, 3, trial_id=name) for name in ("bad", "half", "good")]
        assert executor.submit_trialgroup(TrialGroup(trials)).wait(PATIENCE)
    wanted = ["trial half", "half 1", "half 3", "trial good", "good 1", "good 2", "good 3", "closed"]
    assert sorted(live.told) == sorted(wanted)
    texts = [record.getMessage() for record in caplog.records if record.name == "fluid.loggers"]
    assert len(texts) == 2 and max(map(len, texts)) < 800
    assert "left out on_trial of trial 'bad'" in texts[0] and texts[1].endswith("left out 2 things in all")
    assert "s3cr3t" not in caplog.text
    export(tmp_path / "run", [later])
    assert sorted(set(later.told)) == sorted(wanted)


@pytest.mark.slow
def test_an_error_of_the_logger_ends_it(tmp_path: Path) -> None:
    class Down(OSError, ValueError):
        """As an SSLCertVerificationError is."""

    logger = Refuses(lambda: Down("the server is gone"))
    with FluidExecutor("local", 1, loggers=[logger], run_dir=tmp_path / "run", verbose=0) as executor:
        trials = [Trial(_count, {}, 3, trial_id=name) for name in ("bad", "good")]
        assert executor.submit_trialgroup(TrialGroup(trials)).wait(PATIENCE)
    assert logger.told[-1] == "closed" and "trial bad" not in logger.told
    assert [text for text in logger.told if text.startswith("bad ")] == []
    with pytest.raises(Down):
        export(tmp_path / "run", [Refuses(lambda: Down("the server is gone"))])


@pytest.mark.frameworks("mlflow")
def test_what_mlflow_refuses_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    monkeypatch.chdir(tmp_path)
    logger = MLflow(f"sqlite:///{tmp_path / 'runs.db'}")
    logger.on_session(LoggedSession(session_id="s", run_dir=tmp_path))
    logger.on_trial(LoggedTrial(trial_id="a", group="g", uid="s-0-a", config={"lr": 1.0}))
    # MLflow's client looks at each value of a batch.
    run = logger._runs["a"]
    run.metrics = [mlflow.entities.Metric(name, 1.0, 0, 1) for name in ("one", "two?", "three")]
    assert logger.flush()
    (found,) = logger.client.search_runs([logger.client.get_experiment_by_name("g").experiment_id])
    assert found.data.metrics == {"one": 1.0, "three": 1.0} and found.data.params == {"lr": "1.0"}
    assert "left out Metric 'two?'" in caplog.text


def _modes(folder: Path) -> dict[str, str]:
    found = {}
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if not path.is_symlink():
                found[str(path.relative_to(folder))] = oct(path.stat().st_mode & 0o777)
    return found


def _saves(config: dict[str, Any], state: Any) -> Iterator[Any]:
    for step in range(state or 0, 3):
        print("step", step)
        yield {"loss": float(step)}, step + 1


@pytest.mark.frameworks("mlflow", "pyarrow", "tensorboard", "wandb", "matplotlib")
def test_all_that_a_run_writes_is_for_its_owner_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fluid.cli import main

    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    (folder / "mine.txt").touch(0o644)
    for name in ("results.jsonl", "session.lock"):
        (folder / name).touch(0o644)
    (folder / "logs").mkdir(0o755)
    before = os.umask(0o022)
    try:
        loggers = [CSV(), Parquet(), TensorBoard(), WandB("any", mode="offline"), CSV(folder / "a" / "b")]
        with FluidExecutor("local", 1, loggers=loggers, run_dir=folder, verbose=0) as executor:
            trials = [Trial(_saves, {"lr": lr}, 3) for lr in (0.1, 0.2)]
            assert executor.submit_trialgroup(TrialGroup(trials)).wait(PATIENCE)
        assert main(["report", str(folder)]) == 0
        assert main(["export", str(folder), "--csv", str(tmp_path / "shared")]) == 0
    finally:
        os.umask(before)
    modes = _modes(folder)
    assert modes.pop("mine.txt") == "0o644" and modes.pop("logs") == "0o755", "what was there stays"
    assert {"report.html", "timeline.png", "csv/trials.csv", "parquet/trials.parquet", "a/b/iterations.csv"} <= set(
        modes
    )
    assert any(name.startswith("wandb/") for name in modes) and any("events.out" in name for name in modes)
    open_to_others = {name: mode for name, mode in modes.items() if mode not in ("0o600", "0o700")}
    assert open_to_others == {}
    assert _modes(tmp_path / "shared")["trials.csv"] == "0o644", "outside the run folder the umask decides"
