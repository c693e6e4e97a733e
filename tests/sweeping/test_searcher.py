"""fluid.run with a searcher: who is asked, who is told what, and what goes on while the searcher takes its time."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sweep_trainables import Counter, curve, fail_above_one, nan_below_zero, once, short

import fluid
from fluid import FluidError, FluidExecutor, InvalidFieldError, SweepResult
from fluid.search import AskLater, AskTell, SearchOutcome, Suggestion, Target, uniform


class Recorder:
    """Suggests given values of ``x``, and keeps what it is told."""

    def __init__(self, values: list[float]) -> None:
        self.values = list(values)
        self.told: list[tuple[Any, Any]] = []
        self.threads: set[str] = set()

    def ask(self) -> dict[str, Any] | None:
        self.threads.add(threading.current_thread().name)
        return {"x": self.values.pop(0)} if self.values else None

    def tell(self, config: Any, value: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.told.append((config["x"], value))

    def searcher(self, **options: Any) -> AskTell:
        return AskTell(self.ask, self.tell, **options)


def run(executor: FluidExecutor | None, searcher: Any, trainable: Any = curve, **options: Any) -> SweepResult:
    arguments = {"metric": "loss", "mode": "min", "budget": 9, "executor": executor, "algorithm": "full", **options}
    return fluid.run(trainable, searcher=searcher, **arguments)


def test_it_is_asked_until_it_has_no_more_and_told_once_of_each(executor: FluidExecutor) -> None:
    mine = Recorder([0.5, 0.1, 0.3, 0.2])
    result = run(executor, mine.searcher())
    assert [trial.config["x"] for trial in result.trials] == [0.5, 0.1, 0.3, 0.2]
    assert {trial.iteration for trial in result.trials} == {9}
    assert sorted(mine.told) == [(x, x + 1.0 / 9) for x in (0.1, 0.2, 0.3, 0.5)]
    assert mine.threads == {threading.current_thread().name}
    assert result.best.config == {"x": 0.1}


def test_samples_limit_what_is_asked(executor: FluidExecutor) -> None:
    mine = Recorder([0.1] * 9)
    assert len(run(executor, mine.searcher(), samples=3).trials) == 3
    assert len(mine.values) == 6
    assert len(run(executor, Recorder([0.1] * 9).searcher(size=2)).trials) == 2


@pytest.mark.parametrize(("minimizes", "expected"), [(True, 0.5), (False, -0.5)])
def test_the_sign_of_what_is_told_is_the_librarys(executor: FluidExecutor, minimizes: bool, expected: float) -> None:
    mine = Recorder([0.5])
    result = run(executor, mine.searcher(minimizes=minimizes), metric="gain", mode="max", budget=1)
    assert mine.told == [(0.5, expected)]
    assert result.best.value == -0.5


def test_several_metrics_are_told_as_a_list(executor: FluidExecutor) -> None:
    mine = Recorder([0.5])
    run(executor, mine.searcher(), metric=("loss", "gain"), mode=("min", "max"), budget=2)
    assert mine.told == [(0.5, [1.0, 0.5])]


def test_asha_stops_trials_and_each_is_told_where_it_stopped(executor: FluidExecutor) -> None:
    mine = Recorder([0.1, 0.2, 0.9, 0.8, 0.7, 0.05])
    result = run(executor, mine.searcher(), algorithm="asha", max_concurrent=1)
    assert [trial.iteration for trial in result.trials] == [9, 9, 1, 1, 1, 9]
    assert [trial.state for trial in result.trials] == ["DONE", "DONE", "STOPPED", "STOPPED", "STOPPED", "DONE"]
    assert mine.told == [(trial.config["x"], trial.metrics["loss"]) for trial in result.trials]


def test_a_function_that_returns_its_metrics(executor: FluidExecutor, tmp_path: Any) -> None:
    mine = Recorder([0.1, 0.2, 0.3])
    constants = {"calls": str(tmp_path / "calls")}
    result = fluid.run(once, constants, metric="loss", mode="min", searcher=mine.searcher(), executor=executor)
    assert sorted(mine.told) == [(0.1, 0.1), (0.2, 0.2), (0.3, 0.3)]
    assert {trial.config["calls"] for trial in result.trials} == {constants["calls"]}


@pytest.mark.parametrize(("trainable", "bad"), [(fail_above_one, 2.0), (nan_below_zero, -1.0)])
def test_a_trial_without_a_value_is_told_as_the_worst(executor: FluidExecutor, trainable: Any, bad: float) -> None:
    mine = Recorder([bad, 0.25, 0.5, bad, 0.75])
    run(executor, mine.searcher(), trainable, max_concurrent=1)
    assert mine.told == [(0.25, 0.25), (0.5, 0.5), (bad, 0.5), (0.75, 0.75)]


def test_a_library_with_a_word_for_failure_is_told_so(executor: FluidExecutor) -> None:
    failed: list[Any] = []
    mine = Recorder([2.0, 0.5])
    run(executor, mine.searcher(tell_failed=failed.append), fail_above_one, max_concurrent=1)
    assert (failed, mine.told) == ([{"x": 2.0}], [(0.5, 0.5)])


def test_what_is_asked_may_be_anything_that_a_config_can_be_made_of(executor: FluidExecutor) -> None:
    told: list[Any] = []
    points = iter([(0.5, 1), (0.25, 2)])
    searcher = AskTell(lambda: next(points, None), lambda *pair: told.append(pair), config=lambda x: {"x": x[0]})
    run(executor, searcher, budget=1, max_concurrent=1)
    assert told == [((0.5, 1), 1.5), ((0.25, 2), 1.25)]


class Limited(Recorder):
    """Lets only so many be under way, as Ax does."""

    def __init__(self, values: list[float], limit: int) -> None:
        super().__init__(values)
        self.limit = limit
        self.under_way = self.most = self.refused = 0

    def ask(self) -> dict[str, Any] | None:
        if self.under_way == self.limit:
            self.refused += 1
            raise AskLater
        config = super().ask()
        self.under_way += config is not None
        self.most = max(self.most, self.under_way)
        return config

    def tell(self, config: Any, value: Any) -> None:
        super().tell(config, value)
        self.under_way -= 1


@pytest.mark.parametrize("algorithm", ["full", "asha"])
def test_a_searcher_that_lets_only_so_many_be_under_way(executor: FluidExecutor, algorithm: str) -> None:
    mine = Limited([0.1, 0.2, 0.3, 0.4, 0.5], limit=1)
    result = run(executor, mine.searcher(), algorithm=algorithm)
    assert (len(result.trials), len(mine.told), mine.most) == (5, 5, 1)
    assert mine.refused > 0


def test_a_searcher_that_waits_for_nothing_is_named(executor: FluidExecutor) -> None:
    with pytest.raises(FluidError, match="waits for a result"):
        run(executor, Limited([0.1], limit=0).searcher())


def test_an_error_of_the_searcher_ends_the_sweep(executor: FluidExecutor) -> None:
    def ask() -> Any:
        raise ZeroDivisionError("the model is singular")

    with pytest.raises(ZeroDivisionError, match="singular"):
        run(executor, AskTell(ask, print))
    with pytest.raises(InvalidFieldError, match="must suggest a dict"):
        run(executor, AskTell(lambda: [0.5], print))


def test_trials_go_on_and_are_decided_while_it_is_asked(executor: FluidExecutor) -> None:
    """The second ask returns only when the first trial has come through all of its rungs."""
    through = threading.Event()

    class Slow(Recorder):
        def ask(self) -> dict[str, Any] | None:
            if len(self.values) == 1:
                assert through.wait(60.0)
            return super().ask()

    class Watch(fluid.TrialListener):
        def on_result(self, result: Any) -> None:
            if result.iteration == 9:
                through.set()

    mine = Slow([0.1, 0.2])
    result = run(executor, mine.searcher(), algorithm="asha", callbacks=[Watch()])
    assert [trial.iteration for trial in result.trials] == [9, 9]


def test_the_time_budget_ends_trials_while_it_is_asked(executor: FluidExecutor) -> None:
    stopped = threading.Event()

    class Slow(Recorder):
        def ask(self) -> dict[str, Any] | None:
            if len(self.values) == 1:
                assert stopped.wait(60.0)
            return super().ask()

    class Watch(fluid.TrialListener):
        def on_end(self, trial_id: str, state: str, failure: Any) -> None:
            stopped.set()

    mine = Slow([0.1, 0.2])
    options = {"budget": 10**9, "time_budget_s": 1.0, "callbacks": [Watch()]}
    result = run(executor, mine.searcher(), **options)
    assert [trial.config["x"] for trial in result.trials] == [0.1]
    assert "time budget" in result.notes[0]
    assert [x for x, _ in mine.told] == [0.1]


def test_a_target_ends_the_sweep_and_all_are_told(executor: FluidExecutor) -> None:
    mine = Recorder([0.5, 0.1] + [0.5] * 50)
    result = run(executor, mine.searcher(), stop=Target(0.3), budget=50)
    reported = [trial.config["x"] for trial in result.trials if trial.iteration > 0]
    assert sorted(x for x, _ in mine.told) == sorted(reported) and len(result.trials) < 10


def test_an_interruption_tells_what_there_is(executor: FluidExecutor) -> None:
    mine = Recorder([0.5, 0.1])
    asked = 0

    def ask() -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            raise KeyboardInterrupt
        return mine.ask()

    with pytest.raises(fluid.SweepInterrupted):
        run(executor, AskTell(ask, mine.tell, tell_failed=lambda config: mine.told.append((config["x"], None))))
    assert [x for x, _ in mine.told] == [0.5]


# -- searchers that set budgets themselves


class Halving:
    """Three configs for 2 iterations each, then the best of them for 6 in all."""

    size = None

    def __init__(self, xs: list[float]) -> None:
        self.xs = xs
        self.told: list[SearchOutcome] = []
        self.asked = 0

    def begin(self, metrics: Any, modes: Any) -> None:
        assert (metrics, modes) == (["loss"], ["min"])

    def ask(self) -> Suggestion | None:
        self.asked += 1
        if self.asked <= len(self.xs):
            return Suggestion(self.asked - 1, {"x": self.xs[self.asked - 1]}, budget=2)
        if len(self.told) < len(self.xs):
            self.asked -= 1
            raise AskLater
        if self.asked > len(self.xs) + 1:
            return None
        best = min(self.told, key=lambda one: one.values or (math.inf,))
        return Suggestion(99, dict(best.config), budget=6, continues=best.token)

    def tell(self, outcome: SearchOutcome) -> None:
        self.told.append(outcome)


@pytest.mark.parametrize("trainable", [Counter, curve])
def test_a_searcher_may_let_a_trial_continue(executor: FluidExecutor, trainable: Any) -> None:
    mine = Halving([0.5, 0.25, 1.0])
    result = run(executor, mine, trainable, budget=6)
    assert [(trial.config["x"], trial.iteration) for trial in result.trials] == [(0.5, 2), (0.25, 6), (1.0, 2)]
    assert [trial.state for trial in result.trials] == ["STOPPED", "DONE", "STOPPED"]
    assert sorted((one.token, one.state, one.iteration) for one in mine.told) == [
        *((token, "PAUSED", 2) for token in range(3)),
        (99, "DONE", 6),
    ]
    assert [one.iteration for one in result.trials[1].results] == [1, 2, 3, 4, 5, 6]
    assert all(one.seconds > 0.0 for one in mine.told)


def test_a_trial_that_ends_by_itself_cannot_continue_and_is_told_so(executor: FluidExecutor) -> None:
    mine = Halving([0.5])
    constants = {"length": 2}
    options = {"metric": "loss", "mode": "min", "budget": 6, "algorithm": "full", "executor": executor}
    result = fluid.run(short, constants, searcher=mine, **options)
    assert [(one.state, one.iteration) for one in mine.told] == [("PAUSED", 2), ("DONE", 2)]
    assert [(trial.state, trial.iteration) for trial in result.trials] == [("DONE", 2)]


def test_a_trial_that_failed_begins_anew(executor: FluidExecutor) -> None:
    mine = Halving([2.0, 3.0])
    with pytest.raises(fluid.SweepFailedError):
        run(executor, mine, fail_above_one, budget=6)
    assert [one.state for one in mine.told] == ["FAILED"] * 3
    assert {one.failure and one.failure[0] for one in mine.told} == {"error"}


def test_budgets_of_the_searcher_need_an_algorithm_without_rungs(executor: FluidExecutor) -> None:
    with pytest.raises(InvalidFieldError, match="use algorithm='full'"):
        run(executor, Halving([0.5]), algorithm="asha")
    with pytest.raises(InvalidFieldError, match="asks for 6 iterations"):
        run(executor, Halving([0.5]), budget=5)


# -- what is refused


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"searcher": Recorder([])}, r"AskTell\(object.ask, object.tell\)"),
        ({"algorithm": "hyperband"}, "algorithm='hyperband'"),
        ({"points": [{"x": 1}]}, "give them to its library"),
        ({"space": {"x": uniform(0, 1)}}, "nothing but constants"),
        ({"algorithm": "full", "searcher": None, "space": {"x": 1.0}}, "algorithm='full'"),
    ],
)
def test_bad_arguments_are_refused(executor: FluidExecutor, options: dict[str, Any], problem: str) -> None:
    given = {"searcher": Recorder([0.5]).searcher(), "metric": "loss", "mode": "min", **options}
    with pytest.raises(InvalidFieldError, match=problem):
        fluid.run(curve, given.pop("space", None), executor=executor, **given)


def test_functions_are_required() -> None:
    with pytest.raises(InvalidFieldError, match="ask"):
        AskTell(None, print)  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match="config"):
        AskTell(dict, print, config="x")  # type: ignore[arg-type]


def test_a_searcher_cannot_be_resumed(tmp_path: Any) -> None:
    folder = tmp_path / "sweep"
    options: dict[str, Any] = {"metric": "loss", "mode": "min", "budget": 1, "run_dir": folder, "resume": True}
    with FluidExecutor(backend="local", devices=1, run_dir=folder, verbose=0) as executor:
        fluid.run(curve, {"x": 0.5}, samples=1, metric="loss", mode="min", budget=1, executor=executor, name="sweep")
    options["name"] = "sweep"
    with pytest.raises(InvalidFieldError, match="resume"):
        fluid.run(curve, searcher=Recorder([0.5]).searcher(), **options)


def configs() -> Iterator[dict[str, Any]]:
    yield from ({"x": x} for x in (0.5, 0.25))


def test_a_generator_is_a_searcher_without_memory(executor: FluidExecutor) -> None:
    suggested = configs()
    result = run(executor, AskTell(lambda: next(suggested, None), lambda config, value: None))
    assert [trial.config["x"] for trial in result.trials] == [0.5, 0.25]
