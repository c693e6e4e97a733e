"""Population based training by fluid.run: members are chains of trials that start from each other's states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweep_trainables import curve

import fluid
from fluid import FluidExecutor, InvalidFieldError, SweepResult, TrialResult
from fluid.search import PBT, AskTell, uniform

SPACE = {"rate": uniform(0.05, 0.9)}


def member(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    """Its error falls by its rate, and it carries with it what it has trained with."""
    error, past = state or (1.0, [])
    while True:
        error, past = error * (1.0 - config["rate"] / 10), [*past, config["rate"]]
        yield {"error": error, "past": len(past), "first": past[0]}, (error, past)


def late(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    """Has its error every third iteration only."""
    for iteration in range(1 + (state or 0), 100):
        yield {"at": iteration, **({} if iteration % 3 else {"error": config["rate"] / iteration})}, iteration


def diverging(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    """Is NaN for good where its rate is large."""
    error, iteration = state or (1.0, 0)
    while True:
        error, iteration = (math.nan if config["rate"] > 0.6 else error * 0.9), iteration + 1
        yield {"error": error}, (error, iteration)


def failing(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    for iteration in range(1 + (state or 0), 100):
        if config["rate"] > 0.5 and iteration > 4:
            raise ValueError("too fast")
        yield {"error": config["rate"] / iteration}, iteration


def short(config: dict[str, Any], state: Any = None) -> Iterator[Any]:
    """Ends by itself after 7 iterations."""
    for iteration in range(1 + (state or 0), 8):
        yield {"error": config["rate"] / iteration}, iteration


def sweep(executor: FluidExecutor, trainable: Any = member, **options: Any) -> SweepResult:
    given = {"metric": "error", "algorithm": "pbt", "samples": 6, "budget": 12, "executor": executor, **options}
    return fluid.run(trainable, SPACE, **given)


def chains(result: SweepResult) -> dict[str, list[TrialResult]]:
    """The trials by their member, in the order in which they followed."""
    found: dict[str, list[TrialResult]] = {}
    for trial in result.trials:
        found.setdefault(trial.trial_id.rpartition("-")[2].partition(".")[0], []).append(trial)
    return found


def iterations(trial: TrialResult) -> list[int]:
    return [one.iteration for one in trial.results]


@pytest.mark.parametrize("synchronous", [False, True])
def test_losers_go_on_from_the_states_of_winners(executor: FluidExecutor, synchronous: bool) -> None:
    result = sweep(executor, algorithm=PBT(ready=3, synchronous=synchronous), name=f"chain-{synchronous}")
    members = chains(result)
    assert len(members) == 6 and result.state == "DONE" and len(result.trials) > 6
    for number, chain in members.items():
        suffixes = ["", *(f".{count}" for count in range(1, len(chain)))]
        assert [trial.trial_id.partition(number)[2] for trial in chain] == suffixes
        assert [trial.state for trial in chain] == ["STOPPED"] * (len(chain) - 1) + ["DONE"]
        assert iterations(chain[0])[0] == 1
        # One whose parent had come to the budget meanwhile has nothing left to do.
        assert chain[-1].iteration == 12 or not (synchronous or chain[-1].results)
        for trial in filter(iterations, chain):
            assert iterations(trial) == list(range(iterations(trial)[0], trial.iteration + 1))
            # The state came along: it has been trained as often as the iterations are numbered.
            assert [one.metrics["past"] for one in trial.results] == iterations(trial)
    firsts = {chain[0].config["rate"] for chain in members.values()}
    assert all(one.metrics["first"] in firsts for trial in result.trials for one in trial.results)
    if synchronous:
        assert {iterations(trial)[0] % 3 for trial in result.trials} == {1}
        assert all(trial.results for trial in result.trials)
    errors = [one.metrics["error"] for trial in result.trials for one in trial.results]
    assert result.best.value == min(errors)


def test_the_record_names_the_parent(executor: FluidExecutor) -> None:
    result = sweep(executor, algorithm=PBT(ready=3, synchronous=True), name="lineage")
    by_id = {trial.trial_id: trial for trial in result.trials}
    handle = next(one for one in executor.handles if one.name == "lineage")
    stored = {trial.trial_id: trial.start for trial in handle.trials}
    forks = [trial for trial in result.trials if "." in trial.trial_id]
    assert forks and stored == {trial.trial_id: trial.start for trial in result.trials}
    for trial in forks:
        assert trial.start is not None
        parent, first = by_id[trial.start.parent], iterations(trial)[0]
        assert trial.start.at == first - 1 and first - 1 in iterations(parent)
        states = {one.iteration: one.metrics["error"] for one in parent.results}
        assert trial.results[0].metrics["error"] == pytest.approx(states[first - 1] * (1.0 - trial.config["rate"] / 10))


def test_synchronous_members_do_the_same_each_time(executor: FluidExecutor) -> None:
    def done(name: str, seed: int) -> list[Any]:
        result = sweep(executor, algorithm=PBT(ready=2, synchronous=True), name=name, seed=seed)
        return [(trial.trial_id.removeprefix(name), trial.config, iterations(trial)) for trial in result.trials]

    first = done("same", 5)
    assert done("same-again", 5) == first and done("other", 6) != first


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_member_that_fails_leaves_the_population(executor: FluidExecutor, synchronous: bool) -> None:
    result = sweep(executor, failing, algorithm=PBT(ready=3, resample=0, synchronous=synchronous), samples=8)
    assert result.failures and result.state == "DONE"
    assert all("too fast" in failure.message for failure in result.failures.values())
    ends = [chain[-1].state for chain in chains(result).values()]
    assert ends.count("FAILED") == len(result.failures) and ends.count("DONE") == 8 - len(result.failures) > 0


def test_a_member_that_is_nan_exploits_another(executor: FluidExecutor) -> None:
    result = sweep(executor, diverging, algorithm=PBT(ready=2, resample=0, perturb=(1.0,)))
    lost = [chain for chain in chains(result).values() if chain[0].config["rate"] > 0.6]
    assert lost and all(len(chain) >= 2 and chain[0].iteration <= 4 for chain in lost)
    assert all(not math.isnan(chain[-1].metrics["error"]) for chain in lost)


def test_a_metric_that_comes_late_is_awaited(executor: FluidExecutor) -> None:
    result = sweep(executor, late, algorithm=PBT(ready=2))
    assert not result.failures and len(result.trials) > 6
    assert all(chain[-1].iteration == 12 or not chain[-1].results for chain in chains(result).values())


def test_members_that_end_by_themselves(executor: FluidExecutor) -> None:
    result = sweep(executor, short, algorithm=PBT(ready=2))
    assert {chain[-1].state for chain in chains(result).values()} == {"DONE"}
    assert max(trial.iteration for trial in result.trials) == 7


@pytest.mark.parametrize("synchronous", [False, True])
def test_stop_rules(executor: FluidExecutor, synchronous: bool) -> None:
    options = PBT(ready=2, synchronous=synchronous)
    result = sweep(executor, algorithm=options, stop={"error": 0.8})
    assert all(chain[-1].metrics["error"] <= 0.8 or chain[-1].iteration == 12 for chain in chains(result).values())
    assert any(trial.metrics["error"] <= 0.8 and trial.iteration < 12 for trial in result.trials)
    ended = sweep(executor, algorithm=options, stop=fluid.search.Target(0.9))
    assert ended.best.value <= 0.9 and max(trial.iteration for trial in ended.trials) < 12


def test_a_population_by_default(executor: FluidExecutor) -> None:
    result = sweep(executor, samples=None, budget=1, time_budget_s=1000)
    assert len(result.trials) == 16
    assert len(sweep(executor, samples=1, budget=3).trials) == 1


def test_the_state_of_a_class_comes_along(executor: FluidExecutor) -> None:
    class Counter:
        def setup(self, config: dict[str, Any]) -> None:
            self.config, self.count = config, 0

        def step(self) -> dict[str, Any]:
            self.count += 1
            return {"error": self.config["rate"], "count": self.count}

        def save_checkpoint(self, folder: str) -> None:
            (Path(folder) / "count").write_text(str(self.count))

        def load_checkpoint(self, folder: str) -> None:
            self.count = int((Path(folder) / "count").read_text())

    result = sweep(executor, Counter, algorithm=PBT(ready=2))
    assert len(result.trials) > 6
    assert all(one.metrics["count"] == one.iteration for trial in result.trials for one in trial.results)


def test_the_shape_is_that_of_trials_that_all_run_to_the_budget(executor: FluidExecutor) -> None:
    sweep(executor, name="shaped")
    search = next(handle.search for handle in executor.handles if handle.name == "shaped")
    assert search is not None and search.shape is not None and search.trials == 6
    assert (search.shape.algorithm, search.shape.rungs, search.shape.replaces) == ("full", (12,), True)


def refused(**options: Any) -> InvalidFieldError:
    given = {"trainable": member, "space": SPACE, "metric": "error", "algorithm": "pbt", **options}
    with pytest.raises(InvalidFieldError) as caught:
        fluid.run(given.pop("trainable"), given.pop("space"), **given)
    return caught.value


def test_a_function_that_reports_no_state_is_refused_at_the_first_exploit(executor: FluidExecutor) -> None:
    def silent(config: dict[str, Any]) -> None:
        for iteration in range(1, 100):
            fluid.report({"error": config["rate"] / iteration})

    with pytest.raises(InvalidFieldError, match=r"trainable=.*cannot be trained by 'pbt': .*cannot be saved"):
        sweep(executor, silent)


def test_drivers_do_not_share_a_population(tmp_path: Path) -> None:
    match = r"join=True: cannot be with algorithm='pbt'.*one driver has all"
    with (
        FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", join=True, verbose=0),
        pytest.raises(InvalidFieldError, match=match),
    ):
        fluid.run(member, SPACE, metric="error", algorithm="pbt")


def _function(trial: Any) -> None:
    trial.suggest_float("rate", 0.1, 0.5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"trainable": curve},
            ("trainable=", "cannot be saved", "give it a parameter state, and yield"),
        ),
        ({"space": _function}, ("space=", "must be a dict of names and values for 'pbt'")),
        ({"space": {"rate": 0.1}}, ("space=", "must have values to choose for 'pbt'", "uniform(0, 1)")),
        ({"metric": ("error", "past"), "mode": ("min", "min")}, ("metric=", "'pbt' compares trials by one metric")),
        ({"max_concurrent": 2}, ("max_concurrent=2", "give fewer samples")),
        ({"reuse": True}, ("reuse=True", "cannot be with algorithm='pbt'")),
        ({"searcher": AskTell(dict, print)}, ("algorithm='pbt'", "must be one of asha, full")),
        ({"algorithm": "population"}, ("algorithm='population'", "did you mean 'pbt'?")),
        ({"algorithm": PBT}, ("algorithm=",)),
    ],
)
def test_refusals(options: dict[str, Any], words: tuple[str, ...]) -> None:
    text = str(refused(**options))
    assert all(word in text for word in words), text
