"""What TPE learns where trials are stopped at rungs."""

from __future__ import annotations

from typing import Any

import pytest

from fluid.search import SearchOutcome, make_sampler, make_space, uniform
from fluid.search.algorithms import make_scheduler, shape_for
from fluid.search.schedulers import AsynchronousHalving, FullBudget
from fluid.search.searchers import SamplerSearcher
from fluid.search.suggestion import ELSEWHERE

pytest.importorskip("optuna")


def searcher(mode: str = "min", **options: Any) -> SamplerSearcher:
    return SamplerSearcher(make_sampler("tpe", make_space({"x": uniform(0, 1)}), modes=(mode,), seed=0, **options))


def heard(token: int, config: dict[str, Any], value: float | None, state: str, iteration: int) -> SearchOutcome:
    values = None if value is None else (value,)
    return SearchOutcome(token=token, config=config, values=values, state=state, iteration=iteration)


def mean_of_last(made: SamplerSearcher, tell: Any, count: int = 60) -> float:
    """Where it suggests at last; ``tell`` tells it of each suggestion."""
    found = []
    for _ in range(count):
        suggestion = made.ask()
        assert suggestion is not None
        found.append(suggestion.config["x"])
        tell(made, suggestion.token, suggestion.config)
    return sum(found[-15:]) / 15


@pytest.mark.parametrize("mode", ["min", "max"])
def test_values_of_unlike_iterations_are_not_compared(mode: str) -> None:
    """A loss falls with the iterations: those that were stopped first have the least good values, however good."""
    sign = 1.0 if mode == "min" else -1.0

    def tell(made: SamplerSearcher, token: int, config: dict[str, Any]) -> None:
        # Those above 0.5 look best where they are stopped, and the others are better at equal iterations all the same.
        at_rung = abs(config["x"] - 0.2)
        made.observe(heard(token, config, sign * at_rung, "PAUSED", 1))
        if at_rung > 0.25:
            made.tell(heard(token, config, sign * at_rung, "STOPPED", 1))
        else:
            made.tell(heard(token, config, sign * (10.0 + at_rung), "DONE", 9))

    assert abs(mean_of_last(searcher(mode), tell) - 0.2) < 0.1


def test_infeasible_configs_are_avoided() -> None:
    def tell(made: SamplerSearcher, token: int, config: dict[str, Any]) -> None:
        if config["x"] < 0.5:
            made.observe(heard(token, config, 0.0, "PAUSED", 1))  # The best so far, before it proves infeasible.
            made.tell(heard(token, config, None, "INFEASIBLE", 1))
        else:
            made.tell(heard(token, config, 1.0, "DONE", 1))

    assert mean_of_last(searcher(), tell) > 0.6


def test_what_counts_as_the_worst_is_avoided() -> None:
    def tell(made: SamplerSearcher, token: int, config: dict[str, Any]) -> None:
        # As with on_oom="worst": a value, of a trial that has failed.
        made.tell(heard(token, config, 1.0, *(("DONE", 1) if config["x"] >= 0.5 else ("FAILED", 1))))

    assert mean_of_last(searcher(), tell) > 0.6


def test_a_trial_of_another_driver_counts_once() -> None:
    made, config = searcher(), {"x": 0.25}
    for iteration, value in ((1, 0.5), (3, 0.4)):
        made.observe(heard(ELSEWHERE, config, value, "PAUSED", iteration))
    made.tell(heard(ELSEWHERE, config, 0.3, "DONE", 9))
    suggestion = made.ask()
    assert suggestion is not None
    made.tell(heard(suggestion.token, suggestion.config, 0.9, "DONE", 9))
    made.ask()
    study = made._sampler._study  # type: ignore[attr-defined]
    assert [trial.value for trial in study.trials[:2]] == [0.5, 0.9], "at the lowest rung, as none has enough"


def test_its_trials_stop_at_the_rungs_of_asha() -> None:
    asked = {"eta": 3, "samples": 9}
    assert isinstance(make_scheduler("tpe", rungs=(1, 3, 9), **asked), AsynchronousHalving)
    assert shape_for("tpe", rungs=(1, 3, 9), **asked) == shape_for("asha", rungs=(1, 3, 9), **asked)
    assert isinstance(make_scheduler("tpe", rungs=(9,), **asked), FullBudget)
    assert shape_for("tpe", rungs=(9,), **asked).algorithm == "full"
