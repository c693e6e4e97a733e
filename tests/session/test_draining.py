"""FluidExecutor.drain and drain_all, on real lanes: nothing is lost or repeated, and what cannot be saved is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import Device, FluidExecutor, Trial, TrialGroup, TrialListener
from fluid.errors import FluidError, InvalidFieldError


class Count:
    """Counts its iterations, and waits a little in each."""

    def setup(self, config: dict[str, Any]) -> None:
        self.total = 0

    def step(self) -> dict[str, int]:
        time.sleep(0.02)
        self.total += 1
        return {"total": self.total}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "total").write_text(str(self.total))

    def load_checkpoint(self, folder: str) -> None:
        self.total = int(Path(folder, "total").read_text())


def endless(config: dict[str, Any]) -> Iterator[dict[str, int]]:
    while True:
        time.sleep(0.01)
        yield {}


def executor(folder: Path, devices: int = 2) -> FluidExecutor:
    return FluidExecutor("local", devices, run_dir=folder, verbose=0, max_packing=1)


def group(*names: str, budget: int = 40) -> TrialGroup:
    return TrialGroup([Trial(Count, {}, budget=budget, trial_id=name) for name in names])


@pytest.mark.slow
def test_a_drained_device_loses_nothing(tmp_path: Path) -> None:
    with executor(tmp_path) as made:
        handle = made.submit_trialgroup(group("a", "b"))
        results = handle.results()
        for _ in range(6):
            next(results)
        assert made.drain(0, 60.0)
        assert [device.index for device in made.devices] == [1]
        assert handle.wait(timeout=90)
        for name in "ab":
            rows = [(one.iteration, one.metrics["total"]) for one in handle.results() if one.trial_id == name]
            assert rows == [(number, number) for number in range(1, 41)]
        last = list(handle.results())[-1]
        assert last.device_ids == (1,)
        with pytest.raises(InvalidFieldError, match="device=0: is not in use"):
            made.drain(Device(0, kind="cpu"), 1.0)
        with pytest.raises(InvalidFieldError, match="deadline_s"):
            made.drain(1, -1.0)


@pytest.mark.slow
def test_a_session_that_was_drained_and_closed_repeats_nothing(tmp_path: Path) -> None:
    with executor(tmp_path, 1) as made:
        results = made.submit_trialgroup(group("a", "b")).results()
        for _ in range(5):
            next(results)
        assert made.drain_all(60.0)
        status = made.status()
        assert status.groups[0].trials == {"QUEUED": 2}
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    with FluidExecutor.resume(tmp_path, backend="local", devices=1, verbose=0) as made:
        (handle,) = made.handles
        assert handle.wait(timeout=90)
        totals = [(one.trial_id, one.iteration, one.metrics["total"]) for one in handle.results()]
    assert sorted(totals) == [(name, number, number) for name in "ab" for number in range(1, 41)]
    assert [(line["trial"], line["iteration"]) for line in lines] == [key[:2] for key in totals[: len(lines)]]


@pytest.mark.slow
def test_what_cannot_be_saved_runs_until_the_deadline(tmp_path: Path) -> None:
    with executor(tmp_path, 1) as made:
        handle = made.submit_trialgroup(TrialGroup([Trial(endless, {}, budget=10**6)]))
        next(handle.results())
        assert not made.drain_all(0.2)


def test_a_listener_cannot_wait_for_a_drain(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    heard = threading.Event()

    class Drains(TrialListener):
        def on_result(self, result: Any) -> None:
            try:
                made.drain_all(1.0)
            except FluidError as error:
                errors.append(error)
            heard.set()

    with executor(tmp_path, 1) as made:
        made.submit_trialgroup(group("a"), Drains())
        assert heard.wait(90)
    assert "another thread" in str(errors[0])


def test_a_drain_ends_with_the_session(tmp_path: Path) -> None:
    made = executor(tmp_path, 1)
    handle = made.submit_trialgroup(TrialGroup([Trial(endless, {}, budget=10**6)]))
    next(handle.results())
    errors: list[BaseException] = []

    def drain() -> None:
        try:
            made.drain_all(600.0)
        except FluidError as error:
            errors.append(error)

    thread = threading.Thread(target=drain)
    thread.start()
    while not made._session._state.drained:
        time.sleep(0.01)
    made.close()
    thread.join(90)
    assert "closed" in str(errors[0])


@pytest.mark.slow
def test_an_elastic_trial_goes_on_on_the_device_that_is_left(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fluid.elastic import ElasticTrainable

    class Wide(ElasticTrainable):
        def build(self, config: dict[str, Any]) -> None:
            self.model = torch.nn.Linear(1, 1)
            torch.nn.init.zeros_(self.model.weight)
            self.total = 0

        def train_iteration(self) -> dict[str, Any]:
            time.sleep(0.02)
            self.total += 1
            with torch.no_grad():
                self.model.weight += 1.0
            return {"total": self.total, "weight": self.model.weight.item(), "members": self.size}

        def extra_state(self) -> Any:
            return self.total

        def load_extra_state(self, state: Any) -> None:
            self.total = state

    with FluidExecutor("local", 2, packing="off", run_dir=tmp_path, verbose=0) as made:
        handle = made.submit_trialgroup(TrialGroup([Trial(Wide, {}, 600, trial_id="wide", max_width=2)]))
        wide = 0
        for result in handle.results():
            wide += result.width == 2
            if wide == 5:
                break
        assert wide == 5 and made.drain(1, 60.0), "nothing is lost"
        assert [device.index for device in made.devices] == [0]
        assert handle.wait(timeout=90) and handle.states == {"wide": "DONE"} and handle.failures == {}
        results = list(handle.results())
        assert [result.iteration for result in results] == list(range(1, 601))
        for result in results:
            assert (result.metrics["total"], result.metrics["weight"]) == (result.iteration, result.iteration)
            assert result.metrics["members"] == result.width == len(result.device_ids)
        assert results[-1].device_ids == (0,)
