"""Plans of trials that ask for devices."""

from __future__ import annotations

import pytest

from fluid import (
    Cluster,
    Device,
    DynamicFluid,
    Fifo,
    InvalidFieldError,
    Portfolio,
    Requires,
    StaticFluid,
    Trial,
    TrialGroup,
)
from fluid.devices.constraints import Constraint, describe
from fluid.planners.planner import Planner

CLUSTER = Cluster.of(
    [Device(index, host="ab"[index // 2], kind="gpu", model=("H100", "T4")[index % 2]) for index in range(4)]
)


@pytest.mark.parametrize("planner", [Fifo(), StaticFluid(), DynamicFluid(), Portfolio()], ids=lambda each: each.name)
def test_every_planner_keeps_to_what_trials_ask_for(planner: Planner) -> None:
    trials = [
        Trial(print, budget=5, trial_id="two", devices=2),
        Trial(print, budget=3, trial_id="alone", devices=1),
        *(Trial(print, budget=4, trial_id=f"h{k}", requires=Requires(model="H100")) for k in range(3)),
        *(Trial(print, budget=2, trial_id=f"s{k}", devices=1 / 2) for k in range(4)),
        *(Trial(print, budget=2, trial_id=f"any{k}") for k in range(4)),
    ]
    plan = planner.plan(TrialGroup(trials), CLUSTER)
    assert plan.widths["two"] == 2.0 and plan.widths["alone"] == 1.0
    assert all(plan.widths[f"s{k}"] >= 1 / 2 for k in range(4))
    segments = plan.schedule.segments
    names = plan.instance.trial_ids
    assert {names[segment.row] for segment in segments} == {trial.id for trial in trials}
    for segment in segments:
        name = names[segment.row]
        if name.startswith("h"):
            assert {CLUSTER[index].model for index in segment.devices} == {"H100"}
        if name in ("two", "alone"):
            assert len(segment.devices) == (2 if name == "two" else 1)
            others = [
                other
                for other in segments
                if other.row != segment.row and other.start < segment.end and segment.start < other.end
            ]
            assert not any(set(other.devices) & set(segment.devices) for other in others)


@pytest.mark.parametrize(
    ("asked", "field"),
    [({"devices": 5}, "devices"), ({"requires": Requires(kind="cpu")}, "requires")],
)
def test_what_no_device_can_serve_is_refused(asked: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        StaticFluid().plan(TrialGroup([Trial(print, **asked)]), CLUSTER)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_gang_needs_one_host_and_autoscaling_may_bring_it() -> None:
    gang = Constraint(None, 3, gang=True)
    assert gang.problem(CLUSTER.devices) is not None
    assert Constraint(None, 3).problem(CLUSTER.devices) is None
    assert gang.problem(CLUSTER.devices, most=8) is None
    problem = Constraint(None, 9, gang=True).problem(CLUSTER.devices, most=8)
    assert problem is not None and problem[2].startswith(
        "no 9 devices of one host can be had; there are 1 x H100 on 'a'"
    )


def test_a_long_list_of_devices_is_cut() -> None:
    assert describe([]) == "none"
    text = describe(Device(index, host=f"h{index}", tags=("fast",)) for index in range(9))
    assert text.startswith("1 x cpu on 'h0' (tags fast), ") and text.endswith("3 other kinds")


def test_a_share_bounds_the_residents() -> None:
    assert [Constraint(None, share).most_residents for share in (1 / 3, 0.5, 0.7, 1, 4)] == [3, 2, 1, 1, 1]
    assert Constraint.of(Requires(), None, False) is None
