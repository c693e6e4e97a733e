"""What the parts of the state machine share: the records, the commands to issue, and the smallest steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluid.engine.allocations import Allocations
from fluid.engine.commands import Command, NoteResize, ReportCall, ReportEnd, ReportStart, RunIteration, StopTrial
from fluid.engine.estimates import Estimates
from fluid.engine.events import Failure
from fluid.engine.lanes import Lanes
from fluid.engine.measuring import Measuring
from fluid.engine.records import GroupRecord, Stage, TrialRecord
from fluid.engine.scheduling import Scheduling
from fluid.engine.trials import Trials
from fluid.errors import FluidError
from fluid.planning.memory_ledger import MemoryLedger
from fluid.planning.occupancy import Occupancy
from fluid.trialgroup import TrialState


class EngineError(FluidError):
    """An event that cannot be: a fault of Fluid or of a backend. Carries the trial's story."""


@dataclass
class SessionState:
    """The state of a session, and the steps that all transitions are made of.

    Attributes:
        commands: what to do, in order, for the events at hand.
        arrivals: queued trials that have no width yet, by row.
        resizing: trials that are being resized, by row, in the order in which that began.
        clearing: trials that wait to start until states that were kept on their devices have left, by row.
        forgotten: ids of trials that were here and are taken.
        changed: whether devices or trials came or went, so that queued trials may fit now.
        now: time of the latest event, seconds.
    """

    trials: Trials
    lanes: Lanes
    occupancy: Occupancy
    memory: MemoryLedger
    estimates: Estimates
    allocations: Allocations
    measuring: Measuring
    scheduling: Scheduling
    groups: dict[str, GroupRecord] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    arrivals: dict[int, TrialRecord] = field(default_factory=dict)
    resizing: dict[int, TrialRecord] = field(default_factory=dict)
    clearing: dict[int, TrialRecord] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    changed: bool = False
    now: float = 0.0

    def holder(self, trial_id: str, lane_id: int) -> TrialRecord | None:
        """The trial if that lane was told to run it; ``None`` if it has left it, so that its news is out of date."""
        trial = self.trials.get(trial_id)
        if trial is None or not trial.placement.launched:
            return None
        hosts = trial.placement.lanes if trial.placement.move is None else trial.placement.hosts
        return trial if lane_id in hosts else None

    # -- the story -----------------------------------------------------------------------------------------

    def set_state(self, trial: TrialRecord, state: TrialState, why: str) -> None:
        """Brings a trial into a state."""
        trial.state = state
        trial.story.append((self.now, f"{state.value}: {why}"))

    def log(self, trial: TrialRecord, text: str) -> None:
        """Adds to a trial's story."""
        trial.story.append((self.now, text))

    def error(self, trial: TrialRecord | None, message: str) -> EngineError:
        """An error that tells the trial's story."""
        if trial is None:
            return EngineError(message)
        story = "\n".join(f"  {at:.3f} s  {text}" for at, text in trial.story)
        return EngineError(f"trial {trial.trial_id!r}, {trial.state.value}: {message}\nits story:\n{story}")

    # -- steps ---------------------------------------------------------------------------------------------

    def invalidate_timing(self, trial: TrialRecord) -> None:
        """Notes for all trials on its devices that the iteration in flight says nothing about co-residency."""
        trial.pace.disturbed = True
        occupancy, records = self.occupancy, self.trials.by_row
        for device in occupancy.held.get(trial.row, ()):
            rows = occupancy.residents[device]
            if len(rows) > 1:
                for row in rows:
                    if row in records:
                        records[row].pace.disturbed = True

    def release(self, trial: TrialRecord) -> None:
        """Takes a trial off its devices and lanes."""
        self.invalidate_timing(trial)
        self.lanes.release(trial.placement.lanes)
        if trial.placement.move is not None:
            self.lanes.release(trial.placement.move.old_lanes)
        self.allocations.release(trial)
        self.resizing.pop(trial.row, None)
        self.clearing.pop(trial.row, None)
        trial.placement.lanes = ()
        trial.placement.move = None
        trial.placement.launched = trial.preempting = False
        trial.successor = None
        trial.placement.stopping_lanes.clear()
        trial.placement.lost_lanes.clear()
        self.changed = True

    def drain(self, trial: TrialRecord, lane_ids: tuple[int, ...], *, told: bool = False) -> None:
        """Has a trial that goes on elsewhere, or not at all, leave lanes in which it may run."""
        if not lane_ids:
            return
        need = self.estimates.need(trial)
        for lane_id in lane_ids:
            self.lanes.drain(lane_id, trial.trial_id, need.peak_bytes if need is not None else 0.0)
        if not told:
            self.commands.append(StopTrial(trial.trial_id, lane_ids))

    def enqueue(self, trial: TrialRecord, why: str) -> None:
        """Queues a trial; it goes on from the state that is left of it."""
        if trial.residence.lane is None:
            trial.progress.done = trial.residence.restart_at
        self.set_state(trial, TrialState.QUEUED, why)
        self.arrivals[trial.row] = trial
        if trial.residence.device is not None:
            self.memory.request_check(trial.residence.device)  # its state may leave now

    def queue_again(self, trial: TrialRecord, why: str) -> None:
        """Queues a trial that was interrupted: at the width it has, before those it was ahead of."""
        self.set_state(trial, TrialState.QUEUED, why)
        self.scheduling.enqueue(trial, trial.placement.width, again=True)
        self.changed = True
        if trial.residence.device is not None:
            self.memory.request_check(trial.residence.device)  # its state may leave now

    def unqueue(self, trial: TrialRecord) -> None:
        """Takes a queued trial out of the queue."""
        self.arrivals.pop(trial.row, None)
        self.scheduling.withdraw(trial)

    def top_up(self, trial: TrialRecord) -> None:
        """Tells the lanes of a running trial about iterations that it was not told about yet."""
        limit = trial.limit
        if trial.stopping or trial.preempting or trial.progress.granted >= limit or trial.progress.finished_early:
            return
        warming = trial.placement.move is not None and trial.placement.move.stage is Stage.WARMING
        if trial.state is TrialState.RUNNING or warming:
            self.commands.append(RunIteration(trial.trial_id, trial.placement.hosts, limit - trial.progress.granted))
            trial.progress.granted = limit

    def end(self, trial: TrialRecord, state: TrialState, why: str) -> None:
        """Ends a trial, which holds nothing any more."""
        if trial.state is not TrialState.DONE:
            self.groups[trial.group_id].open -= 1
        self.set_state(trial, state, why)
        was_told, trial.restored_for_call = trial.restored_for_call, False
        if state is TrialState.DONE:
            if not was_told:
                self.report_end(trial)
            return
        self.refuse_calls(trial)
        self.report_end(trial)

    # -- what submitters are told --------------------------------------------------------------------------

    def report_start(self, trial: TrialRecord) -> None:
        """Tells the submitter that a trial begins to run; of one that was woken it knows nothing."""
        if not trial.restored_for_call and not trial.stopping:
            devices = tuple([self.lanes[lane_id].device_id for lane_id in trial.placement.lanes])
            self.commands.append(
                ReportStart(
                    trial.trial_id, trial.group_id, at=self.now, width=trial.placement.width, device_ids=devices
                )
            )

    def note_resize(self, trial: TrialRecord, seconds: float) -> None:
        """Has it written down that a trial runs at another width."""
        devices = tuple([self.lanes[lane_id].device_id for lane_id in trial.placement.lanes])
        self.commands.append(
            NoteResize(trial.trial_id, at=self.now, width=trial.placement.width, device_ids=devices, seconds=seconds)
        )

    def report_end(self, trial: TrialRecord) -> None:
        """Tells the submitter how a trial ended."""
        failure = trial.limits.failure if trial.state is TrialState.FAILED else None
        self.commands.append(
            ReportEnd(
                trial.trial_id,
                trial.group_id,
                state=trial.state.value,
                iteration=trial.progress.done,
                at=self.now,
                failure=failure,
            )
        )

    def report_call(
        self, trial: TrialRecord, call_id: int, result: bytes | None = None, failure: Failure | None = None
    ) -> None:
        """Tells the submitter what came of a call."""
        self.commands.append(
            ReportCall(trial.trial_id, trial.group_id, call_id=call_id, result=result, failure=failure, at=self.now)
        )

    def refuse_calls(self, trial: TrialRecord) -> None:
        """Answers all calls of a trial that will not run again."""
        if not trial.calls:
            return
        failure, failed = Failure("stopped", "the trial was stopped"), trial.limits.failure
        if trial.state is TrialState.FAILED and failed is not None:
            failure = Failure(failed.kind, f"the trial failed: {failed.message}", failed.traceback)
        elif trial.residence.given_up:
            failure = Failure("stopped", "the trial's state was let go to make room for others, and cannot be restored")
        for call in trial.calls:
            self.report_call(trial, call.call_id, failure=failure)
        trial.calls.clear()
