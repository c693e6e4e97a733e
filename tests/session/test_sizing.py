"""Sessions sized by a deadline and a budget, on the virtual clock: devices go and come, and work is saved in time."""

from __future__ import annotations

import json
import logging
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import Device, FluidExecutor, LimitReachedError, Result, Trial, TrialGroup, TrialListener
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.errors import FluidError, InvalidFieldError
from fluid.session.facts import GoalStatus
from fluid.session.options import goals_left
from fluid.sizing.goals import Goals

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


class Watched(SimulatedBackend):
    """A simulated backend that tells what it was asked for, and what was given back."""

    def __init__(self, devices: int, **options: Any) -> None:
        super().__init__(lambda _, config: Truth(config["seconds"]), map(Device, range(devices)), **options)
        self.asks: list[int] = []
        self.released: queue.SimpleQueue[int] = queue.SimpleQueue()

    def ask(self, devices: int) -> None:
        self.asks.append(devices)
        super().ask(devices)

    def give_back(self, device_id: int) -> None:
        super().give_back(device_id)
        self.released.put(device_id)


def unused(config: dict[str, Any], state: Any = None) -> Iterator[tuple[dict[str, Any], Any]]:
    raise AssertionError("no code runs")
    yield {}, None


def group(*seconds: float, budget: int = 10) -> TrialGroup:
    return TrialGroup([Trial(unused, {"seconds": each}, budget=budget, max_width=1) for each in seconds])


def executor(folder: Path, backend: SimulatedBackend, **options: Any) -> FluidExecutor:
    return FluidExecutor(backend, packing="off", run_dir=folder / "run", verbose=0, **options)


def device_seconds(folder: Path) -> float:
    """What the journal says of the time for which devices were held, until the last entry."""
    since, total, at = dict[int, float](), 0.0, 0.0
    for line in map(json.loads, (folder / "run" / "journal.jsonl").read_text().splitlines()):
        at = max(at, line.get("at", 0.0))
        if line["what"] == "DeviceAdded":
            since[line["device"]["index"]] = line["at"]
        elif line["what"] == "NoteDeviceLost":
            total += line["at"] - since.pop(line["device_id"])
    return total + sum(at - each for each in since.values())


def test_devices_that_fall_idle_are_given_back_and_the_deadline_is_met(tmp_path: Path) -> None:
    backend = Watched(8)
    with executor(tmp_path, backend, deadline="1h") as made:
        # One trial takes 1,000 s, the others 100 s each: seven devices are idle for most of that time.
        handle = made.submit_trialgroup(group(100.0, *[10.0] * 7))
        assert handle.wait(timeout=PATIENCE)
        assert handle.makespan == pytest.approx(1000.0, rel=0.01)
    assert backend.released.qsize() >= 6
    assert device_seconds(tmp_path) < 0.4 * 8 * 1000.0


def test_devices_are_asked_for_as_far_as_the_deadline_needs_them(tmp_path: Path) -> None:
    backend = Watched(1, autoscale=16)
    with executor(tmp_path, backend, deadline=1000.0) as made:
        assert made.max_devices == 16
        handle = made.submit_trialgroup(group(*[10.0] * 30))  # 3,000 s of work
        assert handle.wait(timeout=PATIENCE)
        assert handle.makespan is not None and handle.makespan < 1000.0
    assert 4 <= max(backend.asks) < 16, backend.asks


def test_a_deadline_that_cannot_be_met_is_told_at_once_with_the_earliest_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Watched(2)
    with (
        caplog.at_level(logging.WARNING, "fluid.session"),
        executor(tmp_path, backend, deadline=600.0, price_per_device_hour=3.6) as made,
    ):
        handle = made.submit_trialgroup(group(*[10.0] * 20))  # 1,000 s on two devices
        with pytest.raises(LimitReachedError, match="the deadline of 10 min has come"):
            handle.wait(timeout=PATIENCE)
    told = [record.getMessage() for record in caplog.records if "cannot be met" in record.getMessage()]
    (minutes,) = re.findall(
        r"cannot be met with 90%: on 2 devices, the most that there are, all ends in (\d+) min", told[0]
    )
    assert 15 <= int(minutes) <= 40


