"""What is submitted is what it was: trainables and configs may be changed by their owner afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor, InvalidFieldError, Trial, TrialGroup
from fluid.search import AskTell, uniform
from fluid.trialgroup import Submission


class Scaled:
    """A trainable with an attribute, of which it is counted how often it was pickled here, and unpickled in lanes."""

    def __init__(self, folder: Path, scale: int = 1) -> None:
        self.folder, self.scale, self.pickled = folder, scale, 0

    def __reduce__(self) -> tuple[Any, ...]:
        self.pickled += 1
        return _scaled, (self.folder, self.scale)

    def __call__(self, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for epoch in range(1, 30):
            yield {"loss": self.scale * config.get("x", 1) / epoch}

    @property
    def unpickled(self) -> int:
        """How often a lane has unpickled it."""
        made = self.folder / "made"
        return made.read_text().count("\n") if made.is_file() else 0


def _scaled(folder: Path, scale: int) -> Scaled:
    with (folder / "made").open("a") as made:
        made.write(f"{scale}\n")
    return Scaled(folder, scale)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FluidExecutor]:
    with FluidExecutor("local", 1, run_dir=tmp_path_factory.mktemp("fluid"), verbose=0) as made:
        yield made


def losses(executor: FluidExecutor, *trials: Trial) -> list[Any]:
    handle = executor.submit_trialgroup(TrialGroup(trials))
    return [result.metrics["loss"] for result in handle.results()]


# -- trainables


@pytest.mark.slow
def test_each_submission_has_the_trainable_as_it_is_then(executor: FluidExecutor, tmp_path: Path) -> None:
    trainable = Scaled(tmp_path)
    assert losses(executor, Trial(trainable), Trial(trainable)) == [1.0, 1.0]
    trainable.scale = 2
    assert losses(executor, Trial(trainable)) == [2.0]
    handle = executor.submit_trialgroup(TrialGroup([Trial(trainable)]))
    trainable.scale = 3
    handle.add(Trial(trainable), Trial(trainable))
    assert [result.metrics["loss"] for result in handle.results()] == [2.0, 3.0, 3.0]


def test_globals_count_as_they_are_at_the_submission(executor: FluidExecutor) -> None:
    source = "SCALE = 1\ndef train(config):\n    yield {'loss': SCALE}\n"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(source, namespace)
    assert losses(executor, Trial(namespace["train"])) == [1]
    namespace["SCALE"] = 2
    assert losses(executor, Trial(namespace["train"])) == [2]


@pytest.mark.slow
def test_a_trainable_is_pickled_once_per_call_and_sent_to_a_lane_once(executor: FluidExecutor, tmp_path: Path) -> None:
    trainable = Scaled(tmp_path)
    losses(executor, *(Trial(trainable, isolation="lane") for _ in range(5)))
    assert (trainable.pickled, trainable.unpickled) == (1, 1)
    losses(executor, *(Trial(trainable, isolation="lane") for _ in range(5)))
    assert (trainable.pickled, trainable.unpickled) == (2, 1), "the same bytes are the same trainable"
    trainable.scale = 2
    losses(executor, Trial(trainable, isolation="lane"))
    assert (trainable.pickled, trainable.unpickled) == (3, 2)
    losses(executor, *(Trial(trainable) for _ in range(3)))
    assert (trainable.pickled, trainable.unpickled) == (4, 5), "a process of its own unpickles its own"


@pytest.mark.parametrize("learns", [False, True])
def test_a_sweep_is_one_submission(executor: FluidExecutor, tmp_path: Path, learns: bool) -> None:
    trainable = Scaled(tmp_path)
    asked: list[float] = []

    def ask() -> dict[str, float]:
        asked.append(1.0)
        trainable.scale += 1  # After the first one, nobody sees it.
        return {"x": 1.0}

    arguments: dict[str, Any] = {"metric": "loss", "samples": 12, "budget": 9, "executor": executor}
    if learns:
        searcher = AskTell(ask, lambda config, value: None)
        result = fluid.run(trainable, {}, searcher=searcher, algorithm="full", **arguments)
        assert len(asked) == 12
    else:
        result = fluid.run(trainable, {"x": uniform(1.0, 2.0)}, **arguments)
    assert len(result.trials) == 12 and not result.failures
    assert trainable.pickled == 1
    scales = {trial.results[0].metrics["loss"] / trial.config["x"] for trial in result.trials}
    assert scales == ({2.0} if learns else {1.0})
    fluid.run(trainable, {"x": uniform(1.0, 2.0)}, **arguments)
    assert trainable.pickled == 2, "another sweep is another submission"


def test_the_groups_of_one_submission_share_a_trainable(executor: FluidExecutor, tmp_path: Path) -> None:
    trainable, submission = Scaled(tmp_path), Submission()
    first = executor.submit_trialgroup(TrialGroup([Trial(trainable)], submission=submission))
    trainable.scale = 2
    second = executor.submit_trialgroup(TrialGroup([Trial(trainable)], submission=submission))
    first.add(Trial(trainable))
    found = [result.metrics["loss"] for handle in (first, second) for result in handle.results()]
    assert found == [1.0, 1.0, 1.0] and trainable.pickled == 1


def test_what_is_no_submission_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="submission='sweep': must be a Submission or None"):
        TrialGroup(submission="sweep")  # type: ignore[arg-type]


# -- configs


def test_a_config_that_its_owner_changes_later(executor: FluidExecutor, tmp_path: Path) -> None:
    def train(config: Any) -> Any:
        yield {"loss": config["lr"], "deep": config["deep"]["a"], "size": len(config["sizes"])}

    config: dict[str, Any] = {"deep": {"a": 1}, "sizes": [1]}
    trials = []
    for lr in (1, 2, 3):
        config["lr"], config["deep"]["a"] = lr, 10 * lr
        trials.append(Trial(train, config, trial_id=f"lr {lr}"))
        config["sizes"].append(lr)
    handle = executor.submit_trialgroup(TrialGroup(trials, search=fluid.Search("loss", "min")))
    config["lr"], config["deep"]["a"] = 0, 0
    results = {result.trial_id: result for result in handle.results()}
    expected = {
        "lr 1": {"deep": {"a": 10}, "sizes": [1], "lr": 1},
        "lr 2": {"deep": {"a": 20}, "sizes": [1, 1], "lr": 2},
        "lr 3": {"deep": {"a": 30}, "sizes": [1, 1, 2], "lr": 3},
    }
    assert {trial_id: result.config for trial_id, result in results.items()} == expected
    ran = {
        trial_id: (one.metrics["loss"], one.metrics["deep"], one.metrics["size"]) for trial_id, one in results.items()
    }
    assert ran == {"lr 1": (1, 10, 1), "lr 2": (2, 20, 2), "lr 3": (3, 30, 3)}
    assert {trial.trial_id: trial.config for trial in handle.trials} == expected
    assert handle.best().config == expected["lr 1"]
    table = handle.dataframe()
    assert list(table["config/lr"]) == [1, 2, 3]


def test_what_a_searcher_does_with_its_config_later_changes_nothing(executor: FluidExecutor, tmp_path: Path) -> None:
    given: list[dict[str, Any]] = [{"x": 1.0, "layers": [1, 2]}, {"x": 2.0, "layers": [3]}]
    waiting = list(given)

    def tell(config: dict[str, Any], value: float) -> None:
        config["layers"].append(99)

    searcher = AskTell(lambda: waiting.pop(0) if waiting else None, tell)
    result = fluid.run(
        Scaled(tmp_path), {}, metric="loss", searcher=searcher, algorithm="full", budget=1, executor=executor
    )
    assert given[0]["layers"] == [1, 2, 99]
    assert [trial.config["layers"] for trial in result.trials] == [[1, 2], [3]]
    assert result.best.config == {"x": 1.0, "layers": [1, 2]}


def test_a_config_that_is_shown_is_what_it_was(executor: FluidExecutor, tmp_path: Path) -> None:
    shown: dict[str, Any] = {"lr": 0.5, "layers": [1]}
    trainable = Scaled(tmp_path)
    handle = executor.submit_trialgroup(TrialGroup([Trial(trainable, trial_id="s", shown=fluid.Shown("seven", shown))]))
    shown["lr"] = 9.0
    assert handle.wait(60)
    assert handle.trials[0].config == {"lr": 0.5, "layers": [1]}
    handle.show_config("s", shown)
    shown["layers"].append(2)
    assert handle.trials[0].config == {"lr": 9.0, "layers": [1]}
