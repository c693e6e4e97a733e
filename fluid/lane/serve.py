"""The worker program: a warm process, bound to one device, that hosts trials and runs one iteration at a time.

The same code runs under every backend. The driver says what to run; between two iterations the lane looks for
new messages, so whatever is asked takes effect at the end of the current iteration. Trials stay resident when
they pause: going on with another one is a look-up.

Code of trials runs in the main thread, because gradient mode, autocast and OpenMP are per thread.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from fluid._clock import Clock, MonotonicClock
from fluid.elastic.messages import Join, Leave, Left
from fluid.lane.busy import BusyMeter
from fluid.lane.channel import Channel, Connection
from fluid.lane.culprit_note import RunningTrialNote
from fluid.lane.device import bind, make_meter, warm_up
from fluid.lane.errors import describe
from fluid.lane.member import LaneMember
from fluid.lane.messages import (
    AdoptResident,
    CallResident,
    DeleteCheckpoints,
    LaneOptions,
    LaneWarm,
    Membership,
    PauseResident,
    Raised,
    ReleaseResident,
    ResidentCalled,
    ResidentFailed,
    ResidentIterated,
    ResidentPaused,
    ResidentReleased,
    ResidentStarted,
    RunResident,
    SaveResident,
    ShipTrainable,
    Shutdown,
    StartResident,
    ToMember,
)
from fluid.lane.process_state import Output
from fluid.lane.residents import Residents
from fluid.lane.work_queue import ResidentTrial
from fluid.trainables.pickling import dump_result, pack_metrics
from fluid.trainables.trainable import elastic_part

#: An iteration shorter than this is reported together with others.
_SHORT_S = 0.001
#: Exit status of a lane whose device cannot be used any more.
_UNUSABLE = 70


def serve(connection: Connection, options: LaneOptions, on_hangup: Callable[[], None]) -> None:
    """Runs a lane until it is told to end or the driver is gone.

    Args:
        connection: to the driver.
        options: which lane this is.
        on_hangup: called in another thread when the driver is gone; must end the process, whatever it does.
    """
    # The driver decides what an interrupt means. A handler, because SIG_IGN would pass to sub-processes.
    signal.signal(signal.SIGINT, lambda *_: None)
    bind(options)
    own_bytes = warm_up(options)
    clock = MonotonicClock()
    output = Output(sys.stdout)
    streams = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = output
    try:
        _Lane(Channel(connection, clock, on_hangup), options, clock, output).run(own_bytes)
    finally:
        sys.stdout, sys.stderr = streams


def run_as_process(connection: Connection, options: LaneOptions) -> NoReturn:
    """Runs a lane as all that this process does; it leads a process group of its own."""
    faulthandler.enable()
    serve(connection, options, _end_with_group)
    os._exit(0)


def _end_with_group() -> None:
    """Ends the process in the middle of whatever it does, and those that a trial started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _Lane:
    """The state of a lane."""

    def __init__(self, channel: Channel, options: LaneOptions, clock: Clock, output: Output) -> None:
        self._channel = channel
        self._options = options
        self._clock = clock
        self._note = RunningTrialNote(options.note)
        self._meter = make_meter(options)
        self._busy = BusyMeter(options.kind, options.threads)
        self._residents = Residents(options, clock, output, self._note, self._meter)
        self._ended = False
        self._handlers: dict[type, Callable[[Any], None]] = {
            ShipTrainable: self._residents.learn,
            StartResident: self._start,
            RunResident: self._run,
            PauseResident: self._pause,
            SaveResident: self._save,
            ReleaseResident: self._stop,
            CallResident: self._call,
            AdoptResident: self._adopt,
            ToMember: self._to_member,
            DeleteCheckpoints: lambda message: self._residents.forget(message.trial_id),
            Shutdown: self._shutdown,
        }

    def run(self, own_bytes: float = 0.0) -> None:
        residents = self._residents
        self._tell(LaneWarm(self._clock.now(), os.getpid(), own_bytes))
        while not self._ended:
            try:
                # What is there to do comes before memory is given back, and that before waiting for more.
                messages = self._channel.receive(block=not (residents.queue or residents.hoards))
            except (EOFError, OSError):
                return  # The driver is gone.
            for message in messages:
                self._handlers[type(message)](message)
            if residents.queue:
                self._iterate(residents.queue.next(self._options.policy, residents.current))
            elif residents.hoards and not messages:
                self._channel.flush()
                residents.give_back()

    # -- what the driver asks ------------------------------------------------------------------------------

    def _start(self, message: StartResident) -> None:
        hosted = self._residents.admit(message.trial_id)
        begun = self._clock.now()
        try:
            self._residents.set_up(hosted, message)
            if message.membership is not None:
                self._join_others(hosted, message.membership, self._clock.now() - begun)
                return
        except BaseException as error:
            self._fail(hosted, error)
            return
        now = self._clock.now()
        started = ResidentStarted(now, message.trial_id, hosted.iteration, now - begun)
        self._tell(started, at_once=now - begun > _SHORT_S)
        self._add(hosted, message.iterations)

    def _run(self, message: RunResident) -> None:
        hosted = self._residents.get(message.trial_id)
        if hosted is not None:
            self._add(hosted, message.iterations)

    def _pause(self, message: PauseResident) -> None:
        hosted = self._residents.get(message.trial_id)
        if hosted is not None:
            self._residents.halt(hosted)
            self._tell(ResidentPaused(self._clock.now(), hosted.trial_id, hosted.iteration))
            if message.may_move and hosted.saves_itself and hosted.member is None:
                self._save_if_due(hosted)

    def _save(self, message: SaveResident) -> None:
        hosted = self._residents.get(message.trial_id)
        if hosted is None:
            return
        try:
            saved = self._residents.save(hosted)
        except BaseException as error:
            self._fail(hosted, error)
            return
        if message.drop:
            self._residents.release(hosted)
        self._tell(saved._replace(at=self._clock.now(), dropped=message.drop))

    def _stop(self, message: ReleaseResident) -> None:
        # One that is not here has failed, and that has been reported.
        hosted = self._residents.get(message.trial_id)
        if hosted is not None:
            self._residents.release(hosted)
            self._tell(ResidentReleased(self._clock.now(), message.trial_id))

    def _call(self, message: CallResident) -> None:
        """Calls a method of a resident; what it raises changes nothing for the trial."""
        hosted = self._residents.get(message.trial_id)
        if hosted is None:
            return
        assert hosted.body is not None
        result = raised = None
        begun = self._clock.now()
        try:
            self._residents.enter(hosted)
            self._meter.begin()
            args, kwargs = pickle.loads(message.payload)
            returned = hosted.body.call(message.method, args, kwargs)
            self._residents.measure(hosted)
            result = dump_result(returned)
        except BaseException as error:
            raised = describe(error)
            self._end_if_contagious(raised)
        now = self._clock.now()
        hosted.unsaved += now - begun  # It may have changed the trial.
        called = ResidentCalled(now, hosted.trial_id, message.call_id, result, raised)
        if raised is None:
            self._tell(called)
        else:
            self._tell_raised(called, raised)
        if hosted.saves_itself and hosted.member is None and not hosted.left:
            self._save_if_due(hosted)

    # -- trials in several lanes ---------------------------------------------------------------------------

    def _adopt(self, message: AdoptResident) -> None:
        hosted = self._residents.get(message.trial_id)
        if hosted is None:
            return
        try:
            self._residents.enter(hosted)
            self._join_others(hosted, message.membership, 0.0)
        except BaseException as error:
            self._fail(hosted, error)

    def _join_others(self, hosted: ResidentTrial, membership: Membership, seconds: float) -> None:
        assert hosted.body is not None
        # A lane that waits for others must hear when one of them is gone.
        self._channel.read_ahead(self._overhear)
        trainable, host = elastic_part(hosted.body), self._options.host
        hosted.member = LaneMember(hosted.trial_id, trainable, membership, host, self._tell, self._clock)
        hosted.member.send_prepared(seconds)

    def _overhear(self, message: Any) -> None:
        """Called in another thread, as soon as a message has come."""
        if isinstance(message, ToMember):
            hosted = self._residents.get(message.trial_id)
            member = None if hosted is None else hosted.member
            if member is not None:
                member.preview(message.message)

    def _to_member(self, message: ToMember) -> None:
        hosted = self._residents.get(message.trial_id)
        if hosted is None or hosted.member is None:
            return  # It has failed, and that has been reported.
        member = hosted.member
        if isinstance(message.message, Leave):
            self._residents.release(hosted)
            member.send(Left())
            return
        try:
            self._residents.enter(hosted)
            member.handle(message.message)
        except BaseException as error:
            self._fail(hosted, error)
            return
        hosted.iteration = member.iteration
        self._residents.ask(hosted, member.left)
        if isinstance(message.message, Join) and message.message.size == 1:
            hosted.member = None  # From now on it trains as others do.

    def _iterate_together(self, hosted: ResidentTrial, member: LaneMember) -> None:
        self._residents.enter(hosted)
        self._meter.begin()
        begun = self._clock.now()
        try:
            done = member.iterate(lambda: self._residents.measure(hosted))
        except BaseException as error:
            self._fail(hosted, error)
            return
        self._residents.ask(hosted, member.left)
        if done is not None:
            hosted.iteration, hosted.finished = done.iteration, done.finished
            hosted.unsaved += self._clock.now() - begun
            if hosted.saves_itself and member.is_rank_zero:
                self._save_if_due(hosted)

    def _shutdown(self, message: Shutdown) -> None:
        for hosted in self._residents:
            self._residents.release(hosted)
        self._channel.flush()
        self._ended = True

    # -- iterations ----------------------------------------------------------------------------------------

    def _add(self, hosted: ResidentTrial, iterations: int) -> None:
        if hosted.finished:
            if iterations > 0:
                nothing = ResidentIterated(self._clock.now(), hosted.trial_id, hosted.iteration, 0.0, None, None, True)
                self._tell(nothing)
            return
        self._residents.add(hosted, iterations)

    def _iterate(self, hosted: ResidentTrial) -> None:
        assert hosted.body is not None
        if hosted.member is not None:
            self._iterate_together(hosted, hosted.member)
            return
        self._residents.enter(hosted)
        self._meter.begin()
        self._busy.begin()
        begun = self._clock.now()
        try:
            step = hosted.body.step()
            memory = self._residents.measure(hosted)
            now = self._clock.now()
            metrics = None if step.metrics is None else pack_metrics(step.metrics)
        except BaseException as error:
            self._fail(hosted, error)
            return
        seconds = now - begun
        busy = self._busy.end(seconds)
        hosted.took(seconds)
        if metrics is not None:
            hosted.iteration += 1
            hosted.unsaved += seconds
        if step.finished:
            hosted.finished = True
            self._residents.halt(hosted)
        else:
            hosted.left -= 1
            if not hosted.left:
                self._residents.queue.remove(hosted)
        done = ResidentIterated(now, hosted.trial_id, hosted.iteration, seconds, metrics, memory, step.finished, busy)
        self._tell(done, at_once=seconds > _SHORT_S)
        if hosted.saves_itself:
            self._save_if_due(hosted)

    def _save_if_due(self, hosted: ResidentTrial) -> None:
        """Saves a trial of the lane's own accord, where that costs little against the work it protects."""
        if not self._residents.is_due(hosted):
            return
        try:
            saved = self._residents.save(hosted)
        except Exception:
            # Not the trial's fault as far as its training goes: it runs on, and nobody relies on a save.
            hosted.saves_itself = False
            traceback.print_exc()
            return
        self._tell(saved)

    def _tell(self, message: Any, *, at_once: bool = True) -> None:
        # The trial's code has returned: before anybody can know, nobody is to blame any more.
        self._note.write(None)
        self._channel.send(message, at_once=at_once)

    def _fail(self, hosted: ResidentTrial, error: BaseException) -> None:
        """Lets a resident go that raised, and tells the driver why."""
        raised = describe(error)
        self._end_if_contagious(raised)
        self._residents.release(hosted)
        self._tell_raised(ResidentFailed(self._clock.now(), hosted.trial_id, *raised), raised)

    def _tell_raised(self, message: ResidentFailed | ResidentCalled, raised: Raised) -> None:
        """Tells of an error; ends the process if it is of no use to others any more."""
        if raised.kind == "out_of_memory":
            self._meter.give_back(collect=True)
        self._tell(message)
        if not self._meter.is_usable():
            os._exit(_UNUSABLE)

    def _end_if_contagious(self, raised: Raised) -> None:
        """Ends the process if what a trial raised may be another lane's doing: the driver finds out whose.

        A fatal fault of one client of MPS is reported to all of them, and to none as its own.
        """
        if self._options.environment and raised.kind != "out_of_memory" and not self._meter.is_usable():
            self._channel.flush()
            os.write(2, raised.traceback.encode(errors="replace"))  # The lane's log.
            os._exit(_UNUSABLE)
