"""The trials that a lane hosts, its residents: sets them up, runs their code, measures and releases them.

One resident at a time has the process: its random generators, working directory and output are in force.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from fluid._clock import Clock
from fluid._late_imports import LateImports
from fluid._private_files import make_folder
from fluid.elastic.messages import Join
from fluid.engine.events import IterationDone, StateMeasured, TrialSetBack
from fluid.errors import PrefixEndedError
from fluid.lane.checkpoints.paths import own_folder, trial_folder
from fluid.lane.checkpoints.save import ResidentCheckpoints, StartStateGoneError, gone
from fluid.lane.device.busy import make_busy_meter
from fluid.lane.device.device import MemoryMeter, ResidentMemory
from fluid.lane.errors import asked_beyond, enter_trial, print_exception
from fluid.lane.log_records import RecordOutbox
from fluid.lane.member import LaneMember
from fluid.lane.output import LaneStreams, printable_name, trial_log
from fluid.lane.payloads import load_payload
from fluid.lane.process.exit import ProcessExit
from fluid.lane.process.script import LaneScripts
from fluid.lane.process.settings import ProcessSettings
from fluid.lane.process.state import ProcessState, RunningTrialNote
from fluid.lane.process.threads import LaneThreads
from fluid.lane.protocol import DropTrainable, KeptPayload, LaneOptions, SetUpTrial, ShipTrainable
from fluid.lane.requests import DriverRequests
from fluid.lane.resident import ResidentTrial, WorkQueue
from fluid.lane.rows.fused import FusedRows
from fluid.lane.usage import UsageMeter
from fluid.processes.interpreters import merged_path
from fluid.resources import MemoryNeed
from fluid.trainables.encoded_metrics import NO_METRICS, encode_metrics
from fluid.trainables.pickling import dump_result
from fluid.trainables.resident import Step
from fluid.trainables.trainable import can_save, make_resident, set_up
from fluid.trainables.trial_code import TrialCode, bind
from fluid.trainables.usage import Usage

if TYPE_CHECKING:
    from fluid.elastic.members.member import Iteration


# -- leftovers -----------------------------------------------------------------------------------
#
# What a trial that has left a lane leaves behind in its process besides settings: threads, and compiled code.


#: Seconds that a thread of a trial has to end by itself, once the trial has left: it may have been told to.
_GRACE_S = 0.05


def threads_left(code: TrialCode) -> Iterator[str]:
    """Yields the names of a trial's threads that still run."""
    for thread in code.threads():
        thread.join(_GRACE_S)
        if thread.is_alive():
            yield thread.name


class CompilerRoom:
    """Leaves each trial of a lane room to use ``torch.compile``.

    It compiles each function a few times in a process, and then runs it eagerly, which it tells in the log of the trial
    that comes last. Here it may do so as many times for each trial. Up to there, trials use what others have compiled.
    """

    def __init__(self) -> None:
        #: What a process may compile of a function, in all and for one set of objects, by name of the limit.
        self._limits: dict[str, int] = {}
        self._late = LateImports()
        self._trials = 1

    def make(self, trials: int) -> None:
        """Called as a trial is set up, one of so many in the lane.

        If those that have left have used up half of its part, all is forgotten: trials that go on compile again.
        """
        self._trials = trials
        if "torch._dynamo" not in self._late.calls:
            self._late.when_loaded("torch._dynamo", self._make)

    def _make(self) -> None:
        with suppress(Exception):  # An import that has failed, or names that have moved.
            config, frames = _dynamo("config"), _dynamo("convert_frame")
            for name in ("cache_size_limit", "accumulated_cache_size_limit"):  # Aliases in newer releases.
                own = self._limits.setdefault(name, getattr(config, name))
                setattr(config, name, max(getattr(config, name), own * self._trials))
            most = max(frames.FRAME_COMPILE_COUNTER.values(), default=0)
            if most >= (self._trials - 0.5) * self._limits["cache_size_limit"]:
                sys.modules["torch._dynamo"].reset()


def _dynamo(name: str) -> Any:
    return sys.modules[f"torch._dynamo.{name}"]


# -- residents -----------------------------------------------------------------------------------