def test_at_the_deadline_all_is_saved_and_the_session_goes_on_later(tmp_path: Path) -> None:
    with executor(tmp_path, Watched(2), deadline=505.0) as made:
        handle = made.submit_trialgroup(group(*[10.0] * 20))
        with pytest.raises(LimitReachedError) as caught:
            handle.wait(timeout=PATIENCE)
        error = caught.value
        assert error.unsaved == () and 8 <= error.unfinished <= 12
        with pytest.raises(FluidError, match="the deadline of 8 min 25 s has come"):
            made.submit_trialgroup(group(1.0))
        assert made.session.has_ended
    entries = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    (end,) = [line for line in entries if line["what"] == "NoteDrained" and line["device_id"] is None]
    assert end["unsaved"] == [] and 450.0 < end["at"] <= 505.0
    last = max(line["at"] for line in entries if line["what"] == "IterationReported")
    assert last <= 505.0, "iterations that run are saved by the deadline"
    facts = json.loads((tmp_path / "run" / "session.json").read_text())
    assert (facts["deadline_s"], facts["budget_usd"], facts["price_per_device_hour"]) == (505.0, None, None)
    with FluidExecutor.resume(tmp_path / "run", backend=Watched(2), packing="off", verbose=0, deadline=None) as made:
        (handle,) = made.handles
        assert handle.wait(timeout=PATIENCE)
        rows = sorted((result.trial_id, result.iteration) for result in handle.results())
        assert len(rows) == len(set(rows)) == 200, "no iteration is repeated"


def test_the_session_ends_when_the_money_is_spent(tmp_path: Path) -> None:
    with executor(tmp_path, Watched(4), budget_usd=1.0, price_per_device_hour=3.6) as made:  # 1,000 device-seconds
        handle = made.submit_trialgroup(group(*[10.0] * 20))  # 2,000
        with pytest.raises(LimitReachedError, match=r"the budget of \$1.00 is spent: 1?\d of 1?\d unfinished"):
            handle.wait(timeout=PATIENCE)
    spent = json.loads((tmp_path / "run" / "session.json").read_text())["device_s"]
    assert 700.0 < spent <= 1000.0
    with pytest.raises(InvalidFieldError, match=r"budget_usd=0\.5: is spent"):
        facts = json.loads((tmp_path / "run" / "session.json").read_text())
        (tmp_path / "run" / "session.json").write_text(json.dumps({**facts, "budget_usd": 0.5}))
        FluidExecutor.resume(tmp_path / "run", backend=Watched(4), packing="off", verbose=0)


def test_a_budget_that_does_not_suffice_is_told_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fluid.session")
    seen: list[GoalStatus | None] = []

    class Looks(TrialListener):
        def on_result(self, result: Result) -> None:
            seen.append(made.status().goal)

    with executor(tmp_path, Watched(4), deadline="10h", budget_usd=1.0, price_per_device_hour=3.6) as made:
        handle = made.submit_trialgroup(group(*[10.0] * 20), listener=Looks())  # $2.00 of work
        with pytest.raises(LimitReachedError, match="is spent"):
            handle.wait(timeout=PATIENCE)
    told = [record.getMessage() for record in caplog.records if "does not suffice" in record.getMessage()]
    pattern = r"budget of \$1\.00 does not suffice: .* cost \$([\d.]+), and \$([\d.]+) are left"
    cost, left = map(float, re.findall(pattern, told[0])[0])
    assert 1.5 < cost < 3.0 and 0.8 < left <= 1.0, "long before the money is spent"
    assert len(told) <= 3, "not at each decision"
    warned = [goal for goal in seen if goal is not None and goal.missing_usd is not None]
    assert warned and warned[0].is_missed and "the budget does not suffice: $" in warned[0].text
    caplog.clear()
    with executor(tmp_path / "enough", Watched(4), budget_usd=9.0, price_per_device_hour=3.6) as made:
        assert made.submit_trialgroup(group(*[10.0] * 20), listener=Looks()).wait(timeout=PATIENCE)
    assert seen[-1] is not None and seen[-1].missing_usd is None and not seen[-1].is_missed
    assert "suffice" not in caplog.text


