"""What a pool asks the stores of hosts, and what it makes of their answers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from fluid.backends.base import CheckpointSource, Launcher
from fluid.backends.lanes.checkpoints import CheckpointPlaces
from fluid.backends.lanes.connections import LaneConnections
from fluid.backends.lanes.registry import HostPayloads, Registry
from fluid.elastic.messages import Left
from fluid.engine.commands import ForkSaved, Persist
from fluid.engine.events import Checkpoint, Failure, TrialFailed, TrialForked, TrialNotKept, TrialReleased, TrialSaved
from fluid.keeping import Kept
from fluid.lane.protocol import CheckpointForked, CheckpointPersisted, FromMember
from fluid.trainables.payload import payload_of

PATH = "/dev/shm/fluid-0123456789abcdef-localhost/a/00000003-0-1"


class Stores:
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def forget(self, trial_id: str, *, keep_newest: bool) -> None:
        self.asked.append(("forget", trial_id, keep_newest))

    def persist(self, host: str, trial_id: str, path: str, *, keep: bool) -> None:
        self.asked.append(("persist", host, trial_id, path, keep))

    def fork(self, host: str, child: str, parent: str, path: str) -> None:
        self.asked.append(("fork", host, child, parent, path))


class Places:
    """Places of checkpoints, with two lanes that were told to set up a trial."""

    def __init__(self) -> None:
        self.stores = Stores()
        launcher = cast(
            Launcher,
            SimpleNamespace(stores=self.stores, checkpoints_at=lambda host: CheckpointSource(), drop=lambda name: None),
        )
        self.lanes = LaneConnections(launcher)
        self.registry = Registry(lambda modules: None, HostPayloads(launcher))
        self.places = CheckpointPlaces(launcher, self.lanes, self.registry)
        self.first, self.second = self.lanes.add(0), self.lanes.add(1)


@pytest.fixture
def here() -> Any:
    made = Places()
    yield made
    made.lanes.close()


LEAVES: list[Callable[[str], Any]] = [
    lambda name: TrialReleased(0.0, name, 0),
    lambda name: TrialSaved(0.0, name, 0, Checkpoint(3, PATH, in_memory=True), dropped=True, seconds=0.1),
    lambda name: TrialFailed(0.0, name, 0, Failure("error", "no")),
    lambda name: FromMember(0.0, name, 1, Left()),
]


@pytest.mark.parametrize("leaves", LEAVES)
def test_what_lanes_may_still_save_of_a_forgotten_trial_is_deleted_after_that(
    here: Places, leaves: Callable[[str], Any]
) -> None:
    for lane in (here.first, here.second):
        lane.trials |= {"a", "b"}
    here.places.forget("a", keep_newest=True)
    here.places.hear_lane(here.first, TrialSaved(0.0, "a", 0, Checkpoint(3, PATH, in_memory=True), seconds=0.1))
    here.places.hear_lane(here.first, leaves("a"))
    here.places.hear_lane(here.second, leaves("b"))
    assert here.stores.asked == [], "the second lane still has it"
    here.places.hear_lane(here.second, leaves("a"))
    assert here.stores.asked == [("forget", "a", True)]
    here.places.hear_lane(here.second, leaves("a"))
    assert len(here.stores.asked) == 1


def test_where_no_lane_has_it_that_is_at_once(here: Places) -> None:
    here.first.trials.add("b")
    here.places.forget("a", keep_newest=False)
    assert here.stores.asked == [("forget", "a", False)]


def test_a_lane_that_is_gone_saves_nothing_any_more(here: Places) -> None:
    here.first.trials.add("a")
    here.places.forget("a", keep_newest=False)
    here.lanes.remove(here.first)
    here.places.lane_is_gone(here.first)
    assert here.stores.asked == [("forget", "a", False)]


def test_at_the_end_all_is_deleted_that_was_forgotten(here: Places) -> None:
    here.first.trials.add("a")
    here.places.forget("a", keep_newest=False)
    here.places.close()
    here.places.close()
    assert here.stores.asked == [("forget", "a", False)]


def test_a_copy_is_asked_of_the_host_that_has_the_checkpoint(here: Places) -> None:
    here.places.execute(Persist("a", Checkpoint(3, PATH, host="10.0.0.7", in_memory=True), keep=True))
    assert here.stores.asked == [("persist", "10.0.0.7", "a", PATH, True)]


def test_the_engine_hears_of_copies_as_of_those_of_lanes(here: Places) -> None:
    copied = CheckpointPersisted("a", "/run/trials/a/checkpoints/00000003-0-1", "localhost", False, seconds=0.5)
    checkpoint = Checkpoint(3, copied.path)
    assert here.places.hear(copied, 7.0) == [TrialSaved(7.0, "a", None, checkpoint, seconds=0.5, copied=True)]
    kept = structs.replace(copied, keep=True, bytes=9)
    saved = TrialSaved(7.0, "a", None, checkpoint, seconds=0.5, copied=True, kept=Kept(9))
    assert here.places.hear(kept, 7.0) == [saved]
    failed = CheckpointPersisted("a", PATH, "localhost", False, problem="the disk is full")
    stays = Checkpoint(3, PATH, in_memory=True)
    assert here.places.hear(failed, 7.0) == [TrialSaved(7.0, "a", None, stays, copied=True)]
    told = TrialNotKept(7.0, "a", iteration=3, reason="the disk is full")
    assert here.places.hear(structs.replace(failed, keep=True), 7.0) == [told]


def count(config: dict[str, Any]) -> Any:
    yield {"loss": 1.0}


def test_a_fork_is_asked_of_the_host_that_has_the_checkpoint_and_its_answer_is_told(here: Places) -> None:
    here.registry.register("b", payload_of(count, {}))
    here.places.execute(ForkSaved("b", "a", Checkpoint(3, PATH, host="10.0.0.7", in_memory=True)))
    assert here.stores.asked == [("fork", "10.0.0.7", "b", "a", PATH)]
    made = CheckpointForked("b", "a", "10.0.0.7", PATH.replace("/a/", "/b/"), True, 0.5)
    checkpoint = Checkpoint(3, made.path, "10.0.0.7", in_memory=True)
    told = TrialForked(7.0, "b", parent="a", lane_id=None, checkpoint=checkpoint, seconds=0.5)
    assert here.places.hear(made, 7.0) == [told]
    failed = CheckpointForked("b", "a", "10.0.0.7", seconds=0.5, problem="the disk is full")
    no = TrialForked(7.0, "b", parent="a", lane_id=None, seconds=0.5, problem="the disk is full")
    assert here.places.hear(failed, 7.0) == [no]


def test_what_was_made_for_a_trial_that_was_forgotten_is_deleted(here: Places) -> None:
    assert here.places.hear(CheckpointForked("b", "a", "localhost", PATH), 7.0) == []
    here.places.hear_lane(here.first, TrialForked(7.0, "c", parent="a", lane_id=0, checkpoint=Checkpoint(3, PATH)))
    assert here.stores.asked == [("forget", "b", False), ("forget", "c", False)]
