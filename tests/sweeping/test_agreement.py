"""What the drivers of one sweep must have in common, and how it is said that they have not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fluid import InvalidFieldError
from fluid.joint.entries import Founded, entry_of, read_entry
from fluid.search import BOHB, AskTell, choice, loguniform, make_sampler, make_space, schedule, uniform
from fluid.search.algorithms import make_scheduler
from fluid.search.searchers import SamplerSearcher
from fluid.search.stop_rules import StopRules, Target
from fluid.search.suggestion import Suggestion
from fluid.sweeping.agreement import arguments_of, codes_of, require_alike
from fluid.sweeping.plan import SweepPlan

SPACE = {"x": uniform(0.0, 1.0), "layers": [1, 2], "net": {"act": choice([len, max]), "width": 8}}


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    yield {"loss": config["x"]}


def doubled(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    yield {"loss": 2.0 * config["x"]}


def plan(space: Any = SPACE, trainable: Any = train, **fields: Any) -> SweepPlan:
    known = make_space(space)
    made = SweepPlan(
        trainable=trainable,
        name="sweep",
        algorithm="random",
        searcher=SamplerSearcher(make_sampler("random", known, seed=0)),
        learns=False,
        constants={},
        scheduler=make_scheduler("random", rungs=(1,), eta=3, samples=9),
        rules=StopRules(None, {"loss": True}),
        goals=(),
        samples=9,
        budget=1,
        under_way=None,
        time_budget_s=None,
        oom_is_worst=False,
        trial_options={},
        callbacks=(),
        space=known,
    )
    return replace(made, **fields)


def check(one: SweepPlan, other: SweepPlan, *configs: Any) -> None:
    """Checks a second driver by what the first one tells, as it is read."""
    firsts = [Suggestion(0, config) for config in configs] or [None, None]
    told = Founded("sweep", arguments_of(one, firsts[0]), (), codes_of(one))
    _, (founded,) = read_entry(entry_of("a", 0, [told]))
    mine = arguments_of(other, firsts[1])
    require_alike(founded, mine, codes_of(other), takes_other_code=other.takes_other_code)


def space_function(high: float) -> Callable[[Any], dict[str, Any]]:
    return lambda trial: {"x": trial.suggest_float("x", 0.0, high)}


def rates(*starts: int, **options: Any) -> Any:
    return schedule({start: [1, 2] for start in starts}, **options)


def decay(by: float, low: Any = (1, 2)) -> Any:
    return schedule(lambda iteration, low: low / by**iteration, low=list(low) if isinstance(low, tuple) else low)


@pytest.mark.parametrize("first", [(), ({"x": 1, "y": 2}, {"y": 2, "x": 1})])
def test_the_same_is_alike(first: Any) -> None:
    check(plan(), plan(), *first)
    check(plan(space_function(1.0)), plan(space_function(1.0)))
    searcher = AskTell(lambda: {}, lambda config, value: None)
    check(plan(space=None or {}, searcher=searcher), plan({}, searcher=searcher))


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"samples": 9}, {"samples": None}, "samples: 9; this call says None"),
        ({}, {"seed": 3}, r"seed: 0; this call says 3\. Give the same, or a fresh run_dir"),
        ({}, {"points": [{"x": 0.5}]}, "points: [(][)]|points: \\[\\]"),
        ({"rules": StopRules(Target(1.0), {"loss": True})}, {}, "stop"),
        ({}, {"oom_is_worst": True}, "on_oom: fail; this call says worst"),
        ({"constants": {"batch": 64}}, {"constants": {"batch": 128}}, 'space: {"batch": 64}; this call .*128'),
        ({"constants": {"batch": 64}}, {}, "this call says nothing"),
        ({}, {"constants": {"batch": 64}}, "says space: nothing"),
        ({}, {"space": {**SPACE, "x": uniform(0.0, 2.0)}}, r"space\['x'\].*high.*1.0.*high.*2.0"),
        ({}, {"space": {**SPACE, "x": loguniform(0.1, 1.0)}}, r"space\['x'\]"),
        ({}, {"space": {**SPACE, "layers": [2, 1]}}, r"space\['layers'\].*\[1, 2\].*\[2, 1\]"),
        ({}, {"space": {**SPACE, "net": {"act": choice([len, min]), "width": 8}}}, r"net/act.*\"max\".*\"min\""),
        ({}, {"space": {**SPACE, "net": {"act": choice([len, max]), "width": 9}}}, r"space\['net/width'\]: 8; .* 9"),
        ({}, {"space": {"layers": [1, 2], "x": uniform(0.0, 1.0), "net": SPACE["net"]}}, "names in space: x, layers"),
        ({}, {"space": {name: SPACE[name] for name in ("x", "layers")}}, "names in space"),
        ({"space": {"lr": schedule({0: 1})}}, {"space": {"lr": schedule({0: 2})}}, r"space\['lr'\].*\[1\].*\[2\]"),
        ({"space": {"lr": rates(0, 9)}}, {"space": {"lr": rates(0, 8)}}, "names in space: lr/0, lr/9; .* lr/0, lr/8"),
        ({"space": {"lr": rates(0)}}, {"space": {"lr": rates(0, between="linear")}}, r"space\['lr'\].*'linear'"),
        ({"space": {"lr": decay(2)}}, {"space": {"lr": decay(3)}}, "other code: by of <lambda>"),
        ({"space": {"lr": [decay(2, 1)]}}, {"space": {"lr": [decay(3, 1)]}}, "other code: by of <lambda>"),
        (
            {"algorithm": "bohb", "options": BOHB(num_samples=8)},
            {"algorithm": "bohb", "options": BOHB(num_samples=9)},
            "algorithm: .*num_samples.*8.*; this call says .*9",
        ),
        ({}, {"trainable": doubled}, "other code: doubled"),
        ({}, {"trainable": partial(train, extra=1)}, "other code: argument extra"),
        ({"space": space_function(1.0)}, {"space": space_function(2.0)}, "other code: high of <lambda>"),
    ],
)
def test_what_differs_is_named(one: dict[str, Any], other: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidFieldError, match=named):
        check(plan(**{"seed": 0, **one}), plan(**{"seed": 0, **other}))


def test_libraries_that_draw_otherwise_are_seen() -> None:
    with pytest.raises(InvalidFieldError, match=r'first config: {"x": 0\.1}; this call says {"x": 0\.2}'):
        check(plan(), plan(), {"x": 0.1}, {"x": 0.2})


def test_another_version_is_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Founded("sweep", {**arguments_of(plan(), None), "version of Fluid": "0.0.1", "samples": "3"})
    with pytest.raises(InvalidFieldError, match=r"says version of Fluid: 0\.0\.1; this call says"):
        require_alike(told, arguments_of(plan(), None), {}, takes_other_code=False)


def test_of_long_texts_what_differs_is_shown() -> None:
    numbers = [float(number) for number in range(1000)]
    other = {"x": [*numbers[:900], 0.5, *numbers[901:]]}
    with pytest.raises(InvalidFieldError) as caught:
        check(plan({"x": numbers}), plan(other))
    text = str(caught.value)
    assert ", 899.0, 900.0, 901.0, " in text and ", 899.0, 0.5, 901.0, " in text
    assert len(text) < 700


def test_other_code_is_taken_if_that_is_said() -> None:
    check(plan(), plan(trainable=doubled, takes_other_code=True))


def test_another_python_is_no_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Founded("sweep", arguments_of(plan(), None), (), codes_of(plan()))
    other = plan(trainable=doubled)
    with pytest.raises(InvalidFieldError, match="other code"):
        require_alike(told, arguments_of(other, None), codes_of(other), takes_other_code=False)
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    require_alike(told, arguments_of(other, None), codes_of(other), takes_other_code=False)


def test_functions_of_ray_tune_in_the_space_are_compared() -> None:
    tune = pytest.importorskip("ray.tune")
    one, other = ({"x": tune.uniform(0, 1), "y": tune.sample_from(f)} for f in (_one, _another))
    check(plan(one), plan(one))
    with pytest.raises(InvalidFieldError, match="other code"):
        check(plan(one), plan(other))
    with pytest.raises(InvalidFieldError, match=r"space\['x'\]"):
        check(plan(one), plan({**one, "x": tune.uniform(0, 2)}))


def _one(config: Any) -> Any:
    return config["x"] + 1


def _another(config: Any) -> Any:
    return config["x"] + 2
