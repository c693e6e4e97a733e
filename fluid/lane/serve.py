"""The worker program: a warm process, bound to one device, that hosts trials and runs one iteration at a time.

The same code runs under every real backend. The driver decides what runs. The lane reads its messages between two
iterations, so that every request takes effect at the end of the current iteration. A paused trial stays resident:
switching to another one is a dictionary look-up.

Trials run in the main thread, because gradient mode, autocast and OpenMP are per thread.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import current_process
from typing import Any, NoReturn

from msgspec import structs

from fluid._clock import Clock, MonotonicClock
from fluid.elastic.messages import Leave, Left
from fluid.engine.commands import (
    Answer,
    Call,
    Fork,
    LimitMemory,
    LimitRows,
    Pause,
    RunIteration,
    Save,
    StopLane,
    StopTrial,
)
from fluid.engine.events import (
    IterationDone,
    LaneReady,
    LaneSpent,
    PausePurpose,
    SavabilityChanged,
    TrialCalled,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.lane.channel import Channel, Connection
from fluid.lane.device.device import bind, make_memory_meter
from fluid.lane.device.own_memory import OwnMemory
from fluid.lane.device.warming import warm_up_or_exit
from fluid.lane.errors import is_for_want_of_space, print_exception
from fluid.lane.failures import LaneFailures
from fluid.lane.log_records import RecordOutbox
from fluid.lane.member import LaneMember
from fluid.lane.news import LaneNews
from fluid.lane.output import LaneStreams, TrialLog, dump_stacks_at_signal
from fluid.lane.process.exit import ProcessExit
from fluid.lane.process.state import RunningTrialNote
from fluid.lane.protocol import (
    AdoptResident,
    CleanUpBegun,
    DropTrainable,
    KeepBar,
    LaneOptions,
    Membership,
    PayloadMissing,
    SetUpTrial,
    ShipTrainable,
    ToMember,
)
from fluid.lane.requests import DriverRequests
from fluid.lane.resident import ResidentTrial, has_changed, is_not_savable, refusal_of
from fluid.lane.residents import Residents
from fluid.lane.rows.steps import RowSteps
from fluid.processes.signals import leave_to_driver
from fluid.trainables.encoded_metrics import NO_METRICS
from fluid.trainables.shared_place import SharedPlace, set_shared_place
from fluid.trainables.trainable import elastic_part
from fluid.trainables.trial_code import inherit_trials

#: The lane reports iterations shorter than this in batches, seconds.
_SHORT_S = 0.001


def serve(
    connection: Connection,
    options: LaneOptions,
    on_hangup: Callable[[], None],
    process_exit: ProcessExit | None = None,
) -> None:
    """Runs a lane until the driver ends it or is gone.

    Args:
        connection: to the driver.
        options: its settings.
        on_hangup: called in another thread when the driver is gone; must end the process at once.
        process_exit: does what is due once no more code of trials runs in the process; ``None`` if that goes on.
    """
    leave_to_driver(signal.SIGINT, signal.SIGUSR1)
    bind(options)
    own_memory = OwnMemory(options)
    clock = MonotonicClock()
    own_bytes = warm_up_or_exit(options, own_memory, connection, clock)
    streams = sys.stdout, sys.stderr
    output = LaneStreams(*streams, echo=options.echo)
    os.register_at_fork(after_in_child=output.begin_in_child)
    sys.stdout, sys.stderr = output.stdout, output.stderr
    try:
        channel = Channel(connection, clock, on_hangup)
        _Lane(channel, options, clock, output, own_memory, process_exit).run(own_bytes)
    finally:
        sys.stdout, sys.stderr = streams


class _Lane:
    """Carries out the driver's messages, and runs the residents' iterations in between."""

    def __init__(
        self,
        channel: Channel,
        options: LaneOptions,
        clock: Clock,
        output: LaneStreams,
        own_memory: OwnMemory,
        process_exit: ProcessExit | None = None,
    ) -> None:
        self._channel = channel
        self._options = options
        self._id = options.lane_id
        self._clock = clock
        self._output = output
        self._news = LaneNews(own_memory, options.lane_id)
        self._note = RunningTrialNote(options.note)
        self._meter = make_memory_meter(options)
        self._requests = DriverRequests(channel.send, lambda: channel.read_ahead(self._preview), clock, options.lane_id)
        channel.records = RecordOutbox(self._current_trial, output.log.write, channel.wake)
        self._residents = Residents(
            options,
            clock,
            output,
            self._note,
            self._meter,
            self._requests,
            self._tell_missing,
            channel.records,
            self._tell_spent,
            self._tell_clean_up,
            channel.send,
            process_exit,
        )
        self._exit = process_exit
        self._failures = LaneFailures(
            options, clock, output, self._meter, own_memory, self._residents, self._send, self._channel.flush
        )
        self._row_steps = RowSteps(
            clock, output, self._residents, options, self._failures, self._send, self._iterate, self._report_rows
        )
        self._user_code = self._failures.user_code
        self._ended = False
        #: Trials that others are to start from, as was told just now.
        self._forking: list[ResidentTrial] = []
        #: Trials that came too late, when the process was spent; the driver takes them back.
        self._refused: set[str] = set()
        self._handlers: dict[type, Callable[[Any], None]] = {
            ShipTrainable: self._residents.add_trainable,
            DropTrainable: self._residents.drop_trainable,
            SetUpTrial: self._start,
            RunIteration: self._run,
            LimitMemory: lambda message: self._residents.limit(message.trial_id, message.limit_bytes),
            Pause: self._pause,
            Save: self._save,
            Fork: self._fork,
            StopTrial: self._release,
            Call: self._call,
            AdoptResident: self._adopt,
            ToMember: self._to_member,
            Answer: lambda message: None,  # The thread that waits for it has had it.
            KeepBar: self._residents.checkpoints.set_bar,
            LimitRows: self._set_rows,
            StopLane: self._shutdown,
        }

    def run(self, own_bytes: float = 0.0) -> None:
        residents, queue = self._residents, self._residents.queue
        self._send(LaneReady(now := self._clock.now(), self._id, own_bytes, now - self._options.launched_at))
        wait = 0.0  # For messages, seconds, if there are iterations to run.
        while not self._ended:
            try:
                # In this order: new messages, then iterations, then memory to release, then waiting for messages.
                if not queue:
                    residents.rest()
                messages = self._receive(wait if queue else residents.memory.idle_timeout(residents.current))
            except (EOFError, OSError):
                break  # The driver is gone.
            for message in messages:
                if not isinstance(message, Fork):  # One save will do for all that want one state.
                    self._carry_out_forks()
                self._handlers[type(message)](message)
            self._carry_out_forks()
            if queue:
                turn = residents.fused.groups.next(self._options.policy, residents.current)
                wait = turn.wait
                if turn.pack is not None:
                    self._row_steps.iterate(turn.pack, turn.rows)
                elif turn.rows:
                    self._iterate(turn.rows[0])
            elif residents.memory.may_hold_cache and not messages:
                self._channel.flush()
                self._settle(residents.current)
        residents.end()

    def _receive(self, timeout: float | None) -> list[Any]:
        """Returns all messages that have come.

        With one batch for each iteration, a pause would wait behind what came before it, such as news of the best
        checkpoints, and trials that train in one step would drift apart.
        """
        messages = more = self._channel.receive(timeout=timeout)
        with suppress(EOFError, OSError):  # What came before the end is carried out.
            while more:
                more = self._channel.receive(timeout=0.0)
                messages += more
        return messages

    # -- messages of the driver ----------------------------------------------------------------------------
    # A message about a trial that is not resident is ignored: the trial has failed, and the driver was told.

    def _start(self, message: SetUpTrial) -> None:
        if self._residents.is_spent and message.membership is None:
            self._refused.add(message.trial_id)
            return
        resident = self._residents.admit(message)
        begun = self._clock.now()
        with self._user_code(resident) as code:
            set_back = self._residents.set_up(resident, message)
            if set_back is not None:
                self._send(set_back)
            if resident.reports_states:
                self._tell_savability(resident, at_first=True)
            if message.membership is not None:
                self._become_member(resident, message.membership, self._clock.now() - begun)
        if code.failed or message.membership is not None:
            return
        now = self._clock.now()
        started = TrialStarted(
            now,
            message.trial_id,
            self._id,
            iteration=resident.iteration,
            seconds=now - begun,
            fusion_key=resident.fusion_key,
            restoring=resident.restored,
        )
        self._send(started, at_once=now - begun > _SHORT_S)
        self._add_iterations(resident, message.command.iterations)

    def _run(self, message: RunIteration) -> None:
        resident = self._residents.get(message.trial_id)
        if resident is not None:
            self._add_iterations(resident, message.iterations)

    def _pause(self, message: Pause) -> None:
        resident = self._residents.get(message.trial_id)
        if resident is not None:
            self._residents.halt(resident)
            may_move = message.purpose is PausePurpose.PREEMPT
            if may_move:
                self._settle(resident)  # Before the driver gives the memory to others.
            now, iteration = self._clock.now(), resident.iteration
            self._send(TrialPaused(now, resident.trial_id, self._id, iteration=iteration, purpose=message.purpose))
            if may_move and resident.autosaves and resident.member is None:
                self._save_if_due(resident)

    def _save(self, message: Save) -> None:
        resident = self._residents.get(message.trial_id)
        if resident is None:
            return
        if message.keep:
            self._send(self._residents.checkpoints.keep(resident))
            return
        with self._failures.saving(resident) as code:
            saved = self._residents.checkpoints.save(resident, durable=message.durable)
        if code.failed:
            return
        if message.drop:
            self._residents.release(resident)
        self._send(structs.replace(saved, at=self._clock.now(), dropped=message.drop))

    def _fork(self, message: Fork) -> None:
        resident = self._residents.get(message.trial_id)
        if resident is not None:
            resident.forks.append(message)
            self._forking.append(resident)

    def _carry_out_forks(self) -> None:
        """Carries out what is asked of trials that have come to the state wanted."""
        forking, self._forking = self._forking, []
        for resident in dict.fromkeys(forking):
            self._fork_due(resident)

    def _fork_due(self, resident: ResidentTrial) -> None:
        if (due := resident.take_forks()) and self._residents.get(resident.trial_id) is resident:
            for told in self._residents.checkpoints.fork(resident, due):
                self._send(told)

    def _release(self, message: StopTrial) -> None:
        resident = self._residents.get(message.trial_id)
        if message.trial_id in self._refused:
            self._refused.remove(message.trial_id)
            self._send(TrialReleased(self._clock.now(), message.trial_id, self._id))
        elif resident is not None:
            if message.keep and self._residents.checkpoints.is_to_be_kept(resident):
                self._send(self._residents.checkpoints.keep(resident))
            self._residents.release(resident)
            self._send(TrialReleased(self._clock.now(), message.trial_id, self._id))

    def _call(self, message: Call) -> None:
        """Calls a method of a resident; an exception in it goes to the caller, and the trial continues."""
        resident = self._residents.get(message.trial_id)
        if resident is None:
            return
        result, raised, is_usable = None, None, True
        try:
            result = self._residents.call(resident, message.method, message.payload)
        except BaseException as error:
            raised, is_usable = self._failures.describe(error)
        now, call_id = self._clock.now(), message.call_id
        called = TrialCalled(now, resident.trial_id, self._id, call_id=call_id, result=result, failure=raised)
        if raised is None:
            self._send(called)
        else:
            self._failures.send_raised(called, raised, is_usable)
        if resident.autosaves and resident.member is None and not resident.left:
            self._save_if_due(resident)

    def _shutdown(self, message: StopLane) -> None:
        for resident in self._residents:
            self._residents.release(resident)
        if self._exit is not None and not self._exit.is_over:
            self._tell_clean_up("")
            self._exit.run()
        self._channel.flush()
        self._ended = True

    # -- trials in several lanes ---------------------------------------------------------------------------

    def _adopt(self, message: AdoptResident) -> None:
        resident = self._residents.get(message.trial_id)
        if resident is not None:
            with self._user_code(resident):
                self._residents.enter(resident)
                self._residents.fused.forget(resident)
                self._become_member(resident, message.membership, 0.0)

    def _become_member(self, resident: ResidentTrial, membership: Membership, seconds: float) -> None:
        assert resident.body is not None
        # While this thread waits for other members, another one must read that one of them is gone.
        self._channel.read_ahead(self._preview)
        trainable, address = elastic_part(resident.body), self._options.address
        resident.member = LaneMember(resident.trial_id, trainable, membership, address, self._send, self._clock)
        resident.member.send_prepared(seconds)

    def _preview(self, message: Any) -> None:
        """Called in another thread as soon as a message has been read."""
        self._requests.preview(message)
        if isinstance(message, ToMember):
            resident = self._residents.get(message.trial_id)
            if resident is not None and resident.member is not None:
                resident.member.preview(message.message)

    def _to_member(self, message: ToMember) -> None:
        resident = self._residents.get(message.trial_id)
        if resident is None or resident.member is None:
            return
        member = resident.member
        if isinstance(message.message, Leave):
            self._residents.release(resident)
            member.send(Left())
            return
        with self._user_code(resident):
            self._residents.handle_as_member(resident, member, message.message)

    # -- iterations ----------------------------------------------------------------------------------------

    def _add_iterations(self, resident: ResidentTrial, iterations: int) -> None:
        if not resident.finished:
            self._residents.add_iterations(resident, iterations)
        elif iterations > 0:
            now, done = self._clock.now(), resident.iteration
            self._send(IterationDone(now, resident.trial_id, self._id, iteration=done, seconds=0.0, finished=True))

    def _iterate(self, resident: ResidentTrial) -> None:
        if resident.member is not None:
            self._iterate_together(resident, resident.member)
            return
        is_first = resident.pace is None
        with self._user_code(resident) as code:
            done = self._residents.iterate(resident)
        if code.failed:
            return
        if is_first:
            self._tell_news()
        if done.seconds > _SHORT_S:
            self._output.collect()
        if done.seconds > _SHORT_S or is_first or done.metrics is NO_METRICS or not done.settled:
            self._send(done, at_once=done.seconds > _SHORT_S and resident.unsent is None)
        else:
            self._note.write(None)
            self._channel.send_short(done)
        if resident.reports_states:
            self._tell_savability(resident)
        if resident.unsent is not None:
            self._send_kept(resident)
        if resident.autosaves:
            self._save_if_due(resident)
        self._fork_due(resident)

    def _report_rows(self, reports: Sequence[tuple[ResidentTrial, IterationDone]]) -> None:
        """Sends the reports of trials that took a step together, in as few batches as can be; then saves those due."""
        for resident, done in reports:
            self._send(done, at_once=False)
            if resident.unsent is not None:
                self._send_kept(resident)
        seconds = max((done.seconds for _, done in reports), default=0.0)
        if seconds > _SHORT_S:
            self._output.collect()
            self._channel.flush()
        if not all(done.settled for _, done in reports):
            self._tell_news()
        for resident, _ in reports:
            if resident.autosaves:
                self._save_if_due(resident)
            self._fork_due(resident)

    def _set_rows(self, message: LimitRows) -> None:
        self._residents.fused.groups.most = message.rows

    def _iterate_together(self, resident: ResidentTrial, member: LaneMember) -> None:
        with self._user_code(resident) as code:
            completed = self._residents.iterate_together(resident, member)
        self._output.collect()
        if resident.unsent is not None:
            self._send_kept(resident)
        if not code.failed and completed and member.is_rank_zero:
            if resident.autosaves:
                self._save_if_due(resident)
            self._fork_due(resident)

    def _send_kept(self, resident: ResidentTrial) -> None:
        """Tells of a checkpoint that outlives the run, together with the report of its iteration, and after it."""
        self._send(resident.unsent)
        resident.unsent = None

    def _save_if_due(self, resident: ResidentTrial) -> None:
        """Checkpoints a trial automatically, where that costs little against the work that it protects."""
        if not self._residents.checkpoints.is_due(resident):
            return
        checkpoints = self._residents.checkpoints
        try:
            if resident.left and checkpoints.save_behind(resident, partial(self._tell_saved, resident)):
                return  # Where it does not train on, others may wait for the checkpoint.
            saved = checkpoints.save(resident)
        except BaseException as error:
            self._tell_saved(resident, error)
            return
        self._send(saved)

    def _tell_saved(self, resident: ResidentTrial, saved: TrialSaved | BaseException) -> None:
        """Tells of an automatic checkpoint, or handles the error that it has raised; called in any thread."""
        if isinstance(saved, TrialSaved):
            self._channel.send(saved)
            return
        # Its training is unaffected, and the driver did not ask for this checkpoint: the trial continues. A full disk
        # may have space again later; other errors are of the trial's own code, and come again.
        resident.autosaves = is_for_want_of_space(saved)
        if self._residents.current is resident:
            print_exception()
        else:
            own_log = TrialLog()
            own_log.switch(resident.process_state.log_path)
            own_log.write("".join(traceback.format_exception(saved)))
            own_log.switch(None)
        if is_not_savable(saved):
            self._channel.send(refusal_of(saved, resident, self._clock.now(), refuses=False))

    def _settle(self, resident: ResidentTrial | None) -> None:
        """Gives memory back that no trial uses; tells what a trial that does not run, and the lane itself, keep."""
        if (held := self._residents.memory.settle(self._residents.current, resident)) is not None:
            self._send(held, at_once=False)
        self._tell_news()

    def _tell_news(self) -> None:
        """Tells what the lane takes for itself, and has loaded, after a trial's first iteration and at rest."""
        for message in self._news.since_last(self._residents.memory.held_bytes, self._clock.now()):
            self._send(message)

    def _tell_savability(self, resident: ResidentTrial, *, at_first: bool = False) -> None:
        if has_changed(resident) or at_first:
            self._send(SavabilityChanged(self._clock.now(), resident.trial_id, self._id, can_save=resident.savable))

    def _tell_missing(self, name: str) -> None:
        self._channel.send(PayloadMissing(name))

    def _current_trial(self) -> str | None:
        current = self._residents.current
        return None if current is None else current.trial_id

    def _tell_clean_up(self, trial_id: str) -> None:
        self._channel.send(CleanUpBegun(trial_id))

    def _tell_spent(self, reason: str) -> None:
        self._output.stderr.write(f"no further trial should run in this process: {reason}\n")
        # Before that the trial has left.
        self._channel.send(LaneSpent(self._clock.now(), self._id, reason), at_once=False)

    def _send(self, message: Any, *, at_once: bool = True) -> None:
        # The trial's code has returned. If the lane dies once the driver has this message, the trial is not to blame.
        self._note.write(None)
        self._channel.send(message, at_once=at_once)


# -- process -------------------------------------------------------------------------------------
#
# A lane as a process of its own, which leads a process group.


def run_as_process(connection: Connection, options: LaneOptions) -> NoReturn:
    """Runs a lane, and ends this process."""
    faulthandler.enable()
    dump_stacks_at_signal(options.run_folder, options.lane_id)
    set_shared_place(SharedPlace(options.payload_folders, options.reserved_bytes))
    if options.authkey:
        current_process().authkey = options.authkey
    inherit_trials()
    serve(connection, options, _end_with_group, ProcessExit())
    os._exit(0)


def _end_with_group() -> None:
    """Kills the process and those that its trials started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
