"""What trials of one call share: pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fluid import Trial
from fluid.search import schedule
from fluid.session.starts import SharedTrials, share_prefixes
from fluid.trial_fields import StartFrom


def train(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    yield {}, None


def ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"run-{next(numbers)}"


def trial(name: str, last: float, budget: int = 10, **more: Any) -> Trial:
    config = {"lr": schedule({0: 0.1, 5: last}), **more.pop("config", {})}
    return Trial(more.pop("trainable", train), config, budget=budget, trial_id=name, **more)


def shared(*trials: Trial, replays: bool = False) -> SharedTrials:
    return share_prefixes(list(trials), ids(), replays=replays)


def names(found: SharedTrials) -> list[str]:
    return [each.id for each in found.trials]


def test_trials_that_agree_start_from_one_run_and_have_the_first_ones_seeds() -> None:
    found = shared(trial("a", 1.0), trial("b", 2.0))
    run, a, b = found.trials
    assert run.is_shared_run and run.budget == 5 and run.config["lr"] == schedule(0.1).until(5, "run-0")
    assert a.start_from == b.start_from == StartFrom("run-0", 5, is_shared=True)
    assert found.roots == {"run-0": "a", "a": "a", "b": "a"}


def test_a_run_goes_no_further_than_the_budgets_of_its_trials_at_first() -> None:
    run, *_ = shared(*(trial(name, last, 2, follow_up_iterations=8) for name, last in (("a", 1.0), ("b", 2.0)))).trials
    assert run.budget == 2


def test_what_else_differs_shares_nothing() -> None:
    others = [
        trial("b", 2.0, config={"size": 2}),
        trial("b", 2.0, config={"data": np.arange(3)}),
        trial("b", 2.0, trainable=lambda config, state=None: iter(())),
        trial("b", 2.0, devices=1),
        trial("b", 2.0, prefix=False),
        Trial(train, {"lr": 0.1}, budget=10, trial_id="b"),
    ]
    for other in others:
        assert names(shared(trial("a", 1.0), other)) == ["a", "b"]


def test_arrays_that_are_equal_do_not_keep_trials_apart() -> None:
    found = shared(*(trial(name, last, config={"data": np.arange(3)}) for name, last in (("a", 1.0), ("b", 2.0))))
    assert names(found) == ["run-0", "a", "b"]


def test_repeats_have_seeds_of_their_own() -> None:
    found = shared(trial("a", 1.0), trial("again", 1.0), trial("b", 2.0), trial("b again", 2.0))
    assert names(found) == ["run-0", "run-1", "a", "again", "b", "b again"]
    assert found.roots["b"] == "a" and found.roots["b again"] == "again"


def test_what_cannot_be_saved_is_not_shared() -> None:
    def unsavable(config: dict[str, Any]) -> Iterator[Any]:
        yield {}

    assert names(shared(trial("a", 1.0, trainable=unsavable), trial("b", 2.0, trainable=unsavable))) == ["a", "b"]


def test_a_run_that_is_replayed_has_the_config_of_a_trial_whose_course_is_known() -> None:
    first = trial("a", 1.0)
    run, *_ = shared(first, trial("b", 2.0), replays=True).trials
    assert run.config == first.config
