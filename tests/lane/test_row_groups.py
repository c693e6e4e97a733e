"""Which residents train in one step, and for how long a pack waits for answers about its rows."""

from __future__ import annotations

from typing import Any

import pytest

from fluid.lane.resident import ResidentTrial, WorkQueue
from fluid.lane.rows.groups import RowGroups, Turn


class SetClock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class Driven:
    """Groups of residents, as a lane drives them."""

    def __init__(self) -> None:
        self.queue, self.clock = WorkQueue(), SetClock()
        self.groups = RowGroups(self.queue, self.clock)
        self.residents: dict[str, ResidentTrial] = {}

    def add(self, names: str, iterations: int = 0, key: str | None = "key") -> None:
        for name in names:
            nothing: Any = None
            resident = ResidentTrial(trial_id=name, lane_id=0, link=nothing, code=nothing, process_state=nothing)
            self.residents[name] = resident
            if key is not None:
                self.groups.add(resident, key, object)
            if iterations:
                self.give(name, iterations)

    def give(self, names: str, iterations: int = 1) -> None:
        for name in names:
            resident = self.residents[name]
            if not resident.left:
                self.queue.add(resident)
            resident.left += iterations
            self.groups.note_iterations(resident)

    def pause(self, name: str) -> None:
        resident = self.residents[name]
        self.groups.await_no_more(resident)
        if resident.left:
            resident.left = 0
            self.queue.remove(resident)

    def next(self) -> Turn:
        return self.groups.next("longest_first", None)

    def step(self, seconds: float = 0.1) -> str:
        """Runs the next step; returns who took part."""
        turn = self.next()
        assert turn.rows, "it does not wait"
        self.clock.time += seconds
        for row in turn.rows:
            row.record_iteration(seconds, len(turn.rows))
            row.left -= 1
            if not row.left:
                self.queue.remove(row)
        if turn.pack is not None:
            self.groups.note_step(turn.pack, turn.rows, seconds)
        return "".join(sorted(row.trial_id for row in turn.rows))


@pytest.fixture
def driven() -> Driven:
    return Driven()


def test_those_of_one_key_step_together(driven: Driven) -> None:
    driven.add("abc", 2)
    driven.add("xy", 2, "other key")
    driven.add("f", 2, None)
    steps = [driven.step() for _ in range(6)]
    assert sorted(steps) == ["abc", "abc", "f", "f", "xy", "xy"]
    assert not driven.queue


@pytest.mark.parametrize(
    ("rows", "most", "packs"),
    [
        (5, 8, [5]),
        (8, 8, [8]),
        (9, 8, [8, 1]),
        (12, 8, [8, 4]),
        (20, 16, [16, 4]),
        (3, 1, [1, 1, 1]),
        (7, 3, [3, 3, 1]),
    ],
)
def test_packs_are_as_large_as_is_allowed_and_powers_of_two(
    driven: Driven, rows: int, most: int, packs: list[int]
) -> None:
    driven.groups.most = most
    driven.add("abcdefghijklmnopqrstuvwxyz"[:rows], 1)
    assert sorted((len(driven.step()) for _ in packs), reverse=True) == packs
    assert not driven.queue


def test_packs_of_a_limit_take_turns_and_stay_as_they_are(driven: Driven) -> None:
    driven.groups.most = 2
    driven.add("abcd", 100)
    steps = [driven.step() for _ in range(20)]
    assert set(steps) == {"ab", "cd"}
    leads = [steps[:count].count("ab") - steps[:count].count("cd") for count in range(1, 21)]
    assert max(map(abs, leads)) <= 2
    driven.groups.most = 4
    assert driven.step() == "abcd"


def test_a_pack_waits_for_answers_and_steps_as_soon_as_all_have_come(driven: Driven) -> None:
    driven.add("abc", 1)
    assert driven.step(0.1) == "abc"
    driven.clock.time += 5.0  # As long as none has iterations left, the lane waits for messages without end.
    driven.give("a")
    turn = driven.next()
    assert not turn.rows and turn.wait == pytest.approx(0.01), "a tenth of the step"
    driven.clock.time += 0.009
    driven.give("b")
    turn = driven.next()
    assert not turn.rows and turn.wait == pytest.approx(0.01), "answers come"
    driven.give("c")
    assert driven.step() == "abc"


@pytest.mark.parametrize(("seconds", "wait"), [(0.001, 0.002), (0.1, 0.01), (60.0, 0.1)])
def test_it_does_not_wait_long_for_one_that_does_not_come(driven: Driven, seconds: float, wait: float) -> None:
    driven.add("abc", 1)
    driven.step(seconds)
    driven.give("ab")
    assert driven.next().wait == pytest.approx(wait)
    driven.clock.time += 1.001 * wait
    assert driven.step(seconds) == "ab"
    driven.give("ab")
    assert driven.step(seconds) == "ab", "it is missed once"
    driven.give("abc")
    assert driven.step(seconds) == "abc"


def test_answers_that_trickle_in_do_not_hold_it_up_for_ever(driven: Driven) -> None:
    driven.add("abcdefgh", 1)
    driven.step(0.1)
    waited = 0.0
    for name in "abcdefg":
        driven.give(name)
        if driven.next().rows:
            break
        driven.clock.time += 0.009
        waited += 0.009
    assert waited == pytest.approx(0.054), "five times a tenth of the step, and what the last answer took"


def test_the_wait_ends_with_a_pause_and_others_run_meanwhile(driven: Driven) -> None:
    driven.add("abc", 1)
    driven.step()
    driven.give("a")
    driven.pause("b")
    assert not driven.next().rows
    driven.add("f", 1, None)
    assert driven.step() == "f"
    driven.pause("c")
    assert driven.step() == "a"


def test_there_is_no_wait_with_long_budgets(driven: Driven) -> None:
    driven.add("abc", 50)
    assert [driven.step() for _ in range(50)] == ["abc"] * 50


def test_one_that_is_removed_is_awaited_no_more(driven: Driven) -> None:
    driven.add("ab", 1)
    driven.step()
    driven.give("a")
    driven.groups.remove(driven.residents["b"])
    assert driven.step() == "a"
    driven.groups.remove(driven.residents["a"])
    driven.give("ab")
    assert [driven.step(), driven.step()] == ["a", "b"], "neither is of a group now"
