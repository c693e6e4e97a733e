"""A process that trials end is left as Python leaves one: nothing of theirs that ends by itself is cut off."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import eventually

from fluid import FluidExecutor, Trial, TrialGroup
from fluid.backends.lanes.pool import DEFAULT_GRACE_S
from fluid.trialgroup import TrialState

#: What ends in the process of a trial, each a little later than the trial.
LATE = {"task", "thread", "finalizer", "exit function", "child"}


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Callable[..., FluidExecutor]]:
    made: list[FluidExecutor] = []

    def make(**options: Any) -> FluidExecutor:
        folder = tmp_path / f"run-{len(made)}"
        made.append(FluidExecutor("local", 1, run_dir=folder, packing="off", verbose=0, max_failures=0, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Owner:
    """Something with a finalizer."""


def leave_late(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Ends with work under way, whose results are notes in a folder."""
    folder = Path(config["folder"], str(config["number"]))
    found = sorted(path.name for path in Path(config["folder"]).glob("[01]/*"))

    def note(name: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / name).touch()

    def note_late(name: str) -> None:
        time.sleep(0.2)
        note(name)

    kept = [Owner(), ThreadPoolExecutor(1)]
    kept[1].submit(note_late, "task")  # type: ignore[attr-defined]
    threading.Thread(target=note_late, args=("thread",)).start()
    multiprocessing.get_context("fork").Process(target=note_late, args=("child",)).start()
    weakref.finalize(kept[0], note, "finalizer")
    atexit.register(note, "exit function")
    atexit.register(kept.clear)
    yield {"found": found}
    if config.get("raises"):
        raise ValueError("in the second iteration")


def left_by(folder: Path, number: int) -> set[str]:
    return {path.name for path in folder.glob(f"{number}/*")}


@pytest.mark.slow
@pytest.mark.parametrize("raises", [False, True])
def test_what_a_trial_has_under_way_is_done_before_the_next_one_begins(
    executor: Any, tmp_path: Path, raises: bool
) -> None:
    config = {"folder": str(tmp_path), "raises": raises}
    trials = [Trial(leave_late, {**config, "number": number}, budget=2 if raises else 1) for number in range(2)]
    handle = executor().submit_trialgroup(TrialGroup(trials))
    found = [set(result.metrics["found"]) for result in handle.results()]
    assert found == [set(), LATE]
    assert set(handle.states.values()) == {TrialState.FAILED if raises else TrialState.DONE}
    eventually(lambda: left_by(tmp_path, 1) == LATE)


@pytest.mark.slow
def test_where_trials_share_a_process_it_is_done_as_that_ends(executor: Any, tmp_path: Path) -> None:
    with executor(isolation="lane") as session:
        trials = [Trial(leave_late, {"folder": str(tmp_path), "number": number}) for number in range(2)]
        session.submit_trialgroup(TrialGroup(trials)).wait()
    assert left_by(tmp_path, 0) | left_by(tmp_path, 1) >= LATE - {"thread"}


