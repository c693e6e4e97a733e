"""Checkpoints that outlive the session, of real processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid import kept_checkpoints
from fluid.backends.local import LocalBackend
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.errors import InvalidFieldError
from fluid.executor import FluidExecutor
from fluid.lane.checkpoints.seal import damage_of
from fluid.resources import Device
from fluid.trialgroup import Search, Shown, Trial, TrialGroup

PATIENCE = 90.0
SMALLEST = Search("loss", "min", extends=False)


class Valley:
    """Its loss falls until iteration ``best`` and rises then; checkpoints say which iteration they are of."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.done = config, 0

    def step(self) -> dict[str, Any]:
        self.done += 1
        if self.done == self.config.get("raises_at"):
            raise RuntimeError("it ends here")
        if self.done == self.config.get("dies_at"):
            os._exit(1)
        time.sleep(self.config.get("seconds", 0.0))
        if "folder" in self.config:
            Path(self.config["folder"], f"begun-{self.done}").touch()
            deadline = time.monotonic() + PATIENCE
            while not Path(self.config["folder"], f"go-{self.done}").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        loss = abs(self.done - self.config["best"]) + self.config.get("floor", 0.0)
        return {"loss": loss, "deep": {"loss": -loss}, "holes": float("nan") if self.done % 2 else loss}

    def save_checkpoint(self, folder: str) -> None:
        if self.config.get("slow_save"):
            time.sleep(self.config["slow_save"])
        if self.config.get("cannot_save"):
            raise RuntimeError("not this one")
        Path(folder, "done").write_text(str(self.done) + " " * self.config.get("size", 0))

    def load_checkpoint(self, folder: str) -> None:
        self.done = int(Path(folder, "done").read_text())


