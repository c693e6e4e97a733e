"""Forecasts of sweeps: what a session tells of them, how old it is, and that it hardly takes the driver's time."""

from __future__ import annotations

import time
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, Search, Trial, TrialGroup
from fluid._clock import thread_seconds
from fluid.planners.instance import EndDistribution
from fluid.search import uniform
from fluid.session.forecasting.forecasts import PlayedForecasts, _Played, _to_play


def sleep(config: dict[str, Any]) -> Any:
    for step in range(1, 100):
        time.sleep(config.get("seconds", 0.06))
        yield {"loss": config["x"] / step}


def sleep_on(config: dict[str, Any], state: int | None = None) -> Any:
    """As :func:`sleep`, and can be saved."""
    for step in range(1 + (state or 0), 100):
        time.sleep(config["seconds"])
        yield {"loss": config["x"] + 0.1 / step}, step


class Watcher(fluid.TrialListener):
    """Takes forecasts while a sweep runs."""

    def __init__(self) -> None:
        self.executor: FluidExecutor | None = None
        self.taken: list[tuple[float, Any]] = []

    def on_result(self, result: Any) -> None:
        assert self.executor is not None
        handle = self.executor.handles[-1]
        self.taken.append((time.monotonic(), handle.forecast()))

    def on_start(self, trial_id: str) -> None:
        pass

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        pass

    def on_broken(self, error: BaseException) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "seconds"), [("asha", 0.15), ("hyperband", 0.08), ("random", 0.04), ("pbt", 0.06)]
)
def test_a_sweep_is_forecast_while_it_runs(algorithm: str, seconds: float, tmp_path: Any) -> None:
    watcher = Watcher()
    with FluidExecutor(backend="local", devices=2, max_packing=1, verbose=0, run_dir=tmp_path / "run") as executor:
        watcher.executor = executor
        fluid.run(
            *(sleep_on if algorithm == "pbt" else sleep, {"x": uniform(0, 1), "seconds": seconds}),
            metric="loss",
            algorithm=algorithm,
            samples=16,
            budget=9,
            seed=1,
            executor=executor,
            callbacks=[watcher],
        )
        ended = time.monotonic()
        searches = executor.session.forecasts.searches
    known = [(at, forecast) for at, forecast in watcher.taken if forecast is not None]
    assert len(known) > 0.2 * len(watcher.taken)
    at, forecast = known[len(known) // 2]
    # Halfway, the end is forecast within a factor of two, on a machine that may be busy.
    assert 0.5 * forecast.seconds[0.1] < ended - at < 2.0 * forecast.seconds[0.9] + 0.5
    assert all(forecast.age_s >= 0.0 for _, forecast in known)
    # One play was enough: what followed counts it down.
    assert max(forecast.age_s for _, forecast in known) > 0.5 * (known[-1][0] - known[0][0])
    assert isinstance(searches, PlayedForecasts)


@pytest.mark.slow
def test_a_handle_waits_for_its_first_play(tmp_path: Any) -> None:
    with FluidExecutor(backend="local", devices=1, max_packing=1, verbose=0, run_dir=tmp_path / "run") as executor:
        search = Search("loss", "min", trials=4)
        trials = [Trial(sleep, {"x": 1.0, "seconds": 0.05}, budget=20) for _ in range(2)]
        handle = executor.submit_trialgroup(TrialGroup(trials, search=search))
        list(zip(range(3), handle.results(), strict=False))
        forecast = handle.forecast(q=(0.5,))
        assert forecast is not None and 1.0 < forecast.seconds[0.5] < 20.0
        # The two that are to come count.
        assert forecast.seconds[0.5] > 2 * 20 * 0.05


@pytest.mark.slow
def test_plays_rest_for_99_times_what_they_took(tmp_path: Any) -> None:
    with FluidExecutor(backend="local", devices=1, max_packing=1, verbose=0, run_dir=tmp_path / "run") as executor:
        search = Search("loss", "min", trials=400)
        trials = [Trial(sleep, {"x": 1.0, "seconds": 0.01}, budget=60) for _ in range(1)]
        handle = executor.submit_trialgroup(TrialGroup(trials, search=search))
        list(zip(range(3), handle.results(), strict=False))
        began = time.monotonic()
        first = handle.forecast()
        took = time.monotonic() - began
        assert first is not None
        time.sleep(0.2)
        second = handle.forecast()
        assert second is not None and second.age_s >= 0.2
        assert second.seconds[0.5] == pytest.approx(first.seconds[0.5] + first.age_s - second.age_s, abs=0.01)
        played = executor.session.forecasts.searches
        assert isinstance(played, PlayedForecasts)
        # Its processor time is at most the time that it took.
        assert 0.0 < played._rests_until - time.monotonic() <= 99.0 * took
        handle.stop(trials[0].id)


def test_numbers_of_devices_that_were_not_played_lie_between_those_that_were() -> None:
    ends = {2: EndDistribution.of_draws([8.0, 10.0, 12.0]), 8: EndDistribution.of_draws([2.0, 3.0, 4.0])}
    played = _Played(0.0, ends)
    assert played.on(2) is ends[2]
    assert played.on(4).quantile(0.5) == pytest.approx(6.5)
    assert played.on(1).quantile(0.5) == pytest.approx(20.0)
    assert played.on(16).quantile(0.5) == pytest.approx(3.0)
    assert _to_play(4, ()) == [4]
    assert _to_play(4, (6,)) == [4, 6, 1, 2, 8]


def test_the_processor_time_of_a_thread_is_its_own() -> None:
    began = thread_seconds()
    time.sleep(0.05)
    assert thread_seconds() - began < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["trial", "lane"])
def test_what_trials_hold_devices_for_beside_their_iterations_counts(tmp_path: Any, isolation: str) -> None:
    class Slow:
        """Takes as long to be set up as for its iterations."""

        def setup(self, config: dict[str, Any]) -> None:
            time.sleep(0.3)

        def step(self) -> dict[str, float]:
            time.sleep(0.1)
            return {"loss": 1.0}

        def save_checkpoint(self) -> None:
            return None

        def load_checkpoint(self, state: None) -> None:
            pass

        def cleanup(self) -> None:
            pass

    with FluidExecutor(backend="local", devices=1, max_packing=1, verbose=0, run_dir=tmp_path / "run") as executor:
        shape = fluid.SearchShape(algorithm="full", rungs=(3,))
        search = Search("loss", "min", trials=103, shape=shape)
        trials = [Trial(Slow, {}, budget=3, isolation=isolation) for _ in range(3)]
        handle = executor.submit_trialgroup(TrialGroup(trials, search=search))
        executor.session.forecasts.searches.close()  # It only looks.
        for _ in handle.results():
            handle.forecast()
        played = executor.session.forecasts.searches
        assert isinstance(played, PlayedForecasts)
        held = played._overheads._groups["0"]
        # Two set-ups, in a lane that was used before or in ones of their own.
        assert held.held > 8 * 0.1 + 0.3
