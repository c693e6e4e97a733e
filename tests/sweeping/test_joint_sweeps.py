"""Sweeps that several drivers work together, as threads of one process."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from joint_members import folders, options_of, require_alike, slow, together

import fluid
from fluid import Device, FluidExecutor, InvalidFieldError, Requires, SweepFailedError, SweepResult, TrialListener
from fluid.search import BOHB, AskTell, Plateau, Target, TrialPlateau, choice, uniform, when
from fluid.search.bohb import BohbSearcher
from fluid.search.searchers import SearchOutcome
from fluid.search.suggestion import ELSEWHERE

pytestmark = pytest.mark.slow

SPACE = {"x": uniform(0.0, 1.0)}
#: Of the trials of one round of Hyperband's brackets up to 9 iterations.
FIRST_RUNGS = (1,) * 9 + (3,) * 5 + (9,) * 3


def slower(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    """Another code: its losses are above 900."""
    for metrics, count in slow(config, state):
        yield {**metrics, "loss": 1000.0 - metrics["loss"]}, count


class Heard(TrialListener):
    """What trials reported, and how they ended, in order."""

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []

    def on_result(self, result: Any) -> None:
        self.found.append((result.trial_id, result.iteration))

    def on_end(self, trial_id: str, state: str, failure: Any) -> None:
        self.found.append((trial_id, state))


def run(shared: Path, *, after: float = 0.0, executor: dict[str, Any] | None = None, **given: Any) -> Callable[[], Any]:
    """A member that runs one sweep, so many seconds later than others."""

    def program() -> SweepResult:
        time.sleep(after)
        options = {"space": SPACE, "metric": "loss", "mode": "min", "budget": 9, "samples": 9, **given}
        with FluidExecutor(**options_of(shared, **(executor or {}))) as made:
            return fluid.run(options.pop("trainable", slow), options.pop("space"), executor=made, **options)

    return program


def outcome(result: SweepResult) -> dict[str, Any]:
    assert isinstance(result, SweepResult), result
    return {
        trial.trial_id: (trial.state, trial.config, [(one.iteration, one.metrics["loss"]) for one in trial.results])
        for trial in result.trials
    }


def alike(shared: Path, found: list[Any]) -> dict[str, Any]:
    """Checks that all members returned the same, which is in their folders, too."""
    first = outcome(found[0])
    assert [outcome(one) for one in found] == [first] * len(found)
    written = require_alike(shared, len(found))
    assert written == {name: (state, tuple(results)) for name, (state, _, results) in first.items()}
    return first


@pytest.mark.parametrize("algorithm", ["asha", "sha", "hyperband", "random"])
def test_members_come_to_the_same(tmp_path: Path, algorithm: str) -> None:
    shared = tmp_path / "shared"
    samples = None if algorithm == "hyperband" else 9
    found = alike(shared, together(*[run(shared, algorithm=algorithm, samples=samples)] * 3))
    assert len(found) == (17 if samples is None else 9)
    if algorithm in ("sha", "random"):  # What follows does not depend on the order.
        with FluidExecutor("local", 1, run_dir=tmp_path / "alone", verbose=0) as executor:
            alone = fluid.run(
                slow, SPACE, metric="loss", mode="min", budget=9, samples=9, algorithm=algorithm, executor=executor
            )
        assert found == outcome(alone)


def test_a_grid_is_done_once(tmp_path: Path) -> None:
    shared, space = tmp_path / "shared", {"x": choice([0.1, 0.2, 0.3]), "y": choice([1, 2])}
    found = alike(shared, together(*[run(shared, algorithm="grid", samples=None, budget=2, space=space)] * 2))
    configs = [tuple(config.values()) for _, config, _ in found.values()]
    assert sorted(configs) == sorted(itertools.product([0.1, 0.2, 0.3], [1, 2]))


@pytest.mark.parametrize("after", [0.7, 4.0])
def test_a_late_member_comes_to_the_same(tmp_path: Path, after: float) -> None:
    """The second one begins while the first one is at it, or when all is done."""
    shared = tmp_path / "shared"
    alike(shared, together(run(shared, samples=12), run(shared, samples=12, after=after)))


@pytest.mark.parametrize(
    "stop", [Target(0.3), Plateau(3, 0.01), TrialPlateau(2, min_delta=0.2)], ids=["target", "plateau", "trial"]
)
def test_a_stop_rule_ends_all_members_alike(tmp_path: Path, stop: Any) -> None:
    shared = tmp_path / "shared"
    alike(shared, together(*[run(shared, algorithm="random", samples=12, stop=stop)] * 2))


def test_callbacks_hear_all_in_one_order_and_loggers_what_their_member_ran(tmp_path: Path) -> None:
    shared, calls, logs = tmp_path / "shared", [Heard(), Heard()], [Heard(), Heard()]
    members = [
        run(shared, callbacks=[call], executor={"loggers": [log]}) for call, log in zip(calls, logs, strict=True)
    ]
    alike(shared, together(*members))
    assert calls[0].found == calls[1].found
    results = [{one for one in log.found if isinstance(one[1], int)} for log in logs]
    assert results[0].isdisjoint(results[1])
    assert results[0] | results[1] == {one for one in calls[0].found if isinstance(one[1], int)}
    for log in logs:
        told = [one for one in log.found if isinstance(one[1], int)]
        assert len(told) == len(set(told))


def test_no_more_run_at_once_than_are_to(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    alike(shared, together(*[run(shared, algorithm="random", max_concurrent=2)] * 3))
    spans = {}
    for line in (folders(shared)[0] / "results.jsonl").read_text().splitlines():
        entry = json.loads(line)
        begun, _ = spans.get(entry["trial"], (entry["at"], 0.0))
        spans[entry["trial"]] = min(begun, entry["at"] - entry["seconds"]), entry["at"]
    most = max(sum(a <= at < b for a, b in spans.values()) for at, _ in spans.values())
    assert most <= 3, "a member's clock and what it hears of others are some hundredths of a second apart"


def test_trials_that_raise_fail_everywhere(tmp_path: Path) -> None:
    def raises(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        yield {"loss": config["x"]}
        if config["x"] > 0.5:
            raise ValueError("it is too much")
        yield {"loss": 0.0}

    shared = tmp_path / "shared"
    options = {"trainable": raises, "algorithm": "random", "budget": 2, "executor": {"max_failures": 1}}
    found = alike(shared, together(*[run(shared, **options)] * 2))
    states = [(state == "FAILED", config["x"] > 0.5) for state, config, _ in found.values()]
    assert all(failed == expected for failed, expected in states) and any(failed for failed, _ in states)


def test_where_all_trials_fail_all_members_say_so(tmp_path: Path) -> None:
    def raises(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        raise ValueError("never")
        yield {}

    options = {"trainable": raises, "algorithm": "random", "samples": 3, "executor": {"max_failures": 0}}
    found = together(*[run(tmp_path / "shared", **options)] * 2)
    assert [type(error) for error in found] == [SweepFailedError] * 2 and "never" in str(found[1])


def test_out_of_memory_counts_as_the_worst_in_all(tmp_path: Path) -> None:
    def hungry(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        for iteration in range(1, 10):
            if config["x"] > 0.8 and iteration == 1:
                raise MemoryError("CUDA out of memory")
            yield {"loss": config["x"] + 1.0 / iteration}

    shared = tmp_path / "shared"
    options = {"trainable": hungry, "on_oom": "worst", "executor": {"max_failures": 0}}
    found = together(*[run(shared, **options)] * 2)
    assert outcome(found[0]) == outcome(found[1])
    require_alike(shared, 2)


def test_each_ends_by_its_own_time_budget_and_others_go_on(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    options = {"algorithm": "random", "samples": 8, "budget": 80}
    short, whole = together(run(shared, time_budget_s=1.5, **options), run(shared, **options))
    assert short.state == "UNFINISHED" and whole.state == "DONE"
    assert [len(trial.results) for trial in whole.trials] == [80] * 8
    assert sum("iteration" in line for line in (folders(shared)[0] / "results.jsonl").read_text().splitlines())


def test_all_leave_by_time_and_the_same_call_goes_on(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    options = {"samples": 48, "budget": 27}
    first = together(*[run(shared, time_budget_s=1.0, **options)] * 2)
    assert [result.state for result in first] == ["UNFINISHED"] * 2
    found = together(*[run(shared, **options)] * 2)
    assert outcome(found[0]) == outcome(found[1]) and len(found[0].trials) == 48
    assert [result.state for result in found] == ["DONE"] * 2


def test_sweeps_one_after_the_other(tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def program(after: float = 0.0) -> Any:
        time.sleep(after)
        with FluidExecutor(**options_of(shared)) as executor:
            options = {"metric": "loss", "mode": "min", "budget": 3, "samples": 6, "executor": executor, "name": "a"}
            return [outcome(fluid.run(slow, SPACE, **options)) for _ in range(2)]

    found = together(program, program, lambda: program(1.5))
    assert found == [found[0]] * 3
    assert [next(iter(one)) for one in found[0]] == ["a-00000", "a-2-00000"]
    require_alike(shared, 3)


def test_an_executor_that_is_used_further_lets_go_of_the_trials(tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def stays() -> None:
        with FluidExecutor(**options_of(shared)) as executor:
            options = {"metric": "loss", "mode": "min", "budget": 27, "samples": 6, "algorithm": "random"}
            fluid.run(slow, SPACE, executor=executor, time_budget_s=1.0, **options)
            begun.append(time.monotonic())
            while not ended and time.monotonic() < begun[0] + 30:
                time.sleep(0.05)

    def other() -> Any:
        result = run(shared, budget=27, samples=6, algorithm="random")()
        ended.append(time.monotonic())
        return result

    begun: list[float] = []
    ended: list[float] = []
    none, found = together(stays, other)
    assert none is None and [len(trial.results) for trial in found.trials] == [27] * 6
    assert ended[0] < begun[0] + 25


def test_two_devices_each(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    alike(shared, together(*[run(shared, samples=20, executor={"devices": 2})] * 2))


def test_only_who_has_the_devices_runs_trials(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    options = {"requires": Requires(tags=("big",), wait=True), "samples": 6, "budget": 3}
    plain, tagged = ({"devices": [Device(0, "cpu", tags=tags)]} for tags in ((), ("big",)))
    alike(shared, together(run(shared, executor=plain, **options), run(shared, executor=tagged, **options)))


# -- wrong use -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"space": {"x": uniform(0.0, 2.0)}}, r"space\['x'\]: .*\"high\": 1.0.*; this call says .*\"high\": 2.0"),
        ({"space": {"x": uniform(0.0, 1.0), "y": 1}}, "names in space: x; this call says x, y"),
        ({"seed": 1}, "seed: 0; this call says 1"),
        ({"points": [{"x": 0.5}]}, "points"),
        (
            {"trainable": slower, "name": "slow-asha"},
            r"has other code: slow, slower\. Give a fresh run_dir; or code='new'",
        ),
        ({"algorithm": "random", "name": "slow-asha"}, "algorithm: asha; this call says random"),
        ({"budget": 3}, "budget: 9; this call says 3"),
        ({"samples": 10}, "samples: 9; this call says 10"),
        ({"mode": "max"}, r"metric: loss \(min\); this call says loss \(max\)"),
        ({"eta": 2}, "eta"),
        ({"stop": Target(0.1)}, "stop"),
    ],
)
def test_another_call_is_refused_and_the_others_go_on(tmp_path: Path, other: dict[str, Any], named: str) -> None:
    shared = tmp_path / "shared"
    first, second = together(run(shared), run(shared, after=0.6, **other))
    assert isinstance(second, InvalidFieldError)
    with pytest.raises(InvalidFieldError, match=named):
        raise second
    assert len(first.trials) == 9 and first.state == "DONE"


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"algorithm": "grid", "space": {"x": [1.0, 2.0]}}, {"space": {"x": [1.0, 3.0]}}, r"space\['x'\]"),
        ({"points": [{"x": 0.5}, {"x": 0.6}]}, {"points": [{"x": 0.5}, {"x": 0.7}]}, "points"),
        ({"algorithm": "tpe", "min_budget": 30, "space": {**SPACE, "c": 1}}, {"space": {**SPACE, "c": 2}}, "'c'"),
        (
            {"space": {**SPACE, "k": [1, 2], "z": when("k", 1, 3)}},
            {"space": {**SPACE, "k": [1, 2], "z": when("k", 2, 3)}},
            r"space\['z'\] depends on k",
        ),
    ],
)
def test_what_begins_alike_and_goes_on_otherwise_is_refused(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], named: str
) -> None:
    pytest.importorskip("optuna")
    options = {"algorithm": "random", "samples": None if "grid" in one.values() else 2, "budget": 30, **one}
    shared = tmp_path / "shared"
    first, second = together(run(shared, **options), run(shared, after=0.5, **{**options, **other}))
    with pytest.raises(InvalidFieldError, match=named):
        raise second
    assert [trial.state for trial in first.trials] == ["DONE"] * 2


def test_other_code_runs_if_that_is_said_and_is_noted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    options: dict[str, Any] = {"name": "both", "code": "new", "samples": 6, "budget": 20, "algorithm": "random"}
    found = together(run(shared, **options), run(shared, trainable=slower, after=0.3, **options))
    assert [one.notes for one in found] == [found[0].notes] * 2
    assert len(found[0].notes) == 1 and found[0].notes[0].endswith("ran other code than the first one: slow, slower.")
    assert found[0].notes[0] in fluid.load(shared).notes
    losses = {trial.results[-1].metrics["loss"] > 900.0 for trial in found[0].trials}
    assert losses == {True, False}


def test_new_code_needs_other_drivers(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"code.*resume=True"):
        fluid.run(slow, SPACE, metric="loss", mode="min", samples=1, run_dir=tmp_path / "alone", code="new")


@pytest.mark.parametrize("where", ["join", "output"])
@pytest.mark.parametrize("wrong", [{"seed": None}, {"resume": True}])
def test_what_cannot_be_with_others_is_refused(tmp_path: Path, where: str, wrong: dict[str, Any]) -> None:
    shared = tmp_path / "shared"
    joined = (
        {"run_dir": shared, "join": True} if where == "join" else {"output": fluid.Output(run_dir=shared, join=True)}
    )
    with pytest.raises(InvalidFieldError, match="join=True"):
        fluid.run(slow, SPACE, metric="loss", mode="min", samples=1, **joined, **wrong)
    assert not shared.exists()


def test_configs_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    searcher = AskTell(lambda: {"x": {1.0}}, lambda config, value: None)
    (error,) = together(run(tmp_path / "shared", searcher=searcher, space=None, algorithm="full"))
    assert isinstance(error, InvalidFieldError) and "JSON" in str(error)


# -- searchers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["full", "asha"])
def test_each_searcher_is_told_of_its_own(tmp_path: Path, algorithm: str) -> None:
    shared = tmp_path / "shared"
    asked: list[list[Any]] = [[], []]
    told: list[list[Any]] = [[], []]

    def searcher(place: int) -> AskTell:
        numbers = itertools.count()

        def ask() -> dict[str, Any]:
            asked[place].append({"x": place + next(numbers) / 100, "pair": (1, 2)})
            return asked[place][-1]

        return AskTell(ask, lambda config, value: told[place].append(config), tell_failed=told[place].append)

    members = [run(shared, searcher=searcher(place), algorithm=algorithm, space=None, budget=3) for place in (0, 1)]
    found = alike(shared, together(*members))
    assert len(found) == 9
    for mine, heard in zip(asked, told, strict=True):
        assert sorted(mine, key=str) == sorted(heard, key=str), "also of what never began"


def test_tpe_stops_the_same_trials_in_all_drivers(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    options = {"algorithm": "tpe", "budget": 9, "samples": 12}
    found = alike(tmp_path / "shared", together(*[run(tmp_path / "shared", **options)] * 2))
    assert len(found) == 12 and {len(done) for _, _, done in found.values()} >= {1, 3, 9}


def test_bohb_stops_the_same_trials_in_all_drivers_and_learns_from_the_others(tmp_path: Path) -> None:
    learnt = []
    usual = BohbSearcher.observe

    def observe(self: BohbSearcher, outcome: SearchOutcome) -> None:
        if outcome.token == ELSEWHERE:
            learnt.append((id(self), outcome.config["x"], outcome.budget))
        usual(self, outcome)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BohbSearcher, "observe", observe)
        options = {"algorithm": BOHB(random_fraction=0.1), "budget": 9, "samples": 17}
        found = alike(tmp_path / "shared", together(*[run(tmp_path / "shared", **options)] * 2))
    reached = [len(done) for _, _, done in found.values()]
    assert sorted(reached[:9]) == [1] * 6 + [3] * 2 + [9] and reached[14:] == [9] * 3
    assert len({config["x"] for _, config, _ in found.values()}) == 17
    in_all = sum(
        sum(first <= rung <= came for rung in (1, 3, 9)) for first, came in zip(FIRST_RUNGS, reached, strict=True)
    )
    assert len(set(learnt)) == len(learnt) == in_all, "each rung of what the other one suggested"


def test_brackets_one_by_one_are_refused(tmp_path: Path) -> None:
    (found,) = together(run(tmp_path / "shared", algorithm=BOHB(synchronous=True)))
    assert isinstance(found, InvalidFieldError)
    assert "synchronous=True: begins a bracket when the one before has ended" in str(found)


def test_tpe_learns_from_the_others_and_suggests_others(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    from fluid.search.study_sampler import StudySampler

    shared, learnt = tmp_path / "shared", []
    usual = StudySampler.hear

    def hear(self: StudySampler, token: int, config: Any, values: Any, *rest: Any) -> None:
        if token == ELSEWHERE:
            learnt.append((id(self), config["a"]["x"], tuple(values)))
        usual(self, token, config, values, *rest)

    space = {"a": {"x": uniform(0.0, 1.0)}, "kind": choice(["p", "q"]), "c": 3}

    def curve(config: dict[str, Any]) -> Iterator[dict[str, float]]:
        time.sleep(0.02)
        yield {"loss": config["a"]["x"]}

    points = [{"a": {"x": 0.5}}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StudySampler, "hear", hear)
        options = {"trainable": curve, "algorithm": "tpe", "space": space, "budget": 1, "samples": 20}
        found = alike(shared, together(*[run(shared, points=points, **options)] * 2))
    values = [config["a"]["x"] for _, config, _ in found.values()]
    assert len(set(values)) == 20 and values.count(0.5) == 1
    assert 15 <= len(set(learnt)) == len(learnt) <= 20, "each from all that the other one suggested"
