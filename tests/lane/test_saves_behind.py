"""A trial trains on while the lane writes its checkpoint."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest

from fluid._clock import nap
from fluid.engine.events import Checkpoint, IterationDone, LaneReady, TrialEvent, TrialReleased, TrialSaved


class Counter:
    """Counts; its state is taken at once, and written once a file is there."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        return {"count": self.count, "draw": random.random()}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "count").write_text(f"{self.count} at once", encoding="utf-8")

    def fluid_begin_checkpoint(self) -> Callable[[str], None] | None:
        random.seed(1)
        count, config = self.count, self.config

        def write(folder: str) -> None:
            while not os.path.exists(config["go"]):
                nap(0.01)
            if config.get("fails"):
                raise OSError("cannot be written")
            Path(folder, "count").write_text(f"{count} behind", encoding="utf-8")

        if config.get("cannot") == "raises":
            raise MemoryError("no room for a copy")
        return None if config.get("cannot") else write

    def load_checkpoint(self, folder: str) -> None:
        self.count = int(Path(folder, "count").read_text(encoding="utf-8").split()[0])


@pytest.fixture
def lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Any:
    made = fork(make_server(), 0, save_after=0.0, save_ratio=0.0)
    made.receive(LaneReady)
    return made


def written(saved: TrialSaved) -> str:
    return Path(saved.checkpoint.path, "state/count").read_text(encoding="utf-8")


def test_it_trains_on_and_the_state_is_that_of_the_begin(lane: Any, tmp_path: Path) -> None:
    lane.start("a", Counter, {"go": str(tmp_path / "go")}, 10)
    draws = [lane.receive(IterationDone).metrics["draw"] for _ in range(9)]
    assert not any(isinstance(message, TrialSaved) for message in lane.messages), "it is being written"
    (tmp_path / "go").touch()
    first, last = lane.receive(TrialSaved), lane.receive(TrialSaved)
    assert (first.checkpoint.iteration, written(first)) == (1, "1 behind")
    # The last iteration is followed by none.
    assert (last.checkpoint.iteration, written(last)) == (10, "10 at once")
    lane.start("b", Counter, {"go": str(tmp_path / "go")}, 2, Checkpoint(1, first.checkpoint.path))
    metrics = lane.receive(IterationDone, "b").metrics
    assert metrics["count"] == 2
    assert metrics["draw"] == draws[1], "taking the state has changed no random numbers"


def test_who_asks_for_a_checkpoint_waits_for_the_one_that_is_being_written(lane: Any, tmp_path: Path) -> None:
    lane.start("a", Counter, {"go": str(tmp_path / "go")}, 10**9)
    lane.receive(IterationDone)
    lane.send(to.pause("a"), to.save("a", drop=True))
    (tmp_path / "go").touch()
    saved = lane.receive(TrialSaved)
    assert not saved.dropped and written(saved).endswith("behind")
    while not saved.dropped:
        saved = lane.receive(TrialSaved)
    last = max(each.iteration for each in lane.messages if isinstance(each, IterationDone))
    assert saved.checkpoint.iteration == last
    assert written(saved) in (f"{last} at once", f"{last} behind")  # As it may have been written just before the pause.


def test_a_trial_leaves_once_its_checkpoint_is_written(lane: Any, tmp_path: Path) -> None:
    lane.start("a", Counter, {"go": str(tmp_path / "go")}, 10**9)
    lane.receive(IterationDone)
    lane.send(to.release("a"))
    (tmp_path / "go").touch()
    told: list[type] = []
    while TrialReleased not in told:
        told.append(type(lane.receive(TrialEvent, "a")))
    assert TrialSaved in told


def test_an_error_of_writing_ends_no_trial(lane: Any, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    lane.start("a", Counter, {"go": str(tmp_path / "go"), "fails": True}, 5)
    assert [lane.receive(IterationDone).iteration for _ in range(5)] == [1, 2, 3, 4, 5]
    lane.send(to.release("a"))
    lane.receive(TrialReleased)
    assert "cannot be written" in (tmp_path / "trials/a/output.log").read_text(encoding="utf-8")


class Meanwhile(Counter):
    """Its iteration ends once another trial's checkpoint has failed, as any log tells."""

    def step(self) -> dict[str, Any]:
        run = Path(self.config["run"])
        Path(self.config["go"]).touch()
        while not any("cannot be written" in log.read_text(encoding="utf-8") for log in run.glob("*/output.log")):
            nap(0.01)
        return super().step()


def test_the_error_is_in_the_log_of_its_own_trial(lane: Any, tmp_path: Path) -> None:
    go = str(tmp_path / "go")
    lane.start("a", Counter, {"go": go, "fails": True}, 10**9)
    lane.receive(IterationDone)
    lane.start("b", Meanwhile, {"go": go, "run": str(tmp_path / "trials")}, 1)
    lane.receive(IterationDone, "b")
    assert "cannot be written" in (tmp_path / "trials/a/output.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("cannot", ["returns", "raises"])
def test_what_cannot_be_written_later_is_written_at_once(lane: Any, cannot: str) -> None:
    lane.start("a", Counter, {"go": "", "cannot": cannot}, 3)
    lane.receive(TrialSaved)
    assert [written(lane.receive(TrialSaved)) for _ in range(2)] == ["2 at once", "3 at once"]
