"""The benchmark of groups with deadlines: a session runs in every order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import group_deadlines


def test_a_session_is_the_same_in_every_order_and_half_of_the_mix_has_no_deadline() -> None:
    plain, again = (group_deadlines.session(4, 7, 6, mixed=False) for _ in range(2))
    mixed = group_deadlines.session(4, 7, 6, mixed=True)
    assert plain == again and all(group.deadline for group in plain)
    assert sum(group.deadline is None for group in mixed) == 3
    assert [group.paces for group in mixed] == [group.paces for group in plain]
    for group in plain:
        alone = group_deadlines.time_alone(list(group.paces), group.iterations)
        assert group.deadline is not None and group.deadline > 0.7 * alone


def test_a_session_runs_in_every_order() -> None:
    case = group_deadlines.measure((2, 0, 4, True))
    found = group_deadlines.summary([case])
    assert all(0.0 <= case[order]["met"] <= 1.0 < case[order]["others_h"] * 3600.0 for order in group_deadlines.ORDERS)
    assert found["sessions"] == 0 and found["mixed"]["met"]["edf"] == pytest.approx(case["edf"]["met"], abs=1e-3)


def test_alone_a_group_takes_what_its_trials_take() -> None:
    (group, *_) = group_deadlines.session(3, 1, 2, mixed=False)
    alone = group_deadlines.time_alone(list(group.paces), group.iterations)
    for order in group_deadlines.ORDERS:
        assert group_deadlines.run([group], order)[0] <= 1.3 * alone
