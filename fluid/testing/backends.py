"""The conformance suite of backends: the same engine drives each, and the same must hold.

A test module derives a class from :class:`BackendConformance`, which pytest then runs like any other; a program calls
:meth:`BackendConformance.check`. ``pytest.register_assert_rewrite("fluid.testing.backends")`` in a ``conftest.py`` has
pytest show the values of what fails.
"""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest

from fluid.backends.base import Backend
from fluid.engine.commands import (
    CheckpointValue,
    DumpStacks,
    KillLane,
    PrefetchCheckpoint,
    Report,
    ReportEnd,
    ReportRequest,
    ReportStart,
    StartTrial,
    ValueCheckpoints,
)
from fluid.engine.events import (
    BudgetExtended,
    Checkpoint,
    CheckpointPlaced,
    DeviceDraining,
    DeviceLost,
    GroupSubmitted,
    IterationDone,
    PauseRequested,
    RequestAnswered,
    ResumeRequested,
    StopRequested,
    TrialForgotten,
    TrialsAdded,
    TrialSaved,
)
from fluid.errors import InvalidFieldError
from fluid.testing.backend_session import BackendSession
from fluid.testing.fork_suite import ForkConformance
from fluid.testing.trainables import Asking, Sleeper
from fluid.trainables.driver_link import dump_message
from fluid.trainables.exception_pickle import load_exception
from fluid.trainables.payload import payload_of


def refused(why: str, request: Callable[[], object]) -> None:
    """Checks that a request is refused, for a reason that has this text in it."""
    try:
        request()
    except InvalidFieldError as error:
        assert why in str(error), error
        return
    raise AssertionError(f"a request was not refused: {why}")


