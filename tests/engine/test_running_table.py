"""Tests of fluid.engine.estimates.running against a table that is collected anew each time."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from fluid.devices.occupancy import Occupancy
from fluid.engine.estimates.key_estimates import KeyEstimate
from fluid.engine.estimates.running import RunningTable
from fluid.engine.events import TrialSpec
from fluid.engine.records import Limits, Progress, TrialRecord
from fluid.resources import Cluster

KEYS = {
    "narrow": KeyEstimate("narrow", 4, 8, alpha=1.1, beta=1.2, packing=1, width=1),
    "wide": KeyEstimate("wide", 4, 8, alpha=1.3, beta=1.4, packing=4, width=2),
}


def record(row: int, key: str, width: float, cap: int | None) -> TrialRecord:
    trial = TrialRecord(TrialSpec(f"t{row}", 10, profile_key=key, max_width=8), row, "group", Progress(10))
    trial.width, trial.limits = width, Limits(packing_cap=cap)
    return trial


def table_of(trials: list[TrialRecord]) -> RunningTable:
    table = RunningTable()
    for estimate in KEYS.values():
        table.set_key(estimate)
    for trial in trials:
        table.add(trial, (trial.row,), work=float(trial.row))
    return table


TRIALS = st.lists(
    st.builds(
        record,
        st.integers(0, 200),
        st.sampled_from(sorted(KEYS)),
        st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0]),
        st.sampled_from([None, 1, 2]),
    ),
    max_size=80,
    unique_by=lambda trial: trial.row,
)


@given(TRIALS, st.data())
def test_what_is_left_after_removals_and_changes_is_what_a_new_table_says(
    trials: list[TrialRecord], data: st.DataObject
) -> None:
    table, occupancy = table_of(trials), Occupancy(Cluster.of(201))
    for trial in trials:
        occupancy.hold(trial.row, (trial.row,), trial.width)
    gone = data.draw(st.sets(st.sampled_from(trials))) if trials else set()
    left = [trial for trial in trials if trial not in gone]
    for trial in gone:
        table.remove(trial.row)
        table.remove(trial.row)  # a second time it is passed over
    for trial in left[::2]:
        trial.width = 0.5
        table.set_width(trial.row, 0.5)
    for trial in gone:
        table.set_width(trial.row, 7.0)
        table.set_work(trial.row, 7.0)
    assert set(table) == {trial.row for trial in left} and len(table) == len(left)
    again = table_of(left)
    for trial in left[::3]:
        for each in (table, again):
            each.set_work(trial.row, 9.0)
            each.set_sigma(trial.row, 0.5)
    seen, expected = table.snapshot(occupancy, 0.1), again.snapshot(occupancy, 0.1)
    uncertain = {trial.row for trial in left[::3]}
    spreads = [0.0] * len(left) if seen.sigma is None else seen.sigma.tolist()
    assert spreads == [0.5 if row in uncertain else 0.0 for row in seen.rows.tolist()]
    for column in ("rows", "remaining", "widths", "residents", "device", "speed", "alpha", "beta", "c", "d"):
        assert getattr(seen, column).tolist() == getattr(expected, column).tolist(), column


@given(TRIALS)
def test_the_questions_are_answered_as_by_going_through_the_records(trials: list[TrialRecord]) -> None:
    table = table_of(trials)
    estimates = {trial.row: KEYS[trial.spec.profile_key] for trial in trials}
    too_wide = {t.row: 2 if estimates[t.row].width == 2 else 1 for t in trials}
    too_wide = {t.row: too_wide[t.row] for t in trials if t.width > too_wide[t.row]}
    assert dict(table.too_wide()) == too_wide
    packed = {t.row for t in trials if t.width == 0.5}
    assert set(table.packed_wider_than(0.25)) == packed
    packing = {t.row: min(estimates[t.row].packing, t.limits.packing_cap or 99) for t in trials}
    narrowable = [t for t in trials if t.width >= 2 or (t.width == 1 and packing[t.row] > 1)]
    assert table.can_narrow() == bool(narrowable)