def test_what_is_left_of_the_goals_of_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fluid.session.options.wall_seconds", lambda: 1000.0)

    def left(given: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
        (tmp_path / "session.json").write_text(json.dumps(facts))
        return goals_left(tmp_path, given or {})

    assert left() == {"price_per_device_hour": None}
    assert left(deadline_at=1500.0)["deadline"] == 500.0
    assert "deadline" not in left(deadline_at=900.0), "it has passed"
    assert "deadline" not in left({"deadline": "1h"}, deadline_at=1500.0)
    facts = {"budget_usd": 10.0, "price_per_device_hour": 3.6, "device_s": 4000.0}
    assert left(**facts) == {"price_per_device_hour": 3.6, "budget_usd": pytest.approx(6.0)}
    assert "budget_usd" not in left({"budget_usd": None}, **{**facts, "device_s": 1e6})


def test_the_status_tells_how_the_session_stands(tmp_path: Path) -> None:
    seen: list[GoalStatus | None] = []
    with executor(tmp_path, Watched(2), deadline=4000.0, budget_usd=9.0, price_per_device_hour=3.6) as made:
        handle = made.submit_trialgroup(group(*[10.0] * 8))
        for _ in handle.results():
            seen.append(made.status().goal)
        assert handle.done
    last = seen[-1]
    assert last is not None and last.deadline_s is not None and 3000.0 < last.deadline_s < 4000.0
    assert last.meets and last.odds is not None and last.odds > 0.9 and last.budget_usd == 9.0
    assert last.spent_usd is not None and 0.1 < last.spent_usd < 2.0
    assert "deadline in" in last.text and "of $9.00 spent" in last.text
    with executor(tmp_path / "other", Watched(1)) as made:
        goal = made.status().goal
        assert goal is not None and goal.text == "" and goal.spent_usd is None


def test_a_goal_in_a_line() -> None:
    assert GoalStatus().text == ""
    missed = GoalStatus(deadline_s=3600.0, devices=8, odds=0.1, meets=False, earliest_s=5400.0)
    assert missed.text == "deadline in 1 h cannot be met: the earliest end is in 1 h 30 min; 8 devices needed"
    met = GoalStatus(deadline_s=90.0, devices=1, odds=0.95, meets=True, spent_usd=1.0)
    assert met.text == "deadline in 1 min 30 s, met with 95%; 1 device needed; $1.00 spent"
    assert missed.is_missed and not met.is_missed
    poor = GoalStatus(spent_usd=1.0, budget_usd=2.0, missing_usd=0.5)
    assert poor.text == "$1.00 of $2.00 spent; the budget does not suffice: $0.50 more are expected to be needed"
    assert poor.is_missed


def test_a_trial_that_takes_several_devices_keeps_them_and_gets_parked_ones_back(tmp_path: Path) -> None:
    backend = Watched(4)
    with executor(tmp_path, backend, deadline="10h") as made:
        assert made.submit_trialgroup(group(*[10.0] * 4)).wait(timeout=PATIENCE)
        long = made.submit_trialgroup(group(10.0, budget=50))
        for _ in long.results():
            if backend.released.qsize() >= 3:
                break
        wide = TrialGroup([Trial(unused, {"seconds": 1.0}, devices=3, budget=2)])
        assert made.submit_trialgroup(wide).wait(timeout=PATIENCE), "parked devices are asked for again"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"deadline": "soon"}, "deadline='soon'"),
        ({"deadline": 0}, "deadline=0"),
        ({"deadline": True}, "deadline=True"),
        ({"budget_usd": 5.0}, "budget_usd=5.0: needs price_per_device_hour"),
        ({"budget_usd": 5.0, "price_per_device_hour": 0.0}, "budget_usd=5.0: needs price_per_device_hour"),
        ({"budget_usd": -1.0, "price_per_device_hour": 1.0}, "budget_usd=-1.0"),
        ({"price_per_device_hour": -1.0}, "price_per_device_hour=-1.0"),
    ],
)
def test_goals_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidFieldError, match=problem):
        executor(tmp_path, Watched(1), **options)


def test_a_price_alone_changes_nothing(tmp_path: Path) -> None:
    with executor(tmp_path, Watched(4), price_per_device_hour=2.5) as made:
        assert made.submit_trialgroup(group(10.0)).wait(timeout=PATIENCE)
        assert len(made.devices) == 4
    facts = json.loads((tmp_path / "run" / "session.json").read_text())
    assert facts["price_per_device_hour"] == 2.5 and facts["device_s"] > 0.0
    assert Goals(price_per_device_hour=2.5).cost(3600.0) == 2.5