def generator(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for step in range(100):
        yield {"loss": step}


def remembers(config: dict[str, Any], state: int | None) -> Iterator[tuple[dict[str, Any], int]]:
    done = state or 0
    while True:
        done += 1
        yield {"loss": abs(done - config["best"])}, done


def executor(folder: Path, keep: str, **options: Any) -> FluidExecutor:
    options = {"backend": "local", "devices": 2, **options}
    return FluidExecutor(run_dir=folder, keep=keep, verbose=0, **options)


def valley(name: str, *, best: int = 2, budget: int = 4, **config: Any) -> Trial:
    return Trial(Valley, {"best": best, **config}, budget=budget, trial_id=name)


def kept(folder: Path, name: str) -> list[int]:
    """Iterations of what is kept of a trial, each whole and of that iteration."""
    whole = []
    for one in kept_checkpoints(folder, name):
        if "kept" in one.path.parts:
            damage = damage_of(str(one.path.parent))
            if damage is not None and not one.path.exists():
                return kept(folder, name)  # A better one has taken its place since.
            assert damage is None
            assert int((one.path / "done").read_text()) == one.iteration
            whole.append(one.iteration)
    return whole


@pytest.mark.slow
def test_the_last_of_each_trial_is_kept(tmp_path: Path) -> None:
    trials = [valley("done"), valley("extended"), valley("failed", raises_at=3), valley("endless", budget=10**6)]
    with executor(tmp_path, "last", max_failures=0) as session:
        handle = session.submit_trialgroup(TrialGroup(trials[:3]))
        assert handle.wait(PATIENCE)
        handle.extend("extended", by=2)
        assert handle.wait(PATIENCE)
        other = session.submit_trialgroup(TrialGroup(trials[3:]))
        assert next(other.results()).iteration == 1
        other.stop("endless")
        assert other.wait(PATIENCE)
        assert session.session.await_kept(PATIENCE)
        assert kept(tmp_path, "done") == [4], "it need not be closed first"
    assert (kept(tmp_path, "done"), kept(tmp_path, "extended")) == ([4], [6])
    last = max(int(json.loads(line)["iteration"]) for line in lines(tmp_path, "endless"))
    assert kept(tmp_path, "endless")[0] >= last
    assert not kept_checkpoints(tmp_path, "failed") or kept(tmp_path, "failed") <= [2]


def lines(folder: Path, name: str) -> list[str]:
    return [line for line in (folder / "results.jsonl").read_text().splitlines() if json.loads(line)["trial"] == name]


@pytest.mark.slow
def test_of_a_failed_trial_the_newest_good_one_is_kept(tmp_path: Path) -> None:
    with executor(tmp_path, "last", max_failures=0) as session:
        handle = session.submit_trialgroup(TrialGroup([valley("a", budget=2, raises_at=4)]))
        assert handle.wait(PATIENCE)
        handle.extend("a", by=2)
        assert handle.wait(PATIENCE)
        assert handle.states == {"a": "FAILED"}
    assert kept(tmp_path, "a") == [2], "it was done after that"


def dies(name: str, **config: Any) -> Trial:
    """A trial that ends with its process in iteration 3, which is saved by itself after each one before that."""
    return valley(name, dies_at=3, seconds=1.1, **config)


def files_of(folder: Path, name: str) -> set[str]:
    """Where checkpoints of a trial are in the run folder."""
    return {path.parent.name for path in folder.glob(f"trials/{name}/*/[0-9]*")}


@pytest.mark.slow
def test_the_last_is_kept_where_no_process_is_left(tmp_path: Path) -> None:
    """Each trial ends with the only process of its device."""
    with executor(tmp_path, "last", max_failures=0, max_packing=1, spare_lanes=0) as session:
        handle = session.submit_trialgroup(TrialGroup([dies(name) for name in "abc"]))
        assert handle.wait(PATIENCE) and set(handle.states.values()) == {"FAILED"}
        for device in (0, 1):
            session.remove_device(device)
        assert session.session.await_kept(PATIENCE)
        assert [kept(tmp_path, name) for name in "abc"] == [[2]] * 3, "it need not be closed first"
    assert [kept(tmp_path, name) for name in "abc"] == [[2]] * 3


@pytest.mark.slow
def test_the_last_of_processes_that_are_gone_is_kept_before_all_is_closed(tmp_path: Path) -> None:
    with executor(tmp_path, "last", max_failures=0, devices=1, spare_lanes=0) as session:
        assert session.submit_trialgroup(TrialGroup([dies("a")])).wait(PATIENCE)
    assert kept(tmp_path, "a") == [2]


@pytest.mark.slow
def test_the_best_are_kept_where_no_process_is_left(tmp_path: Path) -> None:
    with executor(tmp_path, "best:2", max_failures=0, max_packing=1) as session:
        trials = [dies(name, best=2, floor=floor) for name, floor in zip("abc", (0.5, 0.1, 0.2), strict=True)]
        handle = session.submit_trialgroup(TrialGroup(trials, search=SMALLEST))
        assert handle.wait(PATIENCE) and set(handle.states.values()) == {"FAILED"}
        for device in (0, 1):
            session.remove_device(device)
        assert session.session.await_kept(PATIENCE)
        assert [kept(tmp_path, name) for name in "abc"] == [[], [2], [2]]


@pytest.mark.slow
@pytest.mark.parametrize(("keep", "is_left"), [("last", {"kept"}), ("none", set())])
def test_forgetting_a_trial_deletes_its_checkpoints_where_no_process_is_left(
    tmp_path: Path, keep: str, is_left: set[str]
) -> None:
    from waiting import eventually

    backend = LocalBackend(2, run_dir=tmp_path / "backend")
    in_memory = Path(backend._host.folders.memory_folder, "a")
    with executor(tmp_path, keep, max_failures=0, backend=backend, devices=None) as session:
        handle = session.submit_trialgroup(TrialGroup([dies("a")]))
        assert handle.wait(PATIENCE)
        for device in (0, 1):
            session.remove_device(device)
        assert session.session.await_kept(PATIENCE)
        assert in_memory.exists() or "checkpoints" in files_of(tmp_path / "backend", "a")
        handle.forget("a")
        eventually(lambda: not in_memory.exists() and files_of(tmp_path / "backend", "a") == is_left)
    assert files_of(tmp_path, "a") == is_left, "what was kept has come to the run folder"


@pytest.mark.slow
def test_what_is_forgotten_at_last_is_deleted_before_all_is_closed(tmp_path: Path) -> None:
    with executor(tmp_path, "none", max_failures=0, devices=1) as session:
        handle = session.submit_trialgroup(TrialGroup([dies("a"), valley("b", slow_save=1.0)]))
        assert handle.wait(PATIENCE)
        for name in "ab":
            handle.forget(name)
    assert not list(tmp_path.glob("trials/*/checkpoints/*")), "also what a lane has saved since"


@pytest.mark.slow
def test_best_keeps_exactly_the_best_iteration_of_the_best_trials(tmp_path: Path) -> None:
    floors = [0.7, 0.2, 0.9, 0.0, 0.5, 0.1]
    trials = [valley(f"t{i}", best=1 + i % 3, floor=floor) for i, floor in enumerate(floors)]
    with executor(tmp_path, "best:3") as session:
        assert session.submit_trialgroup(TrialGroup(trials, search=SMALLEST)).wait(PATIENCE)
    found = {f"t{i}": kept(tmp_path, f"t{i}") for i in range(6)}
    assert found == {"t0": [], "t1": [2], "t2": [], "t3": [1], "t4": [], "t5": [3]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "shown", "expected"),
    [
        (Search("deep/loss", "max"), None, 2),
        (Search("holes", "min"), None, 2),
        (Search("loss"), None, 2),
        (Search("loss", "max"), None, 4),
        (Search("loss", "max"), Shown("1", metrics="deep"), 2),
        (Search("missing", "max"), None, None),
    ],
)
def test_metrics_by_name(tmp_path: Path, search: Search, shown: Shown | None, expected: int | None) -> None:
    trial = Trial(Valley, {"best": 2}, budget=4, trial_id="a", shown=shown)
    with executor(tmp_path, "best:1", devices=1) as session:
        assert session.submit_trialgroup(TrialGroup([trial], search=search)).wait(PATIENCE)
    assert kept(tmp_path, "a") == ([] if expected is None else [expected])