class BackendConformance(ForkConformance):
    """What holds for every backend. A class of one's own makes the backend; each test gets a new one.

    A backend that cannot do what a test asks for leaves that test out: ``test_of_what_it_cannot = None``.

    Attributes:
        runs_code: whether trials run, so that they report metrics, and methods of theirs return something.
        isolated: whether each trial has a lane of its own. A backend has to pass both ways.
        trainable: what trials run; ``config["seconds"]`` are those of an iteration, ``"step"`` is a metric.
        wide: a trainable that spans several devices, and reports how many as ``"devices"``; ``None`` if there is none.
        patience_s: real seconds after which a test gives up.
        folder: of the test; it is deleted with what is in it.

    Example:
        >>> from fluid import Device
        >>> from fluid.backends.simulated import SimulatedBackend, Truth
        >>> from fluid.testing.backends import BackendConformance
        >>> class TestSimulated(BackendConformance):
        ...     runs_code = False
        ...
        ...     def make_backend(self, folder):
        ...         return SimulatedBackend(lambda trial_id, config: Truth(config["seconds"]), [Device(0), Device(1)])
        >>> TestSimulated.check()
        ['test_what_a_trial_asks_reaches_its_submitter', 'test_what_is_gone_is_no_start']
    """

    runs_code = True
    isolated = False
    trainable: Any = Sleeper
    wide: Any = None
    patience_s = 90.0

    def make_backend(self, folder: Path) -> Backend:
        """Returns a new backend with two devices, 0 and 1.

        Args:
            folder: for files of the backend.
        """
        raise NotImplementedError("a suite of one's own makes its backend")

    def setup_method(self) -> None:
        """Begins a test."""
        self.folder = Path(tempfile.mkdtemp(prefix="fluid-"))
        self._backends: list[Backend] = []

    def teardown_method(self) -> None:
        """Ends a test: closes what it opened."""
        try:
            for backend in self._backends:
                backend.close()
                backend.close()  # Harmless.
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def open(self) -> BackendSession:
        """Returns a session with a new backend."""
        backend = self.make_backend(self.folder)
        self._backends.append(backend)
        assert isinstance(backend, Backend), f"{backend!r} is not derived from fluid.backends.base.Backend"
        self.session = BackendSession(backend, self.trainable, isolated=self.isolated, patience_s=self.patience_s)
        return self.session

    # -- tests -----------------------------------------------------------------------------------------------

    def test_all_trials_run_to_the_end(self) -> None:
        session = self.open()
        session.submit("g", **{f"t{x}": (x + 1, 0.001) for x in range(7)})
        session.run()
        for x in range(7):
            assert session.iterations(f"t{x}") == list(range(1, x + 2))
        assert session.ends() == {f"t{x}": "DONE" for x in range(7)}

    def test_reports_carry_width_devices_and_times(self) -> None:
        session = self.open()
        session.warm_up()
        session.submit("g", a=(3, 0.02), b=(3, 0.02))
        session.run()
        reports = session.told(Report)
        assert {report.device_ids for report in reports} == {(0,), (1,)}
        for report in reports:
            assert report.group_id == "g" and report.width == 1.0
            assert report.seconds >= 0.02 * (1 - 1e-9)
        at = [report.at for report in reports]
        assert at == sorted(at)

    def test_a_trial_that_is_stopped_reports_the_iteration_that_it_finishes(self) -> None:
        session = self.open()
        session.submit("g", a=(10**6, 0.01), b=(2, 0.01))
        session.run(lambda: len(session.iterations("a")) >= 2)
        session.tell(StopRequested(session.backend.now(), "a"))
        seen = len(session.iterations("a"))
        session.run()
        done = session.iterations("a")
        assert done == list(range(1, len(done) + 1)) and len(done) == session.engine.trials["a"].progress.done >= seen
        assert session.ends() == {"a": "STOPPED", "b": "DONE"}
        assert not session.told(KillLane), "the trial's lane told that it was left, and needed no kill"

    def test_what_lanes_finish_as_they_end_counts(self) -> None:
        session = self.open()
        session.submit("g", a=(10**6, 0.01), b=(10**6, 0.01))
        session.run(lambda: len(session.iterations("a")) >= 2 <= len(session.iterations("b")))
        finished = [event for event in session.backend.end() if isinstance(event, IterationDone)]
        session.commands += session.engine.handle(*finished)  # Nothing is carried out any more.
        for name in "ab":
            done = session.iterations(name)
            assert done == list(range(1, session.engine.trials[name].progress.done + 1))

    def test_a_wait_for_events_ends_when_it_is_woken(self) -> None:
        session = self.open()
        session.warm_up()
        backend = session.backend
        while backend.poll(0.2):
            pass
        begun = backend.now()
        backend.wake()
        backend.poll(10.0)
        assert backend.now() - begun < 10.0

    def test_what_it_cannot_do_may_be_asked_of_it(self) -> None:
        session = self.open()
        backend, heard = session.backend, list[Any]()
        backend.hear_records(heard.append)
        backend.forward_output()
        backend.preload([])
        backend.set_bar("g", None, None)
        session.submit("g", a=(2, 0.01))
        session.run()
        assert not backend.can_give_back(10**6), "it has no such device"
        if backend.scaling_limits is None:
            assert not any(backend.can_give_back(device.index) for device in backend.devices())
        assert backend.forwards_output or not backend.read_output()
        assert json.loads(json.dumps(dict(backend.facts))) == backend.facts
        try:
            backend.fetch_kept("nowhere", "/nowhere/checkpoint", str(self.folder / "fetched"))
            raise AssertionError("a checkpoint that there is not was fetched")
        except OSError:
            assert not (self.folder / "fetched").exists()
        backend.forget("a")
        backend.end()

    def test_a_trial_in_an_endless_iteration_is_stopped_at_once(self) -> None:
        session = self.open()
        session.submit("g", a=(2, 1e6), b=(3, 0.01))
        session.run(lambda: session.engine.trials["a"].state == "RUNNING" and session.ends().get("b") == "DONE")
        session.tell(StopRequested(session.backend.now(), "a", now=True))
        session.run(lambda: session.ends().get("a") == "STOPPED")
        session.submit("h", c=(2, 0.01), d=(2, 0.01))
        session.run()
        assert session.ends() == {"a": "STOPPED", "b": "DONE", "c": "DONE", "d": "DONE"}

    def test_a_trial_whose_iterations_take_too_long_has_failed_the_second_time(self) -> None:
        session = self.open()
        session.register("slow", 1e6)
        session.tell(
            GroupSubmitted(session.backend.now(), "g", (session.spec("slow", 3, iteration_timeout_s=1.0),)),
        )
        session.run()
        (end,) = session.told(ReportEnd)
        assert end.state == "FAILED" and end.failure is not None and end.failure.kind == "timeout"
        assert len(session.told(KillLane)) == 2
        assert len(session.told(DumpStacks)) == 2

    def test_a_trial_that_is_paused_by_hand_goes_on_once_it_is_resumed(self) -> None:
        session = self.open()
        session.warm_up()
        session.submit("g", a=(30, 0.01), b=(3, 0.01), c=(3, 0.01))
        session.run(lambda: len(session.iterations("a")) >= 2)
        session.tell(PauseRequested(session.backend.now(), "a"))
        session.run(lambda: session.engine.trials["a"].state == "PAUSED")
        session.run(lambda: session.ends() == {"b": "DONE", "c": "DONE"})
        done = len(session.iterations("a"))
        assert done < 30 and session.engine.trials["a"].state == "PAUSED"
        session.tell(ResumeRequested(session.backend.now(), "a"))
        session.run()
        assert session.iterations("a") == list(range(1, 31)), "no iteration is lost or repeated"

    def test_a_trial_whose_lane_dies_while_it_is_paused_stays_paused(self) -> None:
        session = self.open()
        session.warm_up()
        session.submit("g", a=(20, 0.01), b=(2, 0.01))
        session.run(lambda: len(session.iterations("a")) >= 2)
        session.tell(PauseRequested(session.backend.now(), "a"))
        session.run(lambda: session.engine.trials["a"].state == "PAUSED")
        (device,) = {session.engine.trials["a"].residence.device}
        assert device is not None
        session.tell(DeviceLost(session.backend.now(), device))
        session.run(lambda: session.ends() == {"b": "DONE"})
        assert session.engine.trials["a"].state == "PAUSED"
        session.tell(ResumeRequested(session.backend.now(), "a"))
        session.run()
        assert session.iterations("a") == list(range(1, 21)) and session.ends()["a"] == "DONE"

    def test_queued_and_starting_trials_can_be_paused(self) -> None:
        session = self.open()
        session.submit("g", a=(3, 0.01), b=(3, 0.01), c=(3, 0.01))
        for trial_id in "abc":
            session.tell(PauseRequested(session.backend.now(), trial_id))
        session.run(lambda: all(trial.state == "PAUSED" for trial in session.engine.trials.values()))
        session.tell(StopRequested(session.backend.now(), "c"))
        for trial_id in "ab":
            session.tell(ResumeRequested(session.backend.now(), trial_id))
        session.run()
        assert session.ends() == {"a": "DONE", "b": "DONE", "c": "STOPPED"}

    def test_a_queued_trial_can_be_stopped(self) -> None:
        session = self.open()
        session.submit("g", a=(5, 0.01), b=(5, 0.01), c=(5, 0.01))
        session.tell(StopRequested(session.backend.now(), "c"))
        session.run()
        assert session.ends() == {"a": "DONE", "b": "DONE", "c": "STOPPED"} and session.iterations("c") == []

    def test_budgets_can_be_extended_while_running_and_after(self) -> None:
        session = self.open()
        session.submit("g", a=(3, 0.01), b=(1, 0.01))
        session.tell(BudgetExtended(session.backend.now(), "a", 2))
        session.run()
        assert session.iterations("a") == [1, 2, 3, 4, 5]
        session.tell(BudgetExtended(session.backend.now(), "b", 2))
        session.run()
        assert session.iterations("b") == [1, 2, 3]

    def test_trials_and_groups_arrive_while_others_run(self) -> None:
        session = self.open()
        session.submit("g", a=(20, 0.01))
        session.run(lambda: bool(session.iterations("a")))
        session.submit("h", b=(2, 0.01), c=(2, 0.01))
        session.register("d", 0.01)
        session.tell(TrialsAdded(session.backend.now(), "g", (session.spec("d", 2),)))
        session.run()
        assert set(session.ends().values()) == {"DONE"} and len(session.ends()) == 4

    def test_a_lost_devices_trial_goes_on_elsewhere(self) -> None:
        session = self.open()
        session.warm_up()
        session.submit("g", a=(12, 0.02), b=(12, 0.02))
        session.run(lambda: min(len(session.iterations("a")), len(session.iterations("b"))) >= 2)
        session.tell(DeviceLost(session.backend.now(), 1))
        session.run()
        for trial_id in ("a", "b"):
            assert session.iterations(trial_id) == list(range(1, 13))
        reports = session.told(Report)
        assert reports[-1].device_ids == (0,)

    def test_the_trial_of_a_drained_device_goes_on_elsewhere_without_a_loss(self) -> None:
        session = self.open()
        session.warm_up()
        session.submit("g", a=(12, 0.05), b=(12, 0.05))
        session.run(lambda: min(len(session.iterations("a")), len(session.iterations("b"))) >= 2)
        session.tell(DeviceDraining(session.backend.now(), 1, session.backend.now() + self.patience_s))
        session.run(lambda: 1 not in session.engine.occupancy.residents)
        starts = len(session.told(StartTrial))
        session.run()
        for trial_id in ("a", "b"):
            assert session.iterations(trial_id) == list(range(1, 13))
        again = session.told(StartTrial)[starts:]
        assert all(command.checkpoint is not None and command.checkpoint.iteration >= 2 for command in again)
        reports = session.told(Report)
        assert reports[-1].device_ids == (0,)
        if self.runs_code:
            assert all(report.metrics.decode()["step"] == report.iteration for report in reports), (
                "it went on from its state"
            )

    def test_a_killed_lane_is_lost_and_its_trial_goes_on(self) -> None:
        session = self.open()
        session.warm_up()
        session.submit("g", a=(12, 0.05), b=(12, 0.05))
        session.run(lambda: len(session.iterations("a")) >= 2)
        (lane_id,) = session.engine.trials["a"].placement.lanes
        session.backend.execute([KillLane(lane_id, "was in the way", at=session.backend.now())])
        session.backend.execute([KillLane(lane_id, "was in the way", at=session.backend.now())])  # Harmless.
        session.run(lambda: lane_id not in session.engine.lanes)
        assert any("was in the way" in text for _, text in session.engine.trials["a"].story)
        session.run()
        session.backend.execute(
            [KillLane(lane_id, "was in the way", at=session.backend.now())]
        )  # It is gone: harmless.
        for trial_id in ("a", "b"):
            assert session.iterations(trial_id) == list(range(1, 13))
        assert session.ends() == {"a": "DONE", "b": "DONE"}

    def test_trials_have_a_lane_of_their_own_or_share_those_of_the_devices(self) -> None:
        session = self.open()
        session.submit("g", stopped=(10**6, 0.01), **{f"t{x}": (2, 0.001) for x in range(6)})
        session.run(lambda: len(session.iterations("stopped")) >= 2)
        session.tell(StopRequested(session.backend.now(), "stopped"))
        session.run()
        started = [command.lane_ids for command in session.told(StartTrial)]
        assert len(started) == 7 and all(len(lanes) == 1 for lanes in started)
        assert len(set(started)) == (7 if self.isolated else 2)
        session.tell(BudgetExtended(session.backend.now(), "t0", 2))
        session.run()
        assert session.iterations("t0") == [1, 2, 3, 4]
        again = [command.lane_ids for command in session.told(StartTrial) if command.trial_id == "t0"][1:]
        assert len(again) == self.isolated, "a lane that ran it keeps its state, or has ended with it"
        assert not set(again) & set(started)

    def test_more_trials_than_a_device_keeps_resident_can_all_be_extended(self) -> None:
        session = self.open()
        names = [f"t{x}" for x in range(24)]
        session.submit("g", **dict.fromkeys(names, (1, 0.001)))
        session.run()
        session.tell(*(BudgetExtended(session.backend.now(), name, 1) for name in names))
        session.run()
        assert all(session.iterations(name) == [1, 2] for name in names)

    def test_methods_are_called_while_a_trial_runs_and_after(self) -> None:
        session = self.open()
        session.submit("g", a=(10**6, 0.01), b=(2, 0.01))
        session.run(lambda: len(session.iterations("a")) >= 2 and session.ends().get("b") == "DONE")
        running = [session.call("a", 1), session.call("a", "no"), session.call("a", 2)]
        done = session.call("b", 3)
        session.tell(BudgetExtended(session.backend.now(), "b", 2))
        session.run(lambda: len(session.answers()) == 4 and len(session.iterations("b")) == 4)
        session.tell(StopRequested(session.backend.now(), "a"))
        session.run()
        assert session.ends() == {"a": "STOPPED", "b": "DONE"}, "what a call raises does not fail a trial"
        answers = session.answers()
        assert [number for number in answers if number != done] == running, "in the order asked for"
        if not self.runs_code:
            assert all(answer.result is None and answer.failure is None for answer in answers.values())
            return
        first, failed, second = (answers[number] for number in running)
        assert first.result is not None and second.result is not None and failed.failure is not None
        assert (failed.failure.kind, failed.failure.message) == ("error", "ValueError: no")
        raised = None if failed.failure.exception is None else load_exception(failed.failure.exception)
        assert isinstance(raised, ValueError) and raised.args == ("no",)
        (steps, value), (later, other) = pickle.loads(first.result), pickle.loads(second.result)
        assert 2 <= steps <= later and (value, other) == (1, 2)
        assert (result := answers[done].result) is not None and pickle.loads(result) == (2, 3), "before it went on"

    def test_what_a_trial_asks_reaches_its_submitter(self) -> None:
        if not self.runs_code:
            raise SkipTest("trials of this backend run no code")
        session = self.open()
        for name in ("a", "b"):
            session.backend.register(name, payload_of(Asking, {"seconds": 0.0}))
        session.tell(GroupSubmitted(session.backend.now(), "g", (session.spec("a", 3), session.spec("b", 3))))
        answered: list[ReportRequest] = []

        def answer() -> bool:
            asked = session.told(ReportRequest)
            for request in asked[len(answered) :]:
                answered.append(request)
                payload = dump_message(f"{request.trial_id} {pickle.loads(request.payload)}")
                lane_id, number = request.lane_id, request.request_id
                now = session.backend.now()
                session.tell(RequestAnswered(now, request.trial_id, lane_id, request_id=number, payload=payload))
            return session.is_over

        session.run(answer)
        for name in ("a", "b"):
            reports = [c for c in session.told(Report) if c.trial_id == name]
            assert [report.metrics.decode()["got"] for report in reports] == [f"{name} {step}" for step in (1, 2, 3)]

    def test_a_trial_that_left_its_lane_is_brought_back_to_be_called(self) -> None:
        session = self.open()
        names = [f"t{x}" for x in range(24)]
        session.submit("g", **dict.fromkeys(names, (2, 0.001)))
        session.run(
            lambda: all(trial.state.ended and not trial.residence.saving for trial in session.engine.trials.values())
        )
        ends = session.told(ReportEnd)
        away = [name for name in names if session.engine.trials[name].residence.lane is None]
        assert away, "not all of them can stay"
        numbers = {session.call(name, 7): name for name in names}
        session.run(lambda: len(session.answers()) == len(names))
        session.run()
        assert session.told(ReportEnd) == ends, "none ended twice"
        assert all(session.iterations(name) == [1, 2] for name in names)
        for number in numbers:
            answer = session.answers()[number]
            assert answer.failure is None
            assert answer.result is None or pickle.loads(answer.result) == (2, 7)

    def test_a_trial_that_was_forgotten_leaves_nothing_behind(self) -> None:
        session = self.open()
        session.submit("g", a=(2, 0.001), b=(2, 0.001))
        session.run()
        starts = [command.trial_id for command in session.told(ReportStart)]
        assert sorted(starts) == ["a", "b"]
        session.tell(TrialForgotten(session.backend.now(), "a"))
        refused("taken", lambda: session.submit("h", a=(1, 0.001)))
        session.tell(BudgetExtended(session.backend.now(), "b", 1))
        session.run()
        assert session.iterations("b") == [1, 2, 3] and list(session.engine.trials) == ["b"]

    def test_what_cannot_be_is_refused_and_changes_nothing(self) -> None:
        session = self.open()
        session.submit("g", a=(3, 0.01))
        refused("'a'", lambda: session.submit("h", a=(1, 0.01)))
        refused("'b'", lambda: session.tell(StopRequested(session.backend.now(), "b")))
        session.run()
        assert session.iterations("a") == [1, 2, 3]

    def test_trials_that_are_left_over_take_turns_and_lose_nothing(self) -> None:
        session = self.open()
        session.submit("first", x=(3, 0.15), y=(3, 0.15))  # From then on it is known how long they take.
        session.run()
        session.submit("g", a=(12, 0.15), b=(12, 0.15), c=(12, 0.15))
        session.run()
        reports = session.told(Report)
        for trial_id in "abc":
            own = [report for report in reports if report.trial_id == trial_id]
            assert [report.iteration for report in own] == list(range(1, 13))
            if self.runs_code:
                assert [report.metrics.decode()["step"] for report in own] == list(range(1, 13)), (
                    "it went on from its state"
                )
        ended = next(at for at, c in enumerate(session.commands) if isinstance(c, ReportEnd) and c.trial_id in "abc")
        begun = {c.trial_id for c in session.commands[:ended] if isinstance(c, Report)}
        assert begun >= set("abc"), "the third one did not wait until another one had ended"

    def test_the_last_state_of_a_trial_is_saved_for_good(self) -> None:
        session = self.open()
        session.keep_last = True
        session.submit("g", done=(3, 0.001), stopped=(10**6, 0.01))
        session.run(lambda: session.kept_at("done") == 3)
        session.run(lambda: len(session.iterations("stopped")) >= 3)
        session.tell(StopRequested(session.backend.now(), "stopped"))
        session.run(lambda: session.ends().get("stopped") == "STOPPED")
        assert session.kept_at("stopped") == session.engine.trials["stopped"].progress.done, "before it left its lane"
        session.tell(BudgetExtended(session.backend.now(), "done", 2))
        session.run(lambda: session.kept_at("done") == 5)
        assert session.iterations("done") == [1, 2, 3, 4, 5]
        for checkpoint in session.kept.values():
            assert not checkpoint.in_memory

    def test_a_trial_alone_spreads_and_makes_room_again(self) -> None:
        session = self.open()
        if self.runs_code and self.wide is None:
            raise SkipTest("no trainable is given that spans several devices")
        session.register("wide", 0.05, self.wide)
        session.tell(GroupSubmitted(session.backend.now(), "g", (session.spec("wide", 10**6, max_width=2),)))

        def widths() -> list[float]:
            return [c.width for c in session.told(Report) if c.trial_id == "wide"]

        session.run(lambda: widths().count(2.0) >= 3)
        session.submit("h", narrow=(3, 0.1))
        session.run(lambda: session.ends().get("narrow") == "DONE" and len(set(widths()[-3:])) == 1)
        session.tell(StopRequested(session.backend.now(), "wide"))
        session.run()
        reports = [c for c in session.told(Report) if c.trial_id == "wide"]
        assert [report.iteration for report in reports] == list(range(1, len(reports) + 1))
        assert all(len(report.device_ids) == report.width for report in reports)
        if self.runs_code:
            assert all(report.metrics.decode()["devices"] == report.width for report in reports)
        assert 1.0 in widths()[widths().index(2.0) :], "it made room"

    def test_a_checkpoint_is_brought_into_the_memory_of_its_host(self) -> None:
        session = self.open()
        session.submit("g", a=(1, 0.2))
        session.run()
        if self.runs_code:
            session.run(lambda: bool(session.heard(TrialSaved)))
        saved = session.heard(TrialSaved)
        checkpoint = saved[-1].checkpoint if saved else Checkpoint(1, "")
        session.backend.execute([ValueCheckpoints({"a": CheckpointValue(0.9, pinned=True)})])
        session.backend.execute([PrefetchCheckpoint("a", checkpoint, checkpoint.host)])
        session.run(lambda: bool(session.heard(CheckpointPlaced)))
        (placed,) = session.heard(CheckpointPlaced)
        assert (placed.trial_id, placed.checkpoint.host, placed.checkpoint.in_memory) == ("a", checkpoint.host, True)
        assert placed.checkpoint.iteration == checkpoint.iteration
