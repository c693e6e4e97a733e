"""Which trials pause for an urgent one: enough of them, none in vain, and those whose pause loses least."""

from __future__ import annotations

import itertools
import random

from fluid.policies.urgent.rooms import Room, RoomMate, choose_rooms, room_on, who_pauses


def rows(room: Room) -> list[int] | None:
    found = who_pauses(room)
    return None if found is None else sorted(each.row for each in found)


def test_the_one_that_runs_there_pauses() -> None:
    assert rows(Room(0, [RoomMate(1, gain=1.0)])) == [1]


def test_none_pauses_beside_one_that_leaves_anyway() -> None:
    room = Room(0, [RoomMate(1, gain=1.0, leaves=True, wait=2.0)])
    clearing = room_on(room)
    assert clearing is not None and (clearing.rows, clearing.wait, clearing.loss) == ((), 2.0, 0.0)


def test_a_device_that_is_free_is_no_answer() -> None:
    """The newcomer was refused there, for a reason that no pause changes."""
    assert room_on(Room(0, [])) is None
    assert room_on(Room(0, [], pending=True)) is not None


def test_one_that_does_not_yield_is_in_the_way_of_a_newcomer_that_shares_nothing() -> None:
    stays, goes = RoomMate(1, gain=1.0, yields=False, most=4), RoomMate(2, gain=1.0, most=4)
    assert rows(Room(0, [stays, goes])) is None
    assert rows(Room(0, [stays, goes], most=2)) == [2]
    assert rows(Room(0, [stays._replace(shares=False), goes], most=2)) is None


def test_the_least_gain_per_byte_pauses_first() -> None:
    small, large = RoomMate(1, 1.0, size=10.0, freed=10.0, most=8), RoomMate(2, 1.5, size=40.0, freed=40.0, most=8)
    assert rows(Room(0, [small, large], most=8, need=10.0, free=0.0)) == [2]


def test_one_that_turns_out_not_to_be_needed_stays() -> None:
    first, second = RoomMate(1, 1.0, size=10.0, freed=10.0, most=8), RoomMate(2, 6.0, size=50.0, freed=50.0, most=8)
    assert rows(Room(0, [first, second], most=8, need=45.0, free=0.0)) == [2]


def test_states_are_fetched_away_for_a_newcomer_alone_only() -> None:
    mate = RoomMate(1, 1.0, freed=20.0, state=50.0, most=2)
    assert rows(Room(0, [mate], need=60.0, free=0.0)) == [1]
    beside = RoomMate(2, 1.0, yields=False, most=2)
    assert rows(Room(0, [mate, beside], most=2, need=60.0, free=0.0)) is None


def test_a_cap_holds_whatever_the_trials_tolerate() -> None:
    mates = [RoomMate(row, 1.0, most=8) for row in range(3)]
    assert len(rows(Room(0, mates, most=8)) or ()) == 0 and len(rows(Room(0, mates, most=8, cap=2)) or ()) == 2


def test_several_devices_count_a_wide_trial_once() -> None:
    wide = RoomMate(1, gain=1.5)
    rooms = [Room(0, [wide]), Room(1, [RoomMate(2, gain=1.0)]), Room(2, [wide]), Room(3, [RoomMate(3, gain=1.2)])]
    found = choose_rooms(rooms, 3)
    assert found is not None and set(found.rows) == {1, 2} and set(found.devices) == {0, 1, 2}


def test_devices_of_one_machine() -> None:
    rooms = [Room(index, [RoomMate(index, gain=1.0 + index)], host="ab"[index % 2]) for index in range(4)]
    found = choose_rooms(rooms, 2, one_host=True)
    assert found is not None and set(found.devices) == {0, 2}
    assert choose_rooms(rooms, 3, one_host=True) is None


def test_random_devices_are_cleared_enough_and_no_trial_pauses_in_vain() -> None:
    """Against all subsets: there is a choice if any does, and no part of the choice would do."""
    rng = random.Random(7)

    def does(room: Room, gone: set[int]) -> bool:
        stay = [mate for mate in room.residents if mate.row not in gone and not mate.leaves]
        left = [mate for mate in room.residents if mate.row in gone or mate.leaves]
        if stay and (not all(mate.shares for mate in stay) or len(stay) >= min(room.most, *(m.most for m in stay))):
            return False
        free = (room.free or 0.0) + sum(mate.freed + (0.0 if stay else mate.state) for mate in left)
        return free + (0.0 if stay else room.kept) >= room.need

    answers = 0
    for _ in range(500):
        mates = []
        for row in range(rng.randint(1, 5)):
            size = rng.choice([5.0, 10.0, 30.0])
            mates.append(
                RoomMate(
                    row,
                    gain=rng.choice([0.5, 1.0, 2.0]),
                    size=size,
                    freed=size * 0.6,
                    state=size * 0.4,
                    most=rng.choice([2, 4, 8]),
                    yields=rng.random() < 0.8,
                    leaves=rng.random() < 0.1,
                    shares=rng.random() < 0.8,
                )
            )
        room = Room(0, mates, most=rng.choice([1, 2, 4]), need=rng.choice([0.0, 20.0, 60.0]), free=0.0, kept=5.0)
        able = [mate.row for mate in mates if mate.yields and not mate.leaves]
        subsets = [set(some) for count in range(len(able) + 1) for some in itertools.combinations(able, count)]
        found = rows(room)
        assert (found is not None) == any(does(room, some) for some in subsets)
        if found is not None:
            answers += 1
            assert does(room, set(found))
            assert not any(does(room, set(found) - {row}) for row in found)
    assert answers > 100