@pytest.mark.slow
def test_a_function_with_a_state_is_kept(tmp_path: Path) -> None:
    with executor(tmp_path, "best:1", devices=1) as session:
        group = TrialGroup([Trial(remembers, {"best": 3}, budget=5, trial_id="a")], search=SMALLEST)
        assert session.submit_trialgroup(group).wait(PATIENCE)
    assert [one.iteration for one in kept_checkpoints(tmp_path, "a")] == [3]


@pytest.mark.slow
def test_the_best_iteration_is_there_with_its_result(tmp_path: Path) -> None:
    """Also where saving takes long, and the session ends at once."""
    with executor(tmp_path, "best:1", devices=1) as session:
        trial = valley("a", best=3, budget=3, slow_save=0.5)
        for result in session.submit_trialgroup(TrialGroup([trial], search=SMALLEST)).results():
            assert kept(tmp_path, "a")[-1] >= result.iteration
    assert kept(tmp_path, "a") == [3]


@pytest.mark.slow
def test_the_iteration_in_which_a_trial_is_stopped_can_be_the_best(tmp_path: Path) -> None:
    from waiting import eventually  # Drivers of other tests import this module without tests/ in their path.

    run_dir = tmp_path / "run"
    with executor(run_dir, "best:1", devices=1) as session:
        trial = valley("a", best=99, budget=99, seconds=0.02, folder=str(tmp_path))
        handle = session.submit_trialgroup(TrialGroup([trial], search=SMALLEST))
        (tmp_path / "go-1").touch()
        (tmp_path / "go-2").touch()
        eventually((tmp_path / "begun-3").exists)
        eventually(lambda: kept(run_dir, "a") == [2])
        handle.stop("a")
        eventually(lambda: handle.states == {"a": "STOPPING"})
        for iteration in range(3, 100):  # Its lane may hear of the stop after the third.
            (tmp_path / f"go-{iteration}").touch()
        assert handle.wait(PATIENCE)
        last = [result.iteration for result in handle.results()][-1]
        assert last >= 3 and handle.best().iteration == last
    assert kept(run_dir, "a") == [last]


@pytest.mark.slow
def test_closing_waits_for_the_last_checkpoint(tmp_path: Path) -> None:
    with executor(tmp_path, "last", devices=1) as session:
        assert session.submit_trialgroup(TrialGroup([valley("a", slow_save=3.0)])).wait(PATIENCE)
    assert kept(tmp_path, "a") == [4], "its process would have had two seconds to end"


@pytest.mark.slow
def test_loading_waits_for_what_is_being_saved(tmp_path: Path) -> None:
    with executor(tmp_path, "last", devices=1) as session:
        handle = session.submit_trialgroup(TrialGroup([valley("a", slow_save=1.0)]))
        assert handle.wait(PATIENCE)
        assert handle.load_checkpoint("a").done == 4


