"""Autoscaling: the policy by itself, and whole sessions on the virtual clock."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid import Device, FluidExecutor, Result, Trial, TrialGroup, TrialListener
from fluid.backends.base import ScalingLimits
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.errors import InvalidFieldError
from fluid.session.scaling.scaling import SETTLED_S, Scaling

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


# -- the policy ---------------------------------------------------------------------------------------------


def scaling(most: int | None = None, idle_timeout_s: float | None = None) -> Scaling:
    return Scaling(ScalingLimits.of(most, idle_timeout_s))


def test_devices_are_asked_for_once_trials_have_waited() -> None:
    policy = scaling(8)
    assert policy.wake_at is None
    assert policy.decide(1.0, 2, 3) == 0 and policy.wake_at == 1.0 + SETTLED_S
    assert policy.decide(5.9, 2, 4) == 0
    assert policy.decide(6.0, 2, 4) == 5, "for those that were wanted all the time"
    assert policy.decide(6.5, 2, 4) == 5 and policy.wake_at == 6.5 + SETTLED_S
    assert policy.decide(11.5, 2, 4) == 6 and policy.wake_at is None


def test_no_more_are_asked_for_than_the_session_may_hold() -> None:
    policy = scaling(4)
    policy.decide(0.0, 2, 100)
    assert policy.decide(9.0, 2, 100) == 4
    assert policy.decide(10.0, 4, 98) == 0 and policy.wake_at is None, "they have come"
    policy = scaling(2)
    policy.decide(0.0, 3, 100)
    assert policy.decide(9.0, 3, 100) == 0, "it began with more"


def test_a_moment_in_which_no_trial_waits_starts_the_wait_anew() -> None:
    policy = scaling(8)
    policy.decide(0.0, 1, 1)
    assert policy.decide(4.0, 1, 0) == 0 and policy.wake_at is None
    assert policy.decide(5.0, 1, 1) == 0 and policy.wake_at == 5.0 + SETTLED_S


def test_what_was_asked_for_is_withdrawn_once_trials_do_not_wait_any_more() -> None:
    policy = scaling(8)
    policy.decide(0.0, 1, 5)
    assert policy.decide(5.0, 1, 5) == 6
    assert policy.decide(6.0, 1, 2) == 6
    assert policy.decide(8.0, 1, 3) == 6
    assert policy.decide(11.0, 1, 2) == 4, "the most that was wanted since"
    policy.decide(12.0, 1, 0)
    assert policy.decide(17.0, 1, 0) == 0 and policy.wake_at is None


def test_a_device_that_comes_changes_nothing_of_what_is_asked_for_in_all() -> None:
    policy = scaling(8)
    policy.decide(0.0, 1, 3)
    assert policy.decide(5.0, 1, 3) == 4
    assert policy.decide(6.0, 2, 2) == 4 and policy.wake_at is None
    assert policy.decide(7.0, 1, 3) == 4 and policy.wake_at is None, "one was lost, and is asked for again"


def test_without_a_limit_none_is_asked_for() -> None:
    policy = scaling(None, 60.0)
    policy.decide(0.0, 1, 5)
    assert policy.decide(9.0, 1, 5) == 0 and policy.wake_at is None


def test_a_device_is_given_back_when_it_has_been_idle_for_long() -> None:
    policy = scaling(None, 60.0)
    assert policy.idle(0.0, (), {}, trials_wait=False) == [] and policy.wake_at is None
    policy.devices_changed(10.0)
    assert policy.wake_at == 70.0
    assert policy.idle(30.0, {5, 6}, {6: 20.0}, trials_wait=False) == [] and policy.wake_at == 70.0
    assert policy.idle(70.0, {5, 6}, {0: 0.0, 6: 20.0}, trials_wait=False) == [] and policy.wake_at == 80.0
    assert policy.idle(80.0, {5, 6}, {0: 0.0, 6: 20.0}, trials_wait=False) == [6]
    assert policy.idle(140.0, {5}, {0: 0.0, 5: 140.0}, trials_wait=False) == [] and policy.wake_at == 200.0
    assert policy.idle(200.0, {5}, {0: 0.0, 5: 140.0}, trials_wait=False) == [5]
    policy.idle(260.0, (), {0: 0.0}, trials_wait=False)
    assert policy.wake_at is None, "only those that the session began with are left"


def test_no_device_is_given_back_while_trials_wait() -> None:
    policy = scaling(None, 60.0)
    policy.devices_changed(0.0)
    assert policy.idle(60.0, {5}, {5: 0.0}, trials_wait=True) == [] and policy.wake_at == 120.0
    assert policy.idle(120.0, {5}, {5: 0.0}, trials_wait=False) == [5]


@given(
    st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(0, 6), st.integers(0, 9)), max_size=30),
    st.integers(1, 6),
    st.floats(0.0, 9.0),
)
def test_it_never_asks_for_too_many_and_never_wakes_the_session_without_end(
    steps: list[tuple[float, int, int]], most: int, timeout: float
) -> None:
    policy, now = scaling(most, timeout), 0.0
    policy.devices_changed(now)
    for passed, held, demand in steps:
        now += passed
        assert policy.decide(now, held, demand) <= most
        policy.idle(now, {1}, {1: now}, trials_wait=demand > 0)
        assert policy.wake_at is None or policy.wake_at > now


@pytest.mark.parametrize(("autoscale", "idle_timeout_s"), [(0, None), (1.5, None), (True, None), (None, -1.0)])
def test_limits_that_are_none_are_refused(autoscale: Any, idle_timeout_s: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"autoscale|idle_timeout_s"):
        SimulatedBackend(lambda *_: Truth(1.0), autoscale=autoscale, idle_timeout_s=idle_timeout_s)


# -- sessions on the virtual clock --------------------------------------------------------------------------


def seconds(at: float) -> float:
    """Without the milliseconds for which the session may have waited for its submitter."""
    return round(at, 1)


class Watched(SimulatedBackend):
    """A simulated backend that tells what it was asked for, and what was given back."""

    def __init__(self, devices: int = 1, **options: Any) -> None:
        super().__init__(lambda _, config: Truth(config["seconds"]), map(Device, range(devices)), saves=True, **options)
        self.asks: list[tuple[float, int]] = []
        self.released: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()

    def ask(self, devices: int) -> None:
        self.asks.append((seconds(self.now()), devices))
        super().ask(devices)

    def give_back(self, device_id: int) -> None:
        super().give_back(device_id)
        self.released.put((seconds(self.now()), device_id))


def unused(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    raise AssertionError("no code runs")
    yield {}


def group(trials: int, seconds: float = 10.0, budget: int = 3) -> TrialGroup:
    return TrialGroup([Trial(unused, {"seconds": seconds}, budget=budget) for _ in range(trials)])


def entries(folder: Path, *kinds: str) -> list[tuple[float, str, int]]:
    """What the journal says of devices: when, what, and which device."""
    lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    found = []
    for line in lines:
        if line["what"] in kinds:
            index = line["device"]["index"] if "device" in line else line["device_id"]
            found.append((seconds(line["at"]), line["what"], index))
    return found


def test_devices_are_asked_for_used_and_given_back(tmp_path: Path) -> None:
    backend = Watched(autoscale=3, idle_timeout_s=25.0, boot_s=20.0)
    with FluidExecutor(backend, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        assert (len(executor.devices), executor.max_devices) == (1, 3)
        handle = executor.submit_trialgroup(group(6))
        assert handle.wait(timeout=PATIENCE)
        results = list(handle.results())
        back = [backend.released.get(timeout=PATIENCE) for _ in range(2)]
        assert [device.index for device in executor.devices] == [0]
        again = executor.submit_trialgroup(group(1))
        assert again.wait(timeout=PATIENCE)
    assert sorted(result.iteration for result in results) == sorted([1, 2, 3] * 6)
    assert {result.device_ids for result in results} == {(0,), (1,), (2,)}
    # Five trials wait from the beginning; two devices come, each for two trials.
    assert backend.asks == [(5.0, 3), (25.0, 0)]
    came = [(at, index) for at, _, index in entries(tmp_path / "run", "DeviceAdded")]
    assert came == [(0.0, 0), (25.0, 1), (25.0, 2)]
    assert sorted(back) == [(110.0, 1), (110.0, 2)]


def test_what_was_asked_for_is_withdrawn_when_its_trials_have_ended(tmp_path: Path) -> None:
    class Looks(TrialListener):
        """Looks how many devices were asked for, at each result."""

        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_result(self, result: Result) -> None:
            self.seen.append(executor.status().asked)

    backend, looks = Watched(autoscale=3, boot_s=1000.0), Looks()
    with FluidExecutor(backend, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        assert executor.submit_trialgroup(group(3), looks).wait(timeout=PATIENCE)
        assert executor.submit_trialgroup(group(1)).wait(timeout=PATIENCE)
    # One trial waits from 30 s on, and none from 60 s on.
    assert backend.asks == [(5.0, 3), (35.0, 2), (65.0, 0)]
    assert looks.seen == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert [index for _, _, index in entries(tmp_path / "run", "DeviceAdded")] == [0]


def test_without_devices_the_session_asks_for_the_first(tmp_path: Path) -> None:
    backend = Watched(0, autoscale=2, boot_s=3.0)
    with FluidExecutor(backend, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        assert executor.submit_trialgroup(group(4)).wait(timeout=PATIENCE)
    assert backend.asks == [(5.0, 2), (8.0, 0)]


def test_by_default_nothing_is_asked_for_and_nothing_given_back(tmp_path: Path) -> None:
    backend = Watched()
    with FluidExecutor(backend, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        assert executor.submit_trialgroup(group(3)).wait(timeout=PATIENCE)
        executor.add_device(Device(7))
        assert executor.submit_trialgroup(group(6)).wait(timeout=PATIENCE)
        assert executor.submit_trialgroup(group(1, budget=100)).wait(timeout=PATIENCE)
        assert [device.index for device in executor.devices] == [0, 7] and executor.max_devices == 2
    assert backend.asks == []


def test_states_that_an_idle_device_keeps_are_saved_before_it_is_given_back(tmp_path: Path) -> None:
    backend = Watched(autoscale=2, idle_timeout_s=10.0)
    with FluidExecutor(backend, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(group(2, budget=5))
        assert handle.wait(timeout=PATIENCE)
        assert backend.released.get(timeout=PATIENCE) == (65.0, 1)
        for trial_id in {result.trial_id for result in handle.results()}:
            handle.extend(trial_id, 2)
        assert handle.wait(timeout=PATIENCE)
        results = list(handle.results())
    assert sorted(result.iteration for result in results) == sorted([*range(1, 8)] * 2), "no iteration is repeated"


def test_a_device_that_the_user_gives_up_goes_back_too(tmp_path: Path) -> None:
    backend = Watched(autoscale=2)
    with FluidExecutor(backend, packing="off", run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(group(2, budget=2))
        assert handle.wait(timeout=PATIENCE)
        executor.remove_device(1)
        assert backend.released.get(timeout=PATIENCE)[1] == 1
        executor.remove_device(0)
        assert backend.released.empty(), "the session began with it"
