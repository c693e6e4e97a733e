"""Which packed trials start where memory is scarce."""

from __future__ import annotations

import pytest
from engine_helpers import Hand, Known

from fluid.engine.commands import Save
from fluid.engine.events import GroupSubmitted, GroupTerms, TrialSpec
from fluid.policies.admission import Admitting
from fluid.resources import MemoryNeed


def spec(trial_id: str, memory: float, budget: int = 3, **more: object) -> TrialSpec:
    return TrialSpec(trial_id, budget, memory=MemoryNeed(memory), **more)  # type: ignore[arg-type]


class Scarce(Hand):
    """One device or more of 80 bytes, of which trials may fill 72, and up to four of them run there."""

    def __init__(self, devices: int = 1, packing: int = 4) -> None:
        super().__init__(devices, memory=80.0, profile=Known(packing=packing, width=1), max_packing=packing)

        self.heard = 0

    def put(self, *trials: TrialSpec, priority: float = 1.0) -> None:
        group = f"group of {trials[0].trial_id}"
        self.do(GroupSubmitted(self.now, group, trials, terms=GroupTerms(priority=priority)))

    def begin(self) -> None:
        """Has every trial that is to start start, once the states that leave for it are saved."""
        while (saves := [item for item in self.log[self.heard :] if isinstance(item, Save) and item.drop]) != []:
            self.heard = len(self.log)
            for item in saves:
                self.saved(item.trial_id, item.lane_ids[0], self.trial(item.trial_id).progress.done, dropped=True)
        for trial_id, state in self.states().items():
            if state == "STARTING" and self.trial(trial_id).placement.lanes:
                for lane in self.trial(trial_id).placement.lanes:
                    if not self.state.lanes[lane].ready:
                        self.ready(lane)
                if self.states()[trial_id] == "STARTING":
                    self.started(trial_id)

    @property
    def running(self) -> set[str]:
        return {trial_id for trial_id, trial in self.state.trials.items() if trial.row in self.state.occupancy.held}

    @property
    def admitting(self) -> Admitting:
        return self.state.admission


def mixed() -> list[TrialSpec]:
    large = [spec(f"large {number}", 40.0, 10) for number in range(20)]
    return [*large, spec("medium", 20.0, 12), *(spec(f"small {number}", 5.0, 3) for number in range(4))]


def test_beside_a_large_trial_those_start_that_gain_most_per_byte() -> None:
    hand = Scarce()
    hand.put(*mixed())
    running = sorted(name.split()[0] for name in hand.running)
    assert running == ["large", "small", "small", "small"], "and not the medium one, which takes longer"


def test_in_queue_order_the_longest_starts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.policies.admission.is_scarce", lambda wanted, usable: False)
    hand = Scarce()
    hand.put(*mixed())
    assert sorted(name.split()[0] for name in hand.running) == ["large", "medium", "small", "small"]


def test_a_higher_priority_that_fits_is_not_overtaken() -> None:
    small = [spec(f"small {number}", 9.0, 1) for number in range(8)]
    hand = Scarce()
    hand.put(*small, spec("first", 45.0, 10, priority=3.0), spec("urgent", 26.0, 30, priority=2.0))
    assert hand.running == {"first", "urgent"}
    assert hand.admitting.is_scarce


def test_where_memory_is_not_scarce_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a choice is made")

    monkeypatch.setattr("fluid.policies.admission.admit", refuse)
    hand = Scarce(packing=2)
    hand.put(*(spec(f"t{number}", 1.0 + number, 4) for number in range(6)))
    assert len(hand.running) == 2
    hand.put(spec("unbounded", 20.0, 4))
    assert not hand.admitting.is_scarce


def test_a_large_trial_that_is_passed_over_for_long_gets_a_device() -> None:
    hand = Scarce()
    hand.put(spec("a", 20.0, 5), spec("b", 21.0, 6), spec("c", 22.0, 7))
    hand.put(spec("large", 60.0, 4))
    came, kept = 3, False
    while "large" not in hand.running and came < 200:
        hand.begin()
        # As many wait as run: whenever one ends, another one fits where the large one does not.
        waiting = [name for name, state in hand.states().items() if state == "QUEUED" and name != "large"]
        for _ in range(3 - len(waiting)):
            came += 1
            hand.put(spec(f"stream {came}", 20.0 + came % 3, 3 + came % 4))
        hand.begin()
        if "large" in hand.running:
            break
        kept |= bool(hand.admitting.kept)
        left = {name: hand.trial(name).progress.left for name in hand.running}
        first = min(left, key=left.__getitem__)
        hand.iterate(first, left[first])
    assert "large" in hand.running and kept
    assert 6 < came < 60, "after about as long as all the work took that was there when it came"
    hand.begin()
    assert hand.running == {"large"}
    hand.iterate("large", 4)
    assert hand.end("large") == "DONE" and not hand.admitting.kept
    hand.begin()
    assert hand.running, "the device is for all again"


def test_a_device_is_not_kept_from_higher_priorities() -> None:
    hand = Scarce()
    hand.put(spec("a", 20.0, 5), spec("large", 60.0, 4))
    large, other = hand.trial("large"), hand.trial("a")
    hand.admitting.kept[large.row] = 0
    assert hand.admitting.forbidden_to(other) == {0}
    assert hand.admitting.forbidden_to(large) == frozenset()
    hand.put(spec("urgent", 10.0, 4), priority=2.0)
    assert hand.admitting.forbidden_to(hand.trial("urgent")) == frozenset()