@pytest.mark.slow
def test_a_group_without_a_metric_is_refused(tmp_path: Path) -> None:
    with executor(tmp_path, "best:1", devices=1) as session:
        for search in (None, Search(), Search("", "min")):
            with pytest.raises(InvalidFieldError, match=r"^search=.*keep='best:1' needs a metric"):
                session.submit_trialgroup(TrialGroup([valley("a")], search=search))
        assert session.submit_trialgroup(TrialGroup([valley("a")], search=SMALLEST)).wait(PATIENCE)


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"^keep='all'"):
        executor(tmp_path, "all")
    with pytest.raises(InvalidFieldError, match=r"^checkpoint_bytes='much'"):
        executor(tmp_path, "last", checkpoint_bytes="much")
    assert not (tmp_path / "session.json").exists()


@pytest.mark.slow
def test_nothing_is_kept_of_what_cannot_be_saved_which_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with executor(tmp_path, "last") as session:
        trials = [Trial(generator, budget=2, trial_id=f"t{i}") for i in range(3)]
        assert session.submit_trialgroup(TrialGroup(trials)).wait(PATIENCE)
    told = [record.getMessage() for record in caplog.records if "is kept" in record.getMessage()]
    assert len(told) == 1 and told[0].startswith("no checkpoint of generator is kept: it cannot be saved")
    assert not list(tmp_path.glob("trials/*/kept"))


@pytest.mark.slow
def test_beyond_the_quota_nothing_further_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with executor(tmp_path, "last", devices=1, checkpoint_bytes="250kB") as session:
        group = TrialGroup([valley(f"t{i}", size=100_000) for i in range(4)])
        handle = session.submit_trialgroup(group)
        assert handle.wait(PATIENCE) and set(handle.states.values()) == {"DONE"}
    assert sorted(iteration for i in range(4) for iteration in kept(tmp_path, f"t{i}")) == [4, 4]
    told = [record.getMessage() for record in caplog.records if "is not kept" in record.getMessage()]
    assert len(told) == 1
    for part in ("trial 't", str(tmp_path), "checkpoint_bytes is used up", "250,000 bytes", "the trial goes on"):
        assert part in told[0]
    assert "is not kept: checkpoint_bytes is used up" in (tmp_path / "journal.jsonl").read_text()


@pytest.mark.slow
def test_a_better_one_of_the_same_trial_replaces_its_own_within_the_quota(tmp_path: Path) -> None:
    with executor(tmp_path, "best:1", devices=1, checkpoint_bytes=150_000) as session:
        group = TrialGroup([valley("a", best=4, size=100_000)], search=SMALLEST)
        assert session.submit_trialgroup(group).wait(PATIENCE)
    assert kept(tmp_path, "a") == [4]


@pytest.mark.slow
def test_a_trial_that_cannot_be_saved_after_all_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with executor(tmp_path, "best:1", devices=1) as session:
        group = TrialGroup([valley("a", best=9, cannot_save=True)], search=SMALLEST)
        handle = session.submit_trialgroup(group)
        assert [result.iteration for result in handle.results()] == [1, 2, 3, 4]
        assert handle.states == {"a": "DONE"}
    assert kept(tmp_path, "a") == []
    assert sum("not this one" in record.getMessage() for record in caplog.records) == 1
    assert (tmp_path / "trials/a/output.log").read_text().count("RuntimeError: not this one\n") == 1


@pytest.mark.slow
def test_forgetting_a_trial_leaves_what_is_kept_of_it(tmp_path: Path) -> None:
    with executor(tmp_path, "last", devices=1, max_failures=0) as session:
        handle = session.submit_trialgroup(TrialGroup([valley("a"), valley("b", budget=2, raises_at=3)]))
        assert handle.wait(PATIENCE)
        handle.extend("b", by=2)
        assert handle.wait(PATIENCE)
        for name in "ab":
            handle.forget(name)
        assert session.session.await_kept(PATIENCE)
    assert (kept(tmp_path, "a"), kept(tmp_path, "b")) == ([4], [2])


@pytest.mark.slow
def test_what_falls_out_of_the_best_can_still_be_extended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from waiting import eventually

    with executor(tmp_path, "best:1", devices=1) as session:
        first = valley("first", best=4, floor=0.5)
        handle = session.submit_trialgroup(TrialGroup([first], search=SMALLEST))
        assert handle.wait(PATIENCE)
        handle.add(valley("second", best=4))
        assert handle.wait(PATIENCE)
        assert session.session.await_kept(PATIENCE)
        eventually(lambda: (kept(tmp_path, "first"), kept(tmp_path, "second")) == ([], [4]))
        session.remove_device(0)
        session.add_device(Device(0))
        handle.extend("first", by=1)
        assert handle.wait(PATIENCE)
        assert [result.iteration for result in handle.results() if result.trial_id == "first"] == [1, 2, 3, 4, 5]
    assert "begins afresh" not in caplog.text, "its lane was lost, and with it the state that it kept"


