"""Threads that others rely on: an error in one is told once, and its work goes on."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE, eventually

from fluid._clock import MonotonicClock
from fluid.backends.base import LaneText
from fluid.backends.hosts.checkpoints.jobs import CheckpointJobs
from fluid.backends.hosts.checkpoints.keeper import CheckpointKeeper, KeeperOptions
from fluid.display.trial_output import TrialOutput
from fluid.engine.commands import CheckpointValue
from fluid.lane import channel
from fluid.lane.checkpoints.ledger import StoreLedger
from fluid.lane.checkpoints.store import CheckpointStore
from fluid.waiting import waits as _waiting
from fluid.waiting.waits import BackgroundThread
from fluid.wire import decoder

ROOT = Path(__file__).resolve().parents[1]
#: Modules that start threads of other kinds: they make a single call, or serve a single connection.
_OTHERS = {
    "fluid/backends/hosts/checkpoints/server.py": "a connection each",
    "fluid/backends/hosts/host.py": "a copy each",
    "fluid/backends/ray/devices.py": "waits for Ray to answer, or not",
    "fluid/elastic/members/protocol.py": "connects to the others",
    "fluid/elastic/groups/nccl.py": "connects to the others",
    "fluid/elastic/groups/horovod_group.py": "a server of Python's, which guards each request",
    "fluid/elastic/groups/torch_group.py": "ends a process group",
    "fluid/elastic/members/worker.py": "an error in it ends the process",
    "fluid/lane/process/exit.py": "tells pools to end",
    "fluid/loggers/prometheus.py": "a server of Python's, which guards each request",
    "fluid/processes/lasting_thread.py": "a call each",
    "fluid/session/notice.py": "answers a signal",
    "fluid/trainables/reporting_resident.py": "a trial's own",
    "integrations/ray_tune/train/inner_training.py": "kills a run",
    # An error ends what they do, and is told there.
    "fluid/display/live.py": "the view ends, and gives the terminal back",
    "fluid/display/notebook.py": "the view ends",
    "fluid/loggers/hub.py": "nothing more is logged",
    "fluid/session/forecasting/forecasts.py": "a forecast each",
    "fluid/session/pump.py": "the session ends",
    "fluid/joint/membership.py": "the session ends",
}


class RaisesOnce:
    """Stands in front of a function: the next call raises."""

    def __init__(self, function: Callable[..., Any], error: BaseException | None = None) -> None:
        self._function, self._error = function, error or ZeroDivisionError("unforeseen")
        self.has_raised = threading.Event()

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.has_raised.is_set():
            self.has_raised.set()
            raise self._error
        return self._function(*arguments, **options)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_waiting, "_PAUSE_S", 0.001)


def require_told(caplog: pytest.LogCaptureFixture) -> None:
    """Checks that the log has told of one error."""
    (record,) = (record for record in caplog.records if record.name == "fluid.session")
    assert "has ended on an error, and goes on" in record.getMessage() and record.exc_info is not None
    assert isinstance(record.exc_info[1], (ZeroDivisionError, SystemExit))


def test_an_error_is_told_once_and_the_work_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    errors = [ValueError("a"), ValueError("a"), SystemExit(1)]

    def work() -> None:
        if errors:
            raise errors.pop(0)

    thread = BackgroundThread("fluid-test", work)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive() and not errors
    assert caplog.messages == ["the thread fluid-test has ended on an error, and goes on"] * 2
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a", "1"]


def test_a_thread_that_fails_again_and_again_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    times: list[None] = []
    ends: list[BaseException] = []

    def work() -> None:
        times.append(None)
        raise ValueError("always")

    thread = BackgroundThread("fluid-test", work, ends.append)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive() and len(times) == 6 and str(ends[0]) == "always"
    assert caplog.messages[1:] == ["the thread fluid-test is given up after 6 errors in a row: ValueError: always"]


def test_only_errors_in_a_row_count(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(_waiting, "_WELL_S", 0.0)
    left = [ValueError("rare")] * 20

    def work() -> None:
        if left:
            raise left.pop()

    thread = BackgroundThread("fluid-test", work)
    thread.start()
    thread.join(PATIENCE)
    assert not left and len(caplog.messages) == 1


def test_room_for_checkpoints_is_made_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    memory = tmp_path / "fluid-0123456789abcdef-localhost"
    memory.mkdir()
    failing = RaisesOnce(StoreLedger.begin_turn)
    monkeypatch.setattr(StoreLedger, "begin_turn", lambda ledger: failing(ledger))
    keeper = CheckpointKeeper(KeeperOptions("localhost", str(memory), str(tmp_path / "run"), 9_250), lambda: None)
    assert failing.has_raised.wait(PATIENCE)
    lane = CheckpointStore(0, str(tmp_path / "run"), str(memory))
    keeper.value({name: CheckpointValue(0.1 * worth) for worth, name in enumerate("abcdefghi")})
    for trial_id in "abcdefghi":
        lane.save(trial_id, 1, lambda folder: bool(Path(folder, "data").write_bytes(os.urandom(1000))))
    eventually(lambda: list((tmp_path / "run").glob("trials/*/checkpoints/[0-9]*")))
    keeper.close()
    require_told(caplog)


def test_jobs_about_checkpoints_are_done_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(0, str(tmp_path))
    path = store.save("a", 1, lambda folder: bool(Path(folder, "data").write_bytes(b"x"))).path
    reports: list[Any] = []
    jobs = CheckpointJobs("localhost", store, RaisesOnce(reports.append, SystemExit(1)))
    jobs.persist("none", str(tmp_path / "none"), keep=True)
    jobs.persist("a", path, keep=True)
    eventually(lambda: reports)
    assert [report.trial_id for report in reports] == ["a"] and reports[0].problem == ""
    jobs.close()
    require_told(caplog)


def test_what_trials_print_is_shown_after_an_error(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    texts = [LaneText(0, False, b"::begin\nhello\n")]

    def read() -> list[LaneText]:
        found, texts[:] = texts[:], []
        return found

    failing = RaisesOnce(read)
    output = TrialOutput(failing, environment={})
    said = ""

    def shown() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "hello" in said

    eventually(shown)
    assert failing.has_raised.is_set()
    output.close()
    require_told(caplog)


def test_a_lane_sends_what_is_pending_after_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, lane = Pipe()
    failing = RaisesOnce(channel.encode)
    monkeypatch.setattr(channel, "encode", failing)
    gone = threading.Event()
    made = channel.Channel(lane, MonotonicClock(), gone.set)
    made.send("first", at_once=False)
    assert failing.has_raised.wait(PATIENCE)
    made.send("second", at_once=False)
    assert driver.poll(PATIENCE) and decoder(Any)(driver.recv_bytes())[-1] == "second"
    driver.close()
    assert gone.wait(PATIENCE)
    require_told(caplog)


def test_all_threads_that_others_rely_on_are_of_this_kind() -> None:
    started = re.compile(r"\b(?:threading\.Thread|AwaitedThread)\(")
    paths = [*(ROOT / "fluid").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if not path.is_relative_to(ROOT / "fluid" / "integrations") and started.search(path.read_text())
    }
    assert found - {"fluid/waiting/waits.py"} == _OTHERS.keys()
