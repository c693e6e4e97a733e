"""Groups that share devices end after each other; durations as text."""

from __future__ import annotations

import pytest

from fluid.errors import parse_duration
from fluid.planners.instance import EndDistribution
from fluid.sizing.goals import format_duration
from fluid.sizing.in_turn import in_turn


def test_the_work_of_groups_adds_up() -> None:
    first, second = EndDistribution.of_draws([10.0, 20.0]), EndDistribution.of_draws([1.0, 3.0])
    both = in_turn([first, second])
    assert both is not None
    assert both.quantile(0.5) == pytest.approx(17.0)
    assert both.odds_by(23.0) == 1.0 and both.odds_by(10.9) == 0.0
    certain = in_turn([EndDistribution.certain(5.0), first])
    assert certain is not None and certain.quantile(0.5) == pytest.approx(20.0)


def test_one_group_is_as_it_is_and_none_has_ended() -> None:
    one = EndDistribution.of_draws([1.0, 2.0])
    assert in_turn([one]) is one
    none = in_turn([])
    assert none is not None and none.quantile(0.9) == 0.0


def test_an_end_that_is_unknown_makes_all_unknown() -> None:
    assert in_turn([EndDistribution.certain(1.0), None]) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (9.0, "9 s"), (45.2, "45 s"), (90.0, "1 min 30 s"), (7200.0, "2 h"), (93_600.0, "1 d 2 h")],
)
def test_durations_as_text(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
    if seconds >= 10.0:
        assert parse_duration("it", text) == pytest.approx(seconds, rel=0.01)