def test_a_backend_with_a_folder_of_its_own(tmp_path: Path) -> None:
    with executor(tmp_path, "last", backend=LocalBackend(1), devices=None) as session:
        assert session.submit_trialgroup(TrialGroup([valley("a")])).wait(PATIENCE)
    assert kept(tmp_path, "a") == [4]


def test_a_simulated_backend_is_told_alike(tmp_path: Path) -> None:
    backend = SimulatedBackend(lambda trial_id, config: Truth(1.0), [Device(0)])
    with executor(tmp_path, "last", backend=backend, devices=None) as session:
        assert session.submit_trialgroup(TrialGroup([valley("a")])).wait(PATIENCE)
        assert session.session.await_kept(PATIENCE)


# -- sessions that go on --------------------------------------------------------------------------------------

DRIVER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_retention import SMALLEST, executor, valley
from fluid.trialgroup import TrialGroup
if __name__ == "__main__":
    session = executor(sys.argv[2], sys.argv[3])
    trials = [valley("a", best=2, budget=4), valley("b", best=3, floor=0.5, budget=10**6, seconds=0.05)]
    handle = session.submit_trialgroup(TrialGroup(trials, search=SMALLEST))
    for result in handle.results():
        print(result.trial_id, result.iteration, flush=True)
    time.sleep(600)
"""


def killed_session(folder: Path, keep: str) -> None:
    """A session whose driver is killed (SIGKILL) once ``a`` is done and ``b`` has done 6 iterations."""
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", DRIVER, here, str(folder), keep]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        waits_for = {"a 4\n", "b 6\n"}
        for line in driver.stdout:
            waits_for.discard(line)
            if not waits_for:
                break
        if keep == "last":
            deadline = time.monotonic() + PATIENCE
            while kept(folder, "a") != [4] and time.monotonic() < deadline:
                time.sleep(0.01)
        os.kill(driver.pid, signal.SIGKILL)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process unpickle what the driver of :func:`killed_session` has pickled."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_what_was_kept_survives_the_driver_and_the_session_that_goes_on(tmp_path: Path) -> None:
    killed_session(tmp_path, "best:1")
    assert kept(tmp_path, "a") == [2], "the files alone tell"
    with FluidExecutor.resume(tmp_path, backend="local", devices=1, verbose=0) as session:
        (handle,) = session.handles
        handle.stop("b")
        assert handle.wait(PATIENCE)
        handle.add(valley("worse", floor=0.1), valley("better", best=3, floor=-1.0))
        assert handle.wait(PATIENCE)
    assert (kept(tmp_path, "a"), kept(tmp_path, "b"), kept(tmp_path, "worse")) == ([], [], [])
    assert kept(tmp_path, "better") == [3], "the rule is that of the session"


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_the_last_ones_survive_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed_session(tmp_path, "last")
    assert kept(tmp_path, "a") == [4]
    with FluidExecutor.resume(tmp_path, backend="local", devices=1, verbose=0) as session:
        (handle,) = session.handles
        handle.extend("a", by=3)
        handle.stop("b")
        assert handle.wait(PATIENCE)
        assert [result.iteration for result in handle.results() if result.trial_id == "a"] == [1, 2, 3, 4, 5, 6, 7]
    assert kept(tmp_path, "a") == [7]
    assert "begins afresh" not in caplog.text


@pytest.mark.slow
def test_a_session_that_goes_on_may_keep_otherwise(tmp_path: Path) -> None:
    with executor(tmp_path, "last", devices=1) as session:
        assert session.submit_trialgroup(TrialGroup([valley("a")], search=SMALLEST)).wait(PATIENCE)
    with FluidExecutor.resume(tmp_path, backend="local", devices=1, verbose=0, keep="none") as session:
        handle = session.handles[0]
        handle.extend("a", by=1)
        assert handle.wait(PATIENCE)
    assert kept(tmp_path, "a") == [4], "what was kept stays"
