"""Members of a population that are ahead let those go first that wait for a device."""

from __future__ import annotations

from fluid.sweeping.even_pace import EvenPace


def test_those_that_are_furthest_behind_go_first() -> None:
    gone: list[int] = []
    pace = EvenPace(4, gone.append)
    pace.waits(0, 0)
    assert [pace.may_go(1, 12), pace.may_go(2, 8), pace.may_go(3, 4)] == [False, False, True]
    pace.runs(0)
    assert gone == [2], "behind by 4 at most: the one that waits after 4 iterations"
    pace.runs(3)
    assert gone == [2, 1]


def test_nobody_waits_for_one_that_runs_or_has_ended() -> None:
    gone: list[int] = []
    pace = EvenPace(1, gone.append)
    pace.waits(0, 0)
    pace.runs(0)
    assert pace.may_go(1, 100)
    pace.runs(1)
    pace.waits(2, 0)
    assert not pace.may_go(1, 200)
    pace.runs(2)
    pace.runs(2)
    assert gone == [1]
