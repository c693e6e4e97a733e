"""HpBandSter's optimizers on Fluid: the same decisions, with Fluid's processes instead of workers."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hpbandster")
import numpy as np

from fluid import FluidExecutor, Forecast, LimitReachedError, SearchShape
from fluid.errors import FluidError, InvalidFieldError
from fluid.integrations.hpbandster import run
from fluid.integrations.hpbandster.optimizers import BY_NAME, Job, Master, Worker, quiet
from fluid.session.handle import TrialGroupHandle

BUDGETS: dict[str, Any] = {"min_budget": 1, "max_budget": 9, "n_iterations": 3}
OPTIMIZERS = pytest.mark.parametrize("optimizer", list(BY_NAME))
#: Number of configurations that reach each budget, in three iterations.
RUNS = {1.0: 9, 3.0: 3 + 3, 9.0: 1 + 1 + 3}


def loss_after(lr: float, steps: float) -> float:
    return float(9.0 * (1.0 - 2.0 * lr) ** (2 * int(steps)))


class Descent:
    """Descends a parabola; counts its steps, and records each in a folder if it has one."""

    folder: str | None = None
    fails_at: int | None = None

    def setup(self, config: dict[str, Any]) -> None:
        self.lr, self.x, self.steps = config["lr"], 0.0, 0

    def step(self) -> dict[str, Any]:
        if self.steps + 1 == self.fails_at:
            raise RuntimeError(f"step {self.fails_at} went wrong")
        self.x -= self.lr * 2.0 * (self.x - 3.0)
        self.steps += 1
        if self.folder is not None:
            with (Path(self.folder) / "steps").open("a") as file:
                file.write(f"{self.lr!r}\n")
        loss = (self.x - 3.0) ** 2
        return {"loss": loss, "score": np.float64(-loss), "steps": self.steps}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "state.json").write_text(json.dumps([self.x, self.steps]))

    def load_checkpoint(self, folder: str) -> None:
        self.x, self.steps = json.loads((Path(folder) / "state.json").read_text())


def noting(where: Path) -> type[Descent]:
    class Noting(Descent):
        folder = str(where)

    return Noting


def facts(result: Any) -> list[Any]:
    """Returns what does not depend on time: configuration, budget and loss of each run."""
    configs = result.get_id2config_mapping()
    return [(run.config_id, run.budget, configs[run.config_id]["config"], run.loss) for run in result.get_all_runs()]


# --- The same as HpBandSter


class Serial(Master):  # type: ignore[misc]
    """HpBandSter's own master, which runs its jobs itself where it would wait for workers."""

    def __init__(self, config_generator: Any) -> None:
        self.iterations: list[Any] = []
        self.warmstart_iteration: list[Any] = []
        self.config_generator = config_generator
        self.result_logger = self.time_ref = None
        self.config = {"time_ref": None}
        self.num_running_jobs, self.job_queue_sizes = 0, (-1, math.inf)
        self.logger = __import__("logging").getLogger("hpbandster")
        self.working_directory = "."
        self.jobs: list[Any] = []
        self.dispatcher = self.thread_cond = self

    def number_of_workers(self) -> int:
        return 1

    def submit_job(self, config_id: Any, **asked: Any) -> None:
        self.jobs.append(job := Job(config_id, **asked))
        job.time_it("submitted")

    def wait(self, timeout: float | None = None) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            job.time_it("started")
            lr, budget = job.kwargs["config"]["lr"], job.kwargs["budget"]
            job.result = {"loss": loss_after(lr, budget), "info": {}}
            job.time_it("finished")
            self.job_callback(job)

    def __enter__(self) -> Serial:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def acquire(self) -> None:
        pass

    release = notify = notify_all = acquire


def by_hpbandster(optimizer: str, space: Any, seed: int, **options: Any) -> Any:
    """Runs one iteration after another, each stage at once."""
    np.random.seed(seed)
    with quiet():
        made = type("Made", (BY_NAME[optimizer], Serial), {})(
            configspace=space, eta=3, min_budget=1, max_budget=9, **options
        )
        space.seed(seed)
        for _ in range(BUDGETS["n_iterations"]):
            result = made.run(n_iterations=1, iteration_kwargs={})
    return result


