"""Tests of fused trials in the engine: how far it fuses, whom with whom, and what happens when a pack goes wrong."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from fused_sessions import CONVOLUTION, MLP, SHORT_GAIN, FusedSession, Shape, run_fused

from fluid.engine.commands import Report
from fluid.engine.events import BudgetExtended, DeviceAdded, DeviceLost, PauseRequested, ResumeRequested, StopRequested
from fluid.resources import Device, MemoryNeed
from fluid.trialgroup import TrialState


def rows_of(session: FusedSession) -> list[int]:
    return [len(trials) for _, _, trials in session.steps]


def all_done(session: FusedSession) -> bool:
    return set(session.ends.values()) == {TrialState.DONE}


# --- how far


def test_rows_double_while_that_pays_and_stop_where_it_does_not() -> None:
    ran = run_fused({"mlp": Shape(64, 50, MLP)})
    assert ran.ramp[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert ran.limits == [1, 2, 4, 8, 16, 32, 64, 32]
    steps = Counter(rows_of(ran))
    assert max(steps[rows] for rows in (1, 2, 4, 8, 16, 64)) <= 5, "trying takes a few steps"
    # 64 trials of 50 iterations, 32 at a time.
    assert ran.makespan == pytest.approx(64 / 32 * 50 * 0.1 * MLP.stretch(32), rel=0.15)
    assert all_done(ran)


def test_a_doubling_that_costs_as_much_as_it_brings_is_taken_back() -> None:
    ran = run_fused({"net": Shape(32, 50, SHORT_GAIN)})
    assert ran.limits == [1, 2, 4, 8, 4]
    assert ran.makespan == pytest.approx(32 / 4 * 50 * 0.1 * SHORT_GAIN.stretch(4), rel=0.05)


def test_convolutions_that_get_slower_pay_only_for_the_trial() -> None:
    ran = run_fused({"net": Shape(16, 50, CONVOLUTION)})
    alone = run_fused({"net": Shape(16, 50, CONVOLUTION)}, max_fused=1)
    assert alone.ramp == [1]
    assert alone.makespan == pytest.approx(16 * 50 * 0.1)
    assert ran.ramp == [1, 2]
    assert rows_of(ran).count(2) <= 5
    assert ran.makespan < 1.05 * alone.makespan


def test_trials_that_are_not_worth_fusing_are_packed_as_processes() -> None:
    shapes = {"net": Shape(16, 50, CONVOLUTION, alpha=1.2)}
    ran = run_fused(shapes, max_packing=4)
    never = run_fused(shapes, max_fused=1, max_packing=4)
    assert ran.makespan < 1.05 * never.makespan
    assert ran.makespan < 0.6 * 16 * 50 * 0.1, "they were packed"


@pytest.mark.parametrize("most", [2, 8])
def test_no_more_than_max_fused_take_a_step(most: int) -> None:
    ran = run_fused({"net": Shape(16, 30, MLP)}, max_fused=most)
    assert max(rows_of(ran)) == most


def test_insisting_fuses_from_the_first_step_on_whatever_it_costs() -> None:
    ran = run_fused({"net": Shape(8, 20, CONVOLUTION)}, insists=True)
    assert set(rows_of(ran)) == {8}


def test_rows_are_tried_on_each_of_several_devices() -> None:
    ran = run_fused({"net": Shape(64, 50, MLP)}, devices=4)
    assert {device for _, device, _ in ran.steps} == {0, 1, 2, 3}
    assert ran.makespan == pytest.approx(50 * 0.1 * MLP.stretch(16), rel=0.15)


# --- whom with whom


def test_trials_of_two_shapes_never_take_a_step_together_and_share_no_device_once_that_is_known() -> None:
    shapes = {"narrow": Shape(40, 60, MLP), "broad": Shape(40, 60, MLP)}
    earlier: set[str] = set()

    def look(session: FusedSession, report: Report) -> None:
        trials = session.state.trials.by_row
        on_devices = [[trials[row] for row in rows] for rows in session.state.occupancy.residents.values()]
        if not earlier and {trials[0].split("-")[0] for _, _, trials in session.steps} == {"narrow", "broad"}:
            earlier.update(trial.trial_id for together in on_devices for trial in together)
        for together in on_devices if earlier else ():
            later = [trial.trial_id for trial in together if trial.trial_id not in earlier]
            assert len({name.split("-")[0] for name in later}) <= 1, later

    ran = run_fused(shapes, devices=2, max_fused=16, on_report=look)
    assert 0 < len(earlier) <= 32, "further trials were placed when it was known"
    assert all(len({trial.split("-")[0] for trial in trials}) == 1 for _, _, trials in ran.steps)
    assert all_done(ran)
    assert max(rows_of(ran)) == 16


def test_trials_that_cannot_be_fused_run_beside_no_pack() -> None:
    ran = run_fused({"net": Shape(8, 40, MLP), "other": Shape(4, 40, None)})
    assert all(len(trials) == 1 for _, _, trials in ran.steps if trials[0].startswith("other"))
    assert all_done(ran)
    assert ran.makespan < 4 * 40 * 0.1 + 0.5 * 8 * 40 * 0.1


# --- trials come and go


def test_a_trial_that_is_stopped_or_paused_leaves_the_others_to_go_on() -> None:
    later = [
        (3.0, StopRequested(0.0, "net-1")),
        (3.5, PauseRequested(0.0, "net-2")),
        (4.5, ResumeRequested(0.0, "net-2")),
    ]
    ran = run_fused({"net": Shape(4, 60, MLP)}, later=later)
    assert ran.ends.pop("net-1") == TrialState.STOPPED
    assert all_done(ran)
    between = [trials for at, _, trials in ran.steps if 3.8 < at < 4.5]
    assert set(between) == {("net-0", "net-3")}
    assert ("net-0", "net-2", "net-3") in [trials for at, _, trials in ran.steps if at > 4.5]


def test_a_trial_with_more_budget_joins_its_pack_again() -> None:
    ran = run_fused({"net": Shape(4, 30, MLP)}, later=[(3.0, BudgetExtended(0.0, "net-0", 20))])
    assert ran.state.trials["net-0"].progress.done == 50
    assert all_done(ran)


def test_a_new_device_takes_trials_that_wait_and_a_lost_one_gives_its_pack_back() -> None:
    added = run_fused({"net": Shape(32, 50, MLP)}, max_fused=8, later=[(3.0, DeviceAdded(0.0, Device(1)))])
    assert 8 in {len(trials) for _, device, trials in added.steps if device == 1}
    lost = run_fused({"net": Shape(32, 50, MLP)}, max_fused=8, devices=2, later=[(3.0, DeviceLost(0.0, 1))])
    assert all_done(added) and all_done(lost)
    assert max(at for at, device, _ in lost.steps if device == 1) <= 3.0


# --- what goes wrong


def test_a_lane_whose_self_check_refuses_runs_its_trials_one_by_one() -> None:
    ran = run_fused({"net": Shape(16, 50, MLP, lane_rows=1)})
    assert rows_of(ran).count(2) == 1, "the step in which it found that"
    assert set(rows_of(ran)) == {1, 2}
    assert all_done(ran)


def test_a_pack_that_does_not_fit_is_halved_for_good() -> None:
    ran = run_fused({"net": Shape(16, 50, MLP, lane_rows=4)})
    assert rows_of(ran).count(8) == 1
    assert max(rows_of(ran)[rows_of(ran).index(8) + 1 :]) == 4
    assert all_done(ran)


def test_a_pack_that_dies_is_halved_until_the_culprit_is_alone() -> None:
    ran = run_fused({"net": Shape(16, 50, MLP)}, culprit="net-5")
    sizes = [len(trials) for trials in ran.deaths]
    assert sizes == sorted(sizes, reverse=True)
    assert all(2 * after <= before or after == 1 for before, after in itertools.pairwise(sizes))
    assert ran.deaths[-1] == ("net-5",)
    assert ran.ends.pop("net-5") == TrialState.FAILED
    assert all_done(ran), "trials that ran beside it are not blamed"
    assert max(rows_of(ran)) == 8, "and are fused again"


# --- memory


def need_of_row(rows: int) -> MemoryNeed:
    """200 bytes that all share, 85 that are there once for whatever reason, and 5 of each row."""
    own = 5.0 + 85.0 / rows
    return MemoryNeed(200.0 + own, 1.0, 200.0)


def apart(rows: int) -> MemoryNeed:
    """The same without anything that rows share."""
    return MemoryNeed(290.0)


@pytest.mark.parametrize("insists", [False, True])
def test_a_pack_fills_the_device_with_what_its_rows_have_apart(insists: bool) -> None:
    ran = run_fused({"mlp": Shape(40, 50, MLP)}, max_fused=16, insists=insists, memory_bytes=1000.0, need=need_of_row)
    assert ran.ramp[: 1 if insists else 5] == ([16] if insists else [1, 2, 4, 8, 16])
    steps = Counter(rows_of(ran))
    assert steps[16] >= 95, "the 40 trials are in packs of 16, but for the last"
    assert all_done(ran)


def test_rows_that_share_nothing_are_as_many_as_fit() -> None:
    ran = run_fused({"mlp": Shape(16, 50, MLP)}, max_fused=16, memory_bytes=1000.0, need=apart)
    assert max(rows_of(ran)) == 3, "0.9 x 1000 / 290"
    assert all_done(ran)


def test_a_pack_that_shares_less_than_its_first_trial_could_shrinks_as_that_is_known() -> None:
    def unlike(rows: int) -> MemoryNeed:
        return MemoryNeed(290.0, 0.0, 200.0 if rows == 1 else 0.0)

    ran = run_fused({"mlp": Shape(16, 50, MLP)}, max_fused=16, memory_bytes=1000.0, need=unlike)
    steps = Counter(rows_of(ran))
    assert max(steps) <= 4 and steps[4] <= 5 and steps[3] > 50
    assert all_done(ran)


@pytest.mark.parametrize("most", [None, 1])
def test_trials_placed_together_that_turn_out_to_share_nothing_count_apart(most: int | None) -> None:
    # Two of them fit only together; the session checks what is placed on each device.
    shapes = {"mlp": Shape(8, 20, SHORT_GAIN, lane_rows=most), "conv": Shape(8, 20, CONVOLUTION, lane_rows=4)}
    ran = run_fused(shapes, max_fused=8, memory_bytes=500.0, need=lambda rows: MemoryNeed(420.0, 0.0, 400.0))
    assert all_done(ran)


def test_trials_that_are_equally_late_do_not_preempt_each_other_in_turn() -> None:
    shapes = {"conv": Shape(20, 5, CONVOLUTION), "other": Shape(8, 20, CONVOLUTION, lane_rows=1)}
    assert all_done(run_fused(shapes, devices=3, max_fused=8))
