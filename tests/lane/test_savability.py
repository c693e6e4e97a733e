"""A lane's trials whose state cannot always be saved."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest

from fluid.engine.events import IterationDone, LaneReady, SavabilityChanged, TrialPaused, TrialSaved, TrialStarted


def train(config: dict[str, Any], state: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Counts; its state cannot be pickled from an iteration on."""
    state = state or {"count": 0}
    while True:
        state["count"] += 1
        if state["count"] == config.get("lock_at"):
            state["lock"] = threading.Lock()
        yield {"count": state["count"]}, state


class Reports:
    """Reports a state every few iterations, as a wrapper of a function for Ray Tune does."""

    fluid_reports_states = True

    def setup(self, config: dict[str, Any]) -> None:
        self.every, self.count = config["every"], 0
        self.reported: int | None = None

    def step(self) -> dict[str, Any]:
        self.count += 1
        if self.count % self.every == 0:
            self.reported = self.count
        return {"count": self.count}

    def unsaved_iterations(self) -> int | None:
        return None if self.reported is None else self.count - self.reported

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count").write_text(str(self.reported), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self.count = self.reported = int(Path(folder, "count").read_text(encoding="utf-8"))


@pytest.fixture
def make_lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Callable[..., Any]:
    server = make_server()

    def make(lane_id: int = 0, **options: Any) -> Any:
        lane = fork(server, lane_id, **options)
        lane.receive(LaneReady)
        return lane

    return make


def counts(lane: Any, number: int) -> list[int]:
    return [lane.receive(IterationDone).metrics["count"] for _ in range(number)]


def test_a_function_with_a_state_goes_on_in_another_lane(make_lane: Callable[..., Any]) -> None:
    first, second = make_lane(0), make_lane(1)
    first.start("a", train, {}, 3)
    assert counts(first, 3) == [1, 2, 3]
    first.send(to.save("a", True))
    saved = first.receive(TrialSaved)
    assert saved.dropped and saved.checkpoint.iteration == 3
    with open(Path(saved.checkpoint.path, "state", "state.pkl"), "rb") as file:
        assert pickle.load(file) == {"count": 3}
    second.start("a", train, {}, 2, saved.checkpoint)
    assert second.receive(TrialStarted).iteration == 3
    assert counts(second, 2) == [4, 5]


def test_a_state_that_cannot_be_pickled_keeps_its_trial_in_the_lane(make_lane: Callable[..., Any]) -> None:
    lane = make_lane()
    lane.start("a", train, {"lock_at": 2}, 3)
    assert counts(lane, 3) == [1, 2, 3]
    lane.send(to.save("a", True), to.run("a", 1))
    told = lane.receive(SavabilityChanged)
    assert (told.trial_id, told.can_save, told.refuses) == ("a", False, True)
    assert told.reason.startswith("state['lock'] cannot be pickled")
    assert counts(lane, 1) == [4], "it is there still"


def test_an_automatic_save_tells_once_that_a_state_cannot_be_pickled(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(save_after=0.0, save_ratio=0.0)
    lane.start("a", train, {"lock_at": 2}, 9)
    assert lane.receive(TrialSaved).checkpoint.iteration == 1
    told = lane.receive(SavabilityChanged)
    assert not told.can_save and not told.refuses and "lock" in told.reason
    assert counts(lane, 9) == list(range(1, 10))
    lane.send(to.pause("a"))
    lane.receive(TrialPaused)
    assert sum(isinstance(message, SavabilityChanged) for message in lane.messages) == 0


def test_a_trial_is_saved_in_the_newest_state_that_it_reported(make_lane: Callable[..., Any]) -> None:
    first, second = make_lane(0, save_after=0.0, save_ratio=0.0), make_lane(1)
    first.start("a", Reports, {"every": 2}, 5)
    assert [first.receive(SavabilityChanged).can_save for _ in range(2)] == [False, True]
    assert [first.receive(TrialSaved).checkpoint.iteration for _ in range(2)] == [2, 4], "each state once"
    first.send(to.save("a", True))
    saved = first.receive(TrialSaved)
    assert saved.dropped and saved.checkpoint.iteration == 4
    second.start("a", Reports, {"every": 2}, 2, saved.checkpoint)
    assert second.receive(SavabilityChanged).can_save
    assert second.receive(TrialStarted).iteration == 4
    assert counts(second, 2) == [5, 6]


def test_a_trial_that_has_reported_no_state_cannot_be_saved(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(save_after=0.0, save_ratio=0.0)
    lane.start("a", Reports, {"every": 9}, 2)
    assert counts(lane, 2) == [1, 2]
    lane.send(to.save("a", True))
    told = [lane.receive(SavabilityChanged) for _ in range(2)]
    assert [(one.can_save, one.refuses) for one in told] == [(False, False), (False, True)]