@pytest.mark.slow
@OPTIMIZERS
def test_a_synchronous_run_has_the_configurations_of_hpbandsters_own(
    optimizer: str, space: Any, executor: FluidExecutor
) -> None:
    options = {"random_fraction": 0.2} if optimizer == "BOHB" else {}
    expected = by_hpbandster(optimizer, space, seed=5, **options)
    result = run(optimizer, space, Descent, synchronous=True, seed=5, executor=executor, **BUDGETS, **options)
    assert [fact[:3] for fact in facts(result)] == [fact[:3] for fact in facts(expected)]
    assert [fact[3] for fact in facts(result)] == pytest.approx([fact[3] for fact in facts(expected)])
    assert result.get_incumbent_id() == expected.get_incumbent_id()
    assert result.HB_config.keys() == expected.HB_config.keys()
    picks = [info["config_info"].get("model_based_pick") for info in result.get_id2config_mapping().values()]
    assert (True in picks) == (optimizer == "BOHB"), "the model was never asked"


@pytest.mark.slow
@OPTIMIZERS
@pytest.mark.parametrize("synchronous", [True, False])
def test_budgets_are_iterations_and_the_same_seed_gives_the_same_without_a_model(
    optimizer: str, synchronous: bool, space: Any, executor: FluidExecutor
) -> None:
    np.random.seed(1)
    before = np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    runs = [
        run(BY_NAME[optimizer], space, Descent, synchronous=synchronous, seed=2, executor=executor, **BUDGETS)
        for _ in range(2)
    ]
    assert np.random.get_state()[1].tolist() == before  # type: ignore[union-attr]
    for result in runs:
        done = result.get_all_runs()
        assert Counter(run.budget for run in done) == ({9.0: 9} if optimizer == "RandomSearch" else RUNS)
        for one in done:
            assert one.info["steps"] == one.budget
            assert one.loss == one.info["loss"] == -one.info["score"]
            assert type(one.info["score"]) is float
            stamps = one.time_stamps
            assert 0 <= stamps["submitted"] <= stamps["started"] <= stamps["finished"]
    if synchronous or optimizer != "BOHB":
        assert facts(runs[0]) == facts(runs[1])


# --- How it runs


@pytest.mark.slow
@pytest.mark.parametrize("resume", [True, False])
def test_a_configuration_continues_from_its_state_unless_resume_is_false(
    resume: bool, space: Any, executor: FluidExecutor, tmp_path: Path
) -> None:
    trainable = noting(tmp_path)
    result = run("HyperBand", space, trainable, resume=resume, synchronous=True, executor=executor, **BUDGETS)
    done = result.get_all_runs(only_largest_budget=resume)
    configs = result.get_id2config_mapping()
    expected: Counter[str] = Counter()
    for one in done:
        expected[repr(configs[one.config_id]["config"]["lr"])] += int(one.budget)
    assert Counter((tmp_path / "steps").read_text().split()) == expected
    assert all(one.info["steps"] == one.budget for one in result.get_all_runs())


