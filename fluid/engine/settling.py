"""After each instant: what arrived is planned, what fits is started, and what runs is resized where that pays."""

from __future__ import annotations

from fluid.engine.core import SessionState
from fluid.engine.failures import Failures
from fluid.engine.lifecycle import Lifecycle
from fluid.engine.measuring import notes_of
from fluid.engine.notices import NoteKeptWidth
from fluid.engine.preemption import Preemptions
from fluid.engine.residency import Residency
from fluid.engine.resizing import Resizing
from fluid.engine.transfers import Transfers
from fluid.engine.urgency import Urgency
from fluid.engine.waits import WaitDeadline
from fluid.trialgroup import TrialState


class Settling:
    """Plans, starts, preempts and resizes once all events of an instant have changed the records.

    Attributes:
        ticked: whether a Tick has come that was not handled yet.
        wants_tick: whether a Tick is due, once the submitter has had time to answer what ended.
        changed_at: when that was last found, seconds.
    """

    def __init__(
        self,
        core: SessionState,
        lifecycle: Lifecycle,
        residency: Residency,
        resizing: Resizing,
        failures: Failures,
        preemptions: Preemptions,
        transfers: Transfers,
        urgency: Urgency,
    ) -> None:
        self.ticked = self.wants_tick = False
        self.changed_at = 0.0
        self._core = core
        self._lifecycle = lifecycle
        self._residency = residency
        self._resizing = resizing
        self._failures = failures
        self._preemptions = preemptions
        self._transfers = transfers
        self._urgency = urgency

    @property
    def is_due(self) -> bool:
        """Whether devices or trials came or went, or need less memory, or a tick has come."""
        core = self._core
        return bool(
            core.changed
            or core.arrivals
            or self.ticked
            or core.measuring.ramp_changes
            or core.memory.has_freed
            or core.cohorts.is_due
        )

    def settle(self) -> None:
        """Plans what arrived and starts what fits; on a tick, preempts and resizes where that pays.

        Resizes wait for a tick so that the submitter can first answer what ended: a device that falls idle should go
        to the submitter's next trial before it widens another.
        """
        core, scheduling = self._core, self._core.scheduling
        if not core.occupancy:
            self._failures.fail_what_waits()
            self.ticked = self.wants_tick = False
            return
        anew = core.cohorts.is_due and core.cohorts.update()
        ramped, freed = core.measuring.pop_ramp_changes(), core.memory.pop_freed()
        if core.changed or core.arrivals or ramped or freed or anew:
            # 4. Fail what no device can hold; give what arrived, or is to be planned again, widths in the queue.
            self._failures.end_misfits()
            core.commands += notes_of(ramped, core.now)
            core.fusing.update({estimate.key for estimate in ramped})
            if ramped or freed or anew:
                scheduling.plan_queue_again(anew=anew)
            arrived, core.arrivals = list(core.arrivals.values()), {}
            scheduling.arrive(arrived)
            # 5. Start what fits, calling off widenings and evicting kept states for it; pause others for urgent ones.
            self._dispatch()
            clearing = list(core.clearing.values())
            for trial in clearing:
                self._lifecycle.launch_when_ready(trial)
            if any(trial.state.ended for trial in clearing):  # One that was restored for a call left at once.
                self._dispatch()
            core.changed, self.wants_tick, self.changed_at = False, True, core.now
        if self.ticked:
            self.ticked = False
            if self.wants_tick:
                self._rebalance()

    def _rebalance(self) -> None:
        core = self._core
        self.wants_tick = False
        # 6. On a tick, leave devices that too many share, and go to the widths that the planner wants now.
        for trial in core.rebalancing.overpacked():
            self._lifecycle.preempt(trial)
        for trial in core.fusing.uneven():
            self._lifecycle.preempt(trial, why="leaves its lane for another one of its device, which is idle")
        for resize in core.rebalancing.rebalance(core.scheduling.replanner):
            self._resizing.begin(*resize)
        for trial, (change, gain, stall, *_) in core.rebalancing.pop_rejected():
            core.commands.append(
                NoteKeptWidth(
                    trial.trial_id,
                    at=core.now,
                    width=change.width,
                    old_width=trial.width,
                    gain=gain,
                    stall_s=stall,
                )
            )
        if self._core.queue:
            self._dispatch()
        for transfer in self._transfers.choose():
            if transfer.device is None:
                self._lifecycle.preempt(transfer.leaving, transfer.coming)
            else:
                self._resizing.begin(transfer.leaving, transfer.leaving.width, transfer.device)
        # 7. Preempt running trials for waiting ones, if all end earlier that way.
        for leaving, coming in self._preemptions.choose():
            self._lifecycle.preempt(leaving, coming)
        core.changed = False

    def _dispatch(self) -> None:
        self._start()
        while self._urgency.make_room():
            self._start()
        until = self._core.scheduling.placing.reservations.wait_until
        if until is None:
            self._core.deadlines.clear(WaitDeadline())
        else:
            self._core.deadlines.set(WaitDeadline(), until)

    def _start(self) -> None:
        self._start_what_fits()
        while self._core.queue and self._resizing.give_way():
            self._start_what_fits()
        if self._core.queue:
            for trial in self._residency.make_room():
                if self._core.scheduling.start_where_kept(trial):
                    self._lifecycle.start(trial)
            in_vain = self._core.scheduling.placing.admitting.lift(self._residency.is_emptying)
            if self._core.lanes.pop_freed() or in_vain:  # empty ones were ended, which made room
                self._start_what_fits()

    def _start_what_fits(self) -> None:
        again = True
        while again:
            started = self._core.scheduling.dispatch()
            self._core.stepwise |= self._core.in_rounds and bool(self._core.queue)
            for trial in started:
                if trial.state is TrialState.QUEUED:
                    self._lifecycle.start(trial)
            # A start may end a gang's idle lane, which frees memory; a trial restored for a call may leave at once.
            again = self._core.lanes.pop_freed() or any(trial.state.ended for trial in started)
