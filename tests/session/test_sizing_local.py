"""Sessions sized by a deadline on real lanes: parked devices, sweeps that end in time, and going on afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import Device, FluidExecutor, LimitReachedError, Trial, TrialGroup
from fluid.backends.local import LocalBackend
from fluid.errors import InvalidFieldError
from fluid.search import uniform
from fluid.session.handle import TrialGroupHandle

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0


def train(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, int], int]]:
    done = state or 0
    while True:
        time.sleep(config["seconds"])
        done += 1
        yield {"total": done}, done


def group(*seconds: float, budget: int) -> TrialGroup:
    return TrialGroup([Trial(train, {"seconds": each}, budget=budget, max_width=1) for each in seconds])


def devices(count: int) -> list[Device]:
    return [Device(index, kind="cpu") for index in range(count)]


def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE / 0.05)):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never holds")


def test_a_local_backend_parks_devices_and_uses_them_again() -> None:
    with LocalBackend(devices(3), preload=[]) as backend:
        assert backend.scaling_limits is not None and backend.scaling_limits.is_off
        assert backend.can_give_back(2) and not backend.can_give_back(3)
        backend.give_back(2)
        backend.give_back(0)
        backend.ask(2)
        (added,) = backend.poll(timeout=PATIENCE)
        assert added.device.index == 2, "the one that was parked first"  # type: ignore[attr-defined]
        backend.ask(3)
        assert [event.device.index for event in backend.poll(timeout=PATIENCE)] == [0]  # type: ignore[attr-defined]
        backend.ask(4)  # One that is still leaving comes back as soon as it can.
        backend.give_back(1)
        assert [event.device.index for event in backend.poll(timeout=PATIENCE)] == [1]  # type: ignore[attr-defined]
        backend.give_back(1)
        assert backend.poll(timeout=0.0) == []


@pytest.mark.slow
def test_idle_devices_are_parked_and_come_back_for_the_next_group(tmp_path: Path) -> None:
    backend = LocalBackend(devices(4), preload=[])
    with FluidExecutor(backend, packing="off", deadline="1h", run_dir=tmp_path / "run", verbose=0) as made:
        made.submit_trialgroup(group(0.1, *[0.01] * 3, budget=300))
        eventually(lambda: len(made.devices) < 4)
        assert made.max_devices == 4
        other = made.submit_trialgroup(group(*[0.02] * 8, budget=5))
        assert other.wait(timeout=PATIENCE)
        assert other.done


@pytest.mark.slow
def test_at_the_deadline_real_trials_are_saved_and_go_on_without_repeating(tmp_path: Path) -> None:
    with FluidExecutor("local", 2, packing="off", deadline=6.0, run_dir=tmp_path / "run", verbose=0) as made:
        handle = made.submit_trialgroup(group(*[0.05] * 4, budget=150))  # 15 s on two devices
        with pytest.raises(LimitReachedError) as caught:
            handle.wait(timeout=PATIENCE)
        assert caught.value.unsaved == () and caught.value.unfinished >= 2
        with pytest.raises(LimitReachedError):
            list(handle.results())
    made = FluidExecutor.resume(tmp_path / "run", backend="local", devices=2, verbose=0, deadline=None)
    with made:
        (again,) = made.handles
        results = again.results()
        seen: dict[str, list[tuple[int, int]]] = {}
        for result in results:
            seen.setdefault(result.trial_id, []).append((result.iteration, result.metrics["total"]))
            if sum(map(len, seen.values())) > 450:
                break
        for rows in seen.values():
            assert rows == [(number, number) for number in range(1, len(rows) + 1)], "no iteration is repeated or lost"


@pytest.mark.slow
def test_a_sweep_in_an_executor_that_stays_open_ends_by_its_own_deadline(tmp_path: Path) -> None:
    space = {"seconds": uniform(0.05, 0.1)}
    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path / "run", verbose=0) as made:
        result = fluid.run(train, space, metric="total", mode="max", algorithm="random", samples=40, deadline=4)
        assert (
            result.notes == ("The sweep ended early: the deadline of 4 s has come.",) and result.state == "UNFINISHED"
        )
        assert {trial.state for trial in result.trials} <= {"DONE", "UNFINISHED"}
        again = fluid.run(
            train, space, metric="total", mode="max", algorithm="random", samples=2, budget=2, deadline="1h"
        )
        assert not again.notes and len(again.trials) == 2
        eventually(lambda: len(made.devices) == 2)


@pytest.mark.slow
def test_a_sweep_of_its_own_is_unfinished_at_its_deadline_and_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fast = tmp_path / "fast"

    def train_slowly_first(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, int], int]]:
        done = state or 0
        while True:
            # No trial can end in time at first, on however many devices.
            time.sleep(config["seconds"] if fast.exists() else 0.5)
            done += 1
            yield {"total": done}, done

    def sweep(**more: Any) -> fluid.SweepResult:
        space = {"seconds": uniform(0.001, 0.002)}
        return fluid.run(
            train_slowly_first,
            space,
            metric="total",
            mode="max",
            algorithm="random",
            samples=30,
            budget=40,
            run_dir=tmp_path / "run",
            **more,
        )

    first = sweep(deadline=5.0)
    assert first.state == "UNFINISHED" and first.notes == ("The sweep ended early: the deadline of 5 s has come.",)
    assert "resume=True) goes on" in capfd.readouterr().err
    fast.touch()
    second = sweep(resume=True, deadline="2h")
    assert second.state == "DONE" and all(trial.iteration == 40 for trial in second.trials)
    for trial in second.trials:
        assert [result.iteration for result in trial.results] == list(range(1, 41))


def test_a_trial_that_is_suggested_as_the_deadline_comes_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(self: TrialGroupHandle, *trials: Trial) -> None:
        raise LimitReachedError("the deadline of 8 s has come", tmp_path, unfinished=1)

    monkeypatch.setattr(TrialGroupHandle, "add", add)  # What it does once the session has ended.
    space = {"seconds": uniform(0.001, 0.002)}
    with FluidExecutor("local", 1, max_packing=1, run_dir=tmp_path / "run", verbose=0) as made:
        result = fluid.run(
            *(train, space), metric="total", mode="max", algorithm="tpe", samples=50, budget=2, executor=made
        )
    assert result.notes == ("The sweep ended early: the deadline of 8 s has come.",) and result.state == "UNFINISHED"


@pytest.mark.parametrize("value", ["tomorrow", -1, 0, float("nan"), True])
def test_a_deadline_of_a_sweep_that_is_none_is_refused(value: Any) -> None:
    before = threading.active_count()
    with pytest.raises(InvalidFieldError, match="deadline="):
        fluid.run(train, {"seconds": 0.1}, metric="total", mode="max", deadline=value)
    assert threading.active_count() == before


def test_a_listener_hears_of_the_end_though_nothing_had_started_by_the_deadline(tmp_path: Path) -> None:
    class Listener(fluid.TrialListener):
        broken = threading.Event()

        def on_broken(self, error: BaseException) -> None:
            self.broken.set()

    nowhere = fluid.Requires(tags=["none has it"], wait=True)
    with FluidExecutor("local", 1, run_dir=tmp_path / "run", deadline=0.5, verbose=0) as executor:
        waiting = Trial(train, {"seconds": 0.0}, requires=nowhere)
        executor.submit_trialgroup(TrialGroup([waiting]), Listener())
        assert Listener.broken.wait(PATIENCE)