class StepTook(NamedTuple):
    """What a step took: when it ended, its seconds, and for each trial its memory, share of the device, and usage."""

    at: float
    seconds: float
    memory: MemoryNeed | None
    busy: float | None
    usage: Usage


class Residents:
    """The trials in a lane, by id. Methods that run a trial's code raise what that code raises.

    Args:
        options: the lane's.
        clock: the lane's.
        output: switched to the log of the trial whose code runs.
        note: names the trial whose code runs.
        meter: of the device's memory.
        requests: sends what trials ask the driver.
        tell_missing: called with the name of a payload that the host has lost.
        records: takes the log records that the script handles.
        tell_spent: called with the reason, in one line, once no further trial should come to this process.
        tell_clean_up: called with the trial whose code is about to clean up.
        tell_held: called with what a trial that does not run holds, once another one has left.
        process_exit: run as a trial leaves that has the process to itself; ``None`` if the process goes on.

    Attributes:
        queue: those with iterations left.
        fused: those that may train in one step with others.
        current: the one whose process state is in force.
        checkpoints: saves and restores them.
        threads: CPU threads of the lane.
        memory: device memory that they take.
        is_spent: whether one has changed the process for good, so that no further one should come.
    """

    def __init__(
        self,
        options: LaneOptions,
        clock: Clock,
        output: LaneStreams,
        note: RunningTrialNote,
        meter: MemoryMeter,
        requests: DriverRequests,
        tell_missing: Callable[[str], None],
        records: RecordOutbox,
        tell_spent: Callable[[str], None],
        tell_clean_up: Callable[[str], None],
        tell_held: Callable[[StateMeasured], None],
        process_exit: ProcessExit | None,
    ) -> None:
        self.queue = WorkQueue()
        self.fused = FusedRows(self.queue, clock)
        self.current: ResidentTrial | None = None
        self.memory = ResidentMemory(meter, clock, self)
        self._options = options
        self._clock = clock
        self._output = output
        self._note = note
        self._meter = meter
        self._requests = requests
        self._tell_missing = tell_missing
        self._tell_spent = tell_spent
        self._tell_clean_up = tell_clean_up
        self._tell_held = tell_held
        self.is_spent = False
        self.threads = LaneThreads(options.threads)
        self._busy = make_busy_meter(options, clock)
        self._usage = UsageMeter()
        self._compiler = CompilerRoom()
        #: Where its trials begin; "" where that folder, the driver's, was deleted: then they stay there.
        self._home = ""
        with suppress(OSError):
            self._home = os.getcwd()
        #: ``None`` where no two trials run, and none is set up twice.
        self._settings: ProcessSettings | None = None
        self._exit = process_exit
        self.checkpoints = ResidentCheckpoints(options, clock, output, meter, self.enter)
        #: Of trainables that no trial has used here yet.
        self._payloads: dict[int, bytes | KeptPayload] = {}
        self._trainables: dict[int, Any] = {}
        self._scripts = LaneScripts(records)
        #: What tells trainables of one name apart, by key.
        self._origins: dict[int, str] = {}
        self._by_id: dict[str, ResidentTrial] = {}
        #: When the step in progress began, and the seconds waited for the driver until then.
        self._begun = 0.0, 0.0

    def __iter__(self) -> Iterator[ResidentTrial]:
        return iter(list(self._by_id.values()))

    def get(self, trial_id: str) -> ResidentTrial | None:
        """Returns the trial of that id; ``None`` if it is not resident."""
        return self._by_id.get(trial_id)

    def add_trainable(self, message: ShipTrainable) -> None:
        """Stores a trainable for the trials that will use it."""
        payload = self._payloads[message.key] = message.payload
        self._scripts.add(message.key, message.script)
        named = payload.name.encode() if isinstance(payload, KeptPayload) else payload
        self._origins[message.key] = hashlib.sha256(named).hexdigest()[:16]
        if self._settings is None:
            sys.path[:] = merged_path(sys.path, message.sys_path)
        else:
            self._settings.add_paths(message.sys_path)

    def drop_trainable(self, message: DropTrainable) -> None:
        """Drops a trainable; residents that were made of it stay."""
        self._payloads.pop(message.key, None)
        self._trainables.pop(message.key, None)
        self._origins.pop(message.key, None)
        self._scripts.drop(message.key)
        self.checkpoints.drop_trainable(message.key)

    # -- arriving and leaving ------------------------------------------------------------------------------

    def admit(self, message: SetUpTrial) -> ResidentTrial:
        """Adds a trial that is to be set up; releases a resident of the same id first."""
        trial_id = message.trial_id
        if (before := self._by_id.get(trial_id)) is not None:
            self.release(before)
        log, own = (path(self._options.run_folder, trial_id) for path in (trial_log, own_folder))
        folder = own if message.process.chdir else self._home
        if self._settings is None and (not message.process.alone or message.command.checkpoint is not None):
            self._settings = ProcessSettings()
        state = ProcessState(log, folder, self._settings, self.threads, message.process)
        link = self._requests.link(trial_id, own)
        code = TrialCode(link).begin()
        resident = ResidentTrial(
            trial_id=trial_id, lane_id=self._options.lane_id, process_state=state, link=link, code=code
        )
        resident.limit, resident.is_alone = message.command.limit_bytes, message.process.alone
        self._by_id[trial_id] = resident
        return resident

    def set_up(self, resident: ResidentTrial, message: SetUpTrial) -> TrialSetBack | None:
        """Sets a trial up, and restores it from its checkpoint if it has one.

        Returns:
            Why it has an earlier state than that of its checkpoint; ``None`` if it has that one.
        """
        checkpoint = message.command.checkpoint
        if message.process.chdir:
            make_folder(resident.link.folder)
        self.enter(resident)
        self._compiler.make(len(self._by_id))
        self._scripts.put_in_force(message.key)
        trainable = self._trainable(message.key)
        resident.process_state.announce(printable_name(trainable), self._output)
        resident.key, resident.save_cost = message.key, self.checkpoints.usual_cost(message.key)
        self.memory.limit([resident])
        self.memory.begin()  # Only now: memory of the modules that were just imported is the lane's.
        resident.autosaves = can_save(trainable)

        def make_body() -> None:
            resident.process_state.begin()  # Loading the trainable may have drawn numbers.
            folder = trial_folder(self._options.run_folder, message.trial_id)
            resident.body = make_resident(trainable, trial_id=message.trial_id, folder=folder)
            resident.reports_states = resident.body.reports_states
            resident.rule = message.keep if resident.autosaves or resident.reports_states else None
            joins = message.membership is not None and message.membership.takes_over
            config = self._load(message.config)
            if (module := sys.modules.get("fluid.search.schedules")) is not None:  # Else the config has none.
                resident.schedules = module.schedules_in(config)
                enter_trial(resident.trial_id, resident.schedules)
            set_up(resident.body, config, joins=joins, loads=checkpoint is not None)

        def renew() -> None:
            self._clean_up(resident)
            self._meter.release_cached(collect=True)
            resident.process_state.renew()
            resident.code = TrialCode(resident.link).begin()
            resident.code.enter()
            make_body()

        begun = self._clock.now()
        make_body()
        resident.set_up_s = self._clock.now() - begun
        set_back = None
        if checkpoint is not None:
            set_back, resident.restored = self.checkpoints.restore(resident, message.command, message.source, renew)
        elif message.command.must_restore and message.membership is None:
            raise StartStateGoneError(gone(0, "no checkpoint of it is left"))
        self.memory.measure([resident])
        if (digest := self.fused.identify(resident)) is not None:
            resident.fusion_key = digest
        return set_back

    def enter(self, resident: ResidentTrial) -> None:
        """Puts a resident's process state in force."""
        self._note.write(resident.trial_id)
        if self.current is not resident:
            if self.current is not None:
                self.current.process_state.leave()
            self._meter.change_trial()  # Memory that the previous trial has freed is not this one's.
            self._busy.change_trial()
            resident.process_state.enter(self._output)
            self._scripts.show(resident.key)
            resident.code.enter()
            enter_trial(resident.trial_id, resident.schedules)
            self.current = resident
        else:
            resident.process_state.wake()

    def enter_several(self, rows: Sequence[ResidentTrial]) -> None:
        """Puts the process state of the first of several residents in force, whose code runs at once.

        If the lane dies meanwhile, no one of them is known to be to blame.
        """
        self.enter(rows[0])
        if len(rows) > 1:
            self._note.write(None)

    def release(self, resident: ResidentTrial) -> None:
        """Cleans a resident up and removes it; what its clean-up raises goes to its log."""
        self.enter(resident)
        self.checkpoints.forget_resident(resident.trial_id)
        self._tell_clean_up(resident.trial_id)
        if alike := self.fused.others_like([resident]):
            self.memory.begin()
        self._clean_up(resident)
        if resident.is_alone and self._exit is not None:
            self._exit.run()
        self.halt(resident)
        del self._by_id[resident.trial_id]
        self._requests.unlink(resident.trial_id)
        self._put_back(resident)
        self._unbind()
        self._meter.release_cached(collect=True)
        if alike:
            for held in self.memory.leave(resident, alike):
                self._tell_held(held)

    def _put_back(self, resident: ResidentTrial) -> None:
        """Puts the process back to the lane's own state; tells the driver if that cannot be done, and matters."""
        stays = resident.process_state.give_back(self._output)
        reasons = [
            *(f"its thread {name!r} still runs" for name in threads_left(resident.code) if not resident.is_alone),
            *(f"what it changed stays: {name}" for name in stays),
        ]
        if reasons and not (self.is_spent or resident.is_alone):
            self.is_spent = True
            self._tell_spent(f"trial {resident.trial_id!r} has left, and {'; '.join(reasons)}")

    def rest(self) -> None:
        """Called before the lane waits, with no iterations to run."""
        if self.current is not None:
            self.current.process_state.rest()

    def end(self) -> None:
        """Ends with the lane: no trial's code runs in this process any more."""
        for resident in self:
            resident.code.end()
        self._unbind()

    def _unbind(self) -> None:
        """Notes that what this thread runs from now on is no trial's code."""
        bind(threading.current_thread(), None)
        self.current = None

    def _clean_up(self, resident: ResidentTrial) -> None:
        try:
            self.fused.forget(resident)
            if resident.member is not None:
                resident.member.leave_generation()
            if resident.body is not None:
                resident.body.cleanup()
        except BaseException:
            print_exception()
        resident.body = None
        resident.code.end()

    def _trainable(self, key: int) -> Any:
        if key not in self._trainables:
            self._trainables[key] = self._load(self._payloads[key])
            del self._payloads[key]
            if self._settings is not None:
                self._settings.rebase()  # What its modules set when they are imported, they set once for all trials.
        return self._trainables[key]

    def _load(self, payload: bytes | KeptPayload) -> Any:
        return load_payload(payload, self._options.payload_folders, self._tell_missing)

    # -- iterations left -----------------------------------------------------------------------------------

    def add_iterations(self, resident: ResidentTrial, iterations: int) -> None:
        """Adds to the iterations that a trial has left."""
        if iterations > 0 and resident.left == 0:
            self.queue.add(resident)
        resident.left += iterations
        self.fused.groups.note_iterations(resident)

    def set_iterations(self, resident: ResidentTrial, iterations: int) -> None:
        """Sets the iterations that a trial has left."""
        self.halt(resident)
        self.add_iterations(resident, iterations)

    def halt(self, resident: ResidentTrial) -> None:
        """Leaves a trial no iterations to run."""
        self.fused.groups.await_no_more(resident)
        if resident.left:
            resident.left = 0
            self.queue.remove(resident)

    def limit(self, trial_id: str, limit_bytes: float | None) -> None:
        """Limits the device memory that a trial may take from its next iteration on; ``None`` for no limit."""
        resident = self._by_id.get(trial_id)
        if resident is not None:
            resident.limit = limit_bytes

    # -- running their code --------------------------------------------------------------------------------

    def iterate(self, resident: ResidentTrial) -> IterationDone:
        """Runs one iteration of a trial that trains alone; returns the report for the driver."""
        assert resident.body is not None
        rows = [resident]
        self.begin_step(rows)
        step = resident.body.step()
        # The first iteration takes what later ones keep; to empty the cache after each would slow them down.
        took = self.end_step(rows, settle=resident.pace is None)
        return self.book(resident, step, took, settled=resident.rows <= 1)

    def begin_step(self, rows: Sequence[ResidentTrial], begun: float | None = None) -> None:
        """Called before a step of trials that run at once; it ``begun`` then, if not now."""
        self.enter_several(rows)
        self.memory.limit(rows)
        self.memory.begin()
        self._busy.begin()
        self._usage.begin(rows[0].pace)
        self._begun = self._clock.now() if begun is None else begun, self._requests.waited_s

    def end_step(self, rows: Sequence[ResidentTrial], *, settle: bool) -> StepTook:
        """Called after the step; ``settle`` releases cached memory, so that what is held can be told."""
        shared, alike = self.fused.shared_bytes(rows), self.fused.others_like(rows)
        memory = self.memory.measure(rows, settle=settle, shared=shared, alike=alike)
        now, (begun, waited) = self._clock.now(), self._begun
        seconds = max(0.0, now - begun - (self._requests.waited_s - waited))
        return StepTook(now, seconds, memory, self._busy.end(seconds), self._usage.end(now - begun, len(rows)))

    def book(
        self, resident: ResidentTrial, step: Step, took: StepTook, *, rows: int = 1, settled: bool = True
    ) -> IterationDone:
        """Counts an iteration of a trial, one of several in the step; returns the report for the driver."""
        metrics = None if step.metrics is None else encode_metrics(step.metrics)
        resident.record_iteration(took.seconds, rows)
        self.queue.note_iteration(resident)
        if metrics is not None:
            resident.iteration += 1
            resident.unsaved += took.seconds / rows
        if step.finished:
            resident.finished = True
            self.halt(resident)
        else:
            resident.left -= 1
            if not resident.left:
                self.queue.remove(resident)
        if resident.rule is not None and metrics is not None:
            self.checkpoints.keep_if_better(resident, metrics.numbers)
        return IterationDone(
            took.at,
            resident.trial_id,
            resident.lane_id,
            iteration=resident.iteration,
            seconds=took.seconds,
            metrics=NO_METRICS if metrics is None else metrics,
            memory=took.memory,
            finished=step.finished,
            busy=took.busy,
            rows=rows,
            settled=settled,
            usage=took.usage,
        )

    def iterate_together(self, resident: ResidentTrial, member: LaneMember) -> bool:
        """Runs one iteration of a trial together with other lanes; returns whether it was completed."""
        self.enter(resident)
        self.memory.limit([resident])
        self.memory.begin()
        self._usage.begin(None)
        begun = self._clock.now()

        def at_end(done: Iteration) -> tuple[MemoryNeed | None, Usage]:
            if (text := asked_beyond(resident.trial_id)) is not None:
                raise PrefixEndedError(text)
            memory = self.memory.measure([resident])
            usage = self._usage.end(self._clock.now() - begun)
            resident.iteration, resident.finished = done.iteration, done.finished
            resident.unsaved += self._clock.now() - begun
            if resident.rule is not None and member.is_rank_zero:
                self.checkpoints.keep_if_better(resident, encode_metrics(done.metrics).numbers)
            return memory, usage

        done = member.iterate(at_end)
        self.set_iterations(resident, member.left)
        return done is not None

    def handle_as_member(self, resident: ResidentTrial, member: LaneMember, message: Any) -> None:
        """Handles a controller's message about a generation."""
        self.enter(resident)
        member.handle(message)
        resident.iteration = member.iteration
        self.set_iterations(resident, member.left)
        if isinstance(message, Join) and message.size == 1:
            resident.member = None  # It trains alone from now on.
            self.fused.identify(resident)

    def call(self, resident: ResidentTrial, method: str, payload: bytes) -> bytes:
        """Calls a method with pickled arguments; returns the pickled result."""
        assert resident.body is not None
        begun = self._clock.now()
        try:
            self.enter(resident)
            self.memory.begin()
            self.fused.forget(resident)
            args, kwargs = pickle.loads(payload)
            result = resident.body.call(method, args, kwargs)
            self.memory.measure([resident])
            return dump_result(result)
        finally:
            self.fused.identify(resident)
            resident.unsaved += self._clock.now() - begun  # The call may have changed the trial.

    def origin(self, resident: ResidentTrial) -> str:
        """Returns what tells a resident's trainable from others of the same name."""
        return self._origins.get(resident.key, "")