class Recorder:
    """A result logger that records the iteration of each result."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def new_config(self, config_id: Any, config: Any, config_info: Any) -> None:
        self.heard.append(("config", config_id[0]))

    def __call__(self, job: Any) -> None:
        self.heard.append(("result", job.id[0]))


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [True, False])
def test_the_next_iteration_begins_when_the_last_is_complete_or_when_devices_are_free(
    synchronous: bool, space: Any, executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[tuple[str, int]] = []
    owners: set[str] = set()
    submit = executor.submit_trialgroup

    def spy(group: Any, **options: Any) -> Any:
        groups.append((group.name, len(group)))
        owners.add(group.owner)
        return submit(group, **options)

    monkeypatch.setattr(executor, "submit_trialgroup", spy)
    run(
        "BOHB",
        space,
        Descent,
        synchronous=synchronous,
        executor=executor,
        result_logger=(recorder := Recorder()),
        **BUDGETS,
    )
    assert groups == [("iteration 0, stage 0", 9), ("iteration 1, stage 0", 3), ("iteration 2, stage 0", 3)]
    assert len(owners) == 1 and None not in owners, "they are scheduled as one"
    heard = recorder.heard
    last_result, next_config = len(heard) - 1 - heard[::-1].index(("result", 0)), heard.index(("config", 1))
    assert (next_config > last_result) == synchronous


class SlowDescent(Descent):
    """A descent whose steps take a while."""

    def step(self) -> dict[str, Any]:
        time.sleep(0.05)
        return super().step()


@pytest.mark.slow
def test_a_bracket_is_forecast_while_it_runs(
    space: Any, executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[SearchShape | None] = []
    submit = executor.submit_trialgroup

    def spy(group: Any, **options: Any) -> Any:
        shapes.append(group.search.shape)
        return submit(group, **options)

    forecasts: list[Forecast] = []
    has_ended = threading.Event()

    def ask() -> None:
        while not has_ended.wait(0.02):
            handles = executor.handles
            forecast = handles[-1].forecast() if handles else None
            if forecast is not None and forecast.seconds[0.5] > 0.0:
                forecasts.append(forecast)

    monkeypatch.setattr(executor, "submit_trialgroup", spy)
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        run("HyperBand", space, SlowDescent, synchronous=True, executor=executor, **BUDGETS)
    finally:
        has_ended.set()
        asking.join()
    assert [(shape.rungs, shape.brackets) for shape in shapes if shape is not None] == [
        ((1, 3, 9), ((9, 3, 1),)),
        ((3, 9), ((3, 1),)),
        ((9,), ((3,),)),
    ]
    # A bracket takes less than a second on an idle machine.
    assert forecasts and all(0.0 < forecast.seconds[0.5] < 20.0 for forecast in forecasts)


@pytest.mark.slow
def test_a_deadline_ends_the_optimizer_with_an_error_of_its_own(space: Any, tmp_path: Path) -> None:
    with (
        FluidExecutor("local", 2, run_dir=tmp_path, verbose=0, deadline=2.0) as own,
        pytest.raises(LimitReachedError, match="the deadline of 2 s has come"),
    ):
        run("HyperBand", space, SlowDescent, min_budget=300, max_budget=2700, n_iterations=1, executor=own)


def test_trials_lead_to_the_stages_after_theirs(
    space: Any, executor: FluidExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    submit, extend = executor.submit_trialgroup, TrialGroupHandle.extend

    def note_submit(group: Any, **options: Any) -> Any:
        told.extend((trial.budget, trial.follow_up_iterations) for trial in group)
        return submit(group, **options)

    def note_extend(self: Any, trial_id: str, budget: int, *, follow_up_iterations: int = 0) -> None:
        told.append((budget, follow_up_iterations))
        extend(self, trial_id, budget, follow_up_iterations=follow_up_iterations)

    monkeypatch.setattr(executor, "submit_trialgroup", note_submit)
    monkeypatch.setattr(TrialGroupHandle, "extend", note_extend)
    run("HyperBand", space, Descent, max_budget=9, executor=executor, seed=1, synchronous=True)
    assert told == [(1, 8)] * 9 + [(2, 6)] * 3 + [(6, 0)]


def test_nothing_of_pyro_is_started(space: Any, executor: FluidExecutor) -> None:
    before = set(threading.enumerate())
    during: set[threading.Thread] = set()

    class Watch(Recorder):
        def __call__(self, job: Any) -> None:
            during.update(threading.enumerate())

    run("BOHB", space, Descent, executor=executor, result_logger=Watch(), **BUDGETS)
    assert {thread for thread in during if not thread.name.startswith("fluid-")} <= before


def test_generators_and_the_greatest_being_the_best(space: Any, executor: FluidExecutor) -> None:
    def climb(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        for step in range(1, 6):
            yield {"height": step * config["lr"]}

    result = run("HyperBand", space, climb, metric="height", mode="max", seed=1, executor=executor, **BUDGETS)
    configs = result.get_id2config_mapping()
    for one in result.get_all_runs():
        # It has five steps at most, even with a larger budget.
        assert one.loss == pytest.approx(-min(one.budget, 5) * configs[one.config_id]["config"]["lr"])
    first = [config["config"]["lr"] for config_id, config in configs.items() if config_id[0] == 0]
    best = [one.config_id[2] for one in result.get_all_runs() if one.budget == 9.0 and one.config_id[0] == 0]
    assert best == [first.index(max(first))]


@pytest.mark.slow
def test_what_the_user_has_of_a_result(space: Any, executor: FluidExecutor, tmp_path: Path) -> None:
    from hpbandster.core.result import json_result_logger, logged_results_to_HBS_result

    logger = json_result_logger(str(tmp_path))
    result = run("BOHB", space, Descent, seed=4, executor=executor, result_logger=logger, **BUDGETS)
    trajectory = result.get_incumbent_trajectory()
    assert trajectory["losses"][-1] == min(one.loss for one in result.get_all_runs() if one.budget == 9.0)
    assert all(len(curves[0]) >= 1 for curves in result.get_learning_curves().values())
    logged = logged_results_to_HBS_result(str(tmp_path))
    assert sorted(facts(logged)[0][2].items()) == sorted(facts(result)[0][2].items())
    assert len(logged.get_all_runs()) == len(result.get_all_runs()) == sum(RUNS.values())
    # A later run can continue from it: the model has all its results from the start.
    again = run("BOHB", space, Descent, executor=executor, previous_result=result, random_fraction=0.0, **BUDGETS)
    own = [info for config_id, info in again.get_id2config_mapping().items() if config_id[0] >= 0]
    assert all(info["config_info"]["model_based_pick"] for info in own)


# --- Failures


@pytest.mark.slow
def test_a_run_that_fails_has_no_loss_and_does_not_go_on(
    space: Any, executor: FluidExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(Descent):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.fails_at = 3 if self.lr > 0.1 else None

    result = run("HyperBand", space, Fails, synchronous=True, seed=3, executor=executor, **BUDGETS)
    configs = result.get_id2config_mapping()
    failed = [one for one in result.get_all_runs() if one.loss is None]
    assert failed
    for one in result.get_all_runs():
        assert (one.loss is None) == (configs[one.config_id]["config"]["lr"] > 0.1 and one.budget >= 3)
    for one in failed:
        assert one.budget == result.get_runs_by_id(one.config_id)[-1].budget
        assert "step 3 went wrong" in one.error_logs
        assert one.info is None
    # HpBandSter tells each failure, and Fluid does not repeat it.
    assert {record.name for record in caplog.records if "step 3 went wrong" in record.getMessage()} == {"hpbandster"}


def test_others_are_sampled_in_the_place_of_those_that_failed(space: Any, executor: FluidExecutor) -> None:
    class Fails(Descent):
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.fails_at = 1 if self.lr > 0.002 else None

    result = run("HyperBand", space, Fails, synchronous=True, seed=3, executor=executor, **BUDGETS)
    done = result.get_all_runs()
    late = [one for one in done if one.config_id[1] > 0]
    assert late, "HpBandSter fills a stage up"
    assert all(one.loss is None or one.info["steps"] == one.budget for one in done)
    assert Counter(one.budget for one in done if one.config_id[0] == 0) == {1.0: 9, 3.0: 3, 9.0: 1}


def test_a_trial_that_reports_nothing_has_failed(space: Any, executor: FluidExecutor) -> None:
    def silent(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        yield from ()

    result = run("RandomSearch", space, silent, max_budget=2, executor=executor)
    assert [one.loss for one in result.get_all_runs()] == [None]
    assert "before it reported" in result.get_all_runs()[0].error_logs
    assert result.get_incumbent_id() is None


@pytest.mark.parametrize("report", [{"accuracy": 1.0}, {"loss": "low"}, {"loss": None}])
def test_a_metric_that_is_not_reported_ends_the_run(report: Any, space: Any, executor: FluidExecutor) -> None:
    def wrong(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield report

    with pytest.raises(InvalidFieldError, match="metric='loss'"):
        run("HyperBand", space, wrong, executor=executor, **BUDGETS)


@pytest.mark.slow
def test_an_executor_that_is_closed_meanwhile(space: Any, tmp_path: Path) -> None:
    executor = FluidExecutor(backend="local", devices=1, run_dir=tmp_path, verbose=0)

    class Closes(Recorder):
        def __call__(self, job: Any) -> None:
            executor.close()

    with pytest.raises(FluidError, match="closed"):
        run("BOHB", space, Descent, executor=executor, result_logger=Closes(), **BUDGETS)


@pytest.mark.slow
def test_an_executor_is_closed_unless_it_is_in_a_with_block(space: Any, tmp_path: Path) -> None:
    executor = FluidExecutor(backend="local", devices=1, run_dir=tmp_path, verbose=0)
    run("RandomSearch", space, Descent, max_budget=1, executor=executor)
    with pytest.raises(FluidError, match="closed"):
        executor.status()


class Elsewhere:
    """A class that is not an optimizer."""


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"optimizer": "TPE"}, "optimizer"),
        ({"optimizer": Elsewhere}, "optimizer"),
        ({"configspace": {"lr": [0.1, 1.0]}}, "configspace"),
        ({"trainable": 3}, "trainable"),
        ({"trainable": Descent()}, "trainable"),
        ({"min_budget": 0}, "min_budget"),
        ({"min_budget": 0.5}, "min_budget"),
        ({"min_budget": 10}, "max_budget"),
        ({"max_budget": math.inf}, "max_budget"),
        ({"eta": 1.5}, "eta"),
        ({"n_iterations": 0}, "n_iterations"),
        ({"mode": "best"}, "mode"),
        ({"executor": 2}, "executor"),
        ({"top_percent": 3}, "options"),
        ({"trainable": Worker, "metric": "accuracy"}, "metric"),
        ({"trainable": Worker, "mode": "max"}, "mode"),
        ({"trainable": Worker, "min_budget": 0}, "min_budget"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(changed: dict[str, Any], field: str, space: Any) -> None:
    options = {"optimizer": "BOHB", "configspace": space, "trainable": Descent, "max_budget": 9, **changed}
    with pytest.raises(InvalidFieldError) as refused:
        run(**options)
    assert refused.value.field == field


# --- Workers


def worker(compute: Callable[..., Any], where: Path | None = None) -> Any:
    class Made(Worker):  # type: ignore[misc]
        def __init__(self, *, offset: float, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.offset = offset
            if where is not None:
                with (where / "workers").open("a") as file:
                    file.write(f"{self.worker_id}\n")

        def compute(self, **asked: Any) -> Any:
            return compute(self, **asked)

    return Made


def test_a_worker_computes_once_for_each_budget(space: Any, executor: FluidExecutor, tmp_path: Path) -> None:
    def compute(self: Any, config_id: Any, config: Any, budget: float, working_directory: str) -> Any:
        with (Path(working_directory) / "computed").open("a") as file:
            file.write(json.dumps([list(config_id), budget]) + "\n")
        return {"loss": config["lr"] / budget + self.offset, "info": {"twice": 2 * config["lr"]}}

    result = run(
        "HyperBand",
        space,
        worker(compute, tmp_path),
        min_budget=0.5,
        max_budget=4.5,
        n_iterations=3,
        executor=executor,
        worker_options={"offset": 1.0},
        working_directory=str(tmp_path),
    )
    done = result.get_all_runs()
    assert Counter(one.budget for one in done) == {budget / 2: count for budget, count in RUNS.items()}
    configs = result.get_id2config_mapping()
    for one in done:
        lr = configs[one.config_id]["config"]["lr"]
        assert (one.loss, one.info) == (pytest.approx(lr / one.budget + 1.0), {"twice": pytest.approx(2 * lr)})
    computed = [json.loads(line) for line in (tmp_path / "computed").read_text().splitlines()]
    assert sorted(computed) == sorted([list(one.config_id), one.budget] for one in done)
    workers = (tmp_path / "workers").read_text().split()
    assert len(workers) == len(set(workers)) <= 2, "one worker a process"


def test_a_worker_that_raises_or_returns_nonsense_has_failed(space: Any, executor: FluidExecutor) -> None:
    def compute(self: Any, config: Any, **asked: Any) -> Any:
        if config["lr"] > 0.03:
            raise RuntimeError("too fast")
        return 3.0

    options = {"worker_options": {"offset": 0.0}, "executor": executor}
    result = run("RandomSearch", space, worker(compute), max_budget=9, seed=3, **options)
    configs = result.get_id2config_mapping()
    for one in result.get_all_runs():
        assert one.loss is None
        said = "too fast" if configs[one.config_id]["config"]["lr"] > 0.03 else "must return a dict"
        assert said in one.error_logs