def test_what_the_fork_server_has_is_not_ended_with_a_trial(
    executor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "owns_a_folder.py").write_text(
        "import atexit, os, tempfile\n"
        "FOLDER = tempfile.TemporaryDirectory()\n"
        f"atexit.register(os.mkdir, {str(tmp_path)!r} + '/' + os.path.basename(FOLDER.name))\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(installed)

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import owns_a_folder

        yield {"folder": owns_a_folder.FOLDER.name, "is_there": Path(owns_a_folder.FOLDER.name).is_dir()}

    with executor() as session:
        found: list[str] = []

        def has_forked_it() -> bool:
            """Whether two trials have found the folder of the fork server, which loads the module sooner or later."""
            metrics = next(session.submit_trialgroup(TrialGroup([Trial(train)])).results()).metrics
            assert metrics["is_there"]
            found.append(metrics["folder"])
            return found.count(found[-1]) == 2

        eventually(has_forked_it)
        assert not (tmp_path / Path(found[-1]).name).exists()


def clean_up_slowly(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    signal.setitimer(signal.ITIMER_REAL, 1e-3 + 1.1 * DEFAULT_GRACE_S)
    signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        for _ in range(3):
            yield {"loss": 0.0}
    finally:
        time.sleep(1.25 * DEFAULT_GRACE_S)
        Path(config["path"]).touch()


@pytest.mark.slow
def test_a_clean_up_that_takes_its_time_is_not_cut_off_as_the_session_ends(
    executor: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rests, ends = Trial(clean_up_slowly, {"path": str(tmp_path / "a")}, follow_up_iterations=1), tmp_path / "b"
    with executor() as session:
        session.submit_trialgroup(TrialGroup([rests, Trial(clean_up_slowly, {"path": str(ends)})])).wait()
    assert ends.exists() and (tmp_path / "a").exists()
    assert "for the clean-up of" in caplog.text


@pytest.mark.slow
def test_a_thread_that_never_ends_keeps_no_error_back(executor: Any, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        threading.Thread(target=threading.Event().wait, name="stuck").start()
        yield {"loss": 0.0}
        raise ValueError("in the second iteration")

    handle = executor().submit_trialgroup(TrialGroup([Trial(train, budget=2, trial_id="t")]))
    handle.wait(60.0)
    assert handle.states == {"t": TrialState.FAILED}
    (log,) = tmp_path.glob("run-0/trials/t/output.log")
    assert "its thread 'stuck' still runs" in log.read_text(encoding="utf-8")


def test_handlers_of_loggers_are_closed(executor: Any, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        from logging.handlers import MemoryHandler

        logging.getLogger("kept").addHandler(MemoryHandler(100, target=logging.FileHandler(config["path"])))
        logging.getLogger("kept").error("in memory until then")
        yield {"loss": 0.0}

    with executor() as session:
        session.submit_trialgroup(TrialGroup([Trial(train, {"path": str(tmp_path / "log")})])).wait()
    assert (tmp_path / "log").read_text(encoding="utf-8") == "in memory until then\n"


def test_a_temporary_folder_of_a_trial_is_deleted(executor: Any, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        sys.modules["__main__"].kept = tempfile.TemporaryDirectory(dir=config["folder"])  # type: ignore[attr-defined]
        yield {"loss": 0.0}

    with executor() as session:
        session.submit_trialgroup(TrialGroup([Trial(train, {"folder": str(tmp_path)})])).wait()
    assert not list(tmp_path.glob("tmp*"))


def test_threads_that_a_plain_function_starts_are_awaited(executor: Any, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> dict[str, Any]:
        def upload() -> None:
            time.sleep(0.2)
            threading.Thread(target=lambda: (time.sleep(0.2), Path(config["path"]).touch())).start()

        threading.Thread(target=upload).start()
        return {"loss": 0.0}

    with executor() as session:
        session.submit_trialgroup(TrialGroup([Trial(train, {"path": str(tmp_path / "uploaded")})])).wait()
    assert (tmp_path / "uploaded").exists()


def test_what_an_open_file_holds_is_written(executor: Any, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        sys.modules["__main__"].log = open(config["path"], "w")  # type: ignore[attr-defined]  # noqa: SIM115
        sys.modules["__main__"].log.write("a line")  # type: ignore[attr-defined]
        yield {"loss": 0.0}

    with executor() as session:
        session.submit_trialgroup(TrialGroup([Trial(train, {"path": str(tmp_path / "log")})])).wait()
    assert (tmp_path / "log").read_text(encoding="utf-8") == "a line"


def test_pools_and_managers_that_are_left_take_no_time(executor: Any) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        from concurrent.futures import ProcessPoolExecutor

        pool, manager = ProcessPoolExecutor(1, multiprocessing.get_context("fork")), multiprocessing.Manager()
        sys.modules["__main__"].kept = pool, manager  # type: ignore[attr-defined]
        yield {"loss": pool.submit(float, 1).result(), "made": time.monotonic()}

    session = executor()
    handle = session.submit_trialgroup(TrialGroup([Trial(train) for _ in range(2)]))
    first, second = (result.metrics["made"] for result in handle.results())
    assert second - first < 5.0


def test_a_handler_that_raises_as_it_is_closed_keeps_no_error_back(executor: Any) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        class Broken(logging.NullHandler):
            def flush(self) -> None:
                raise RuntimeError("of the handler")

        sys.modules["__main__"].kept = Broken()  # type: ignore[attr-defined]
        yield {"loss": 0.0}
        raise ValueError("of the trial")

    handle = executor().submit_trialgroup(TrialGroup([Trial(train, budget=2, trial_id="t")]))
    handle.wait()
    with pytest.raises(Exception, match="of the trial"):
        handle.raise_failures()
