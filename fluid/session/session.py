"""A session: the requests of submitters, each made one step of the session's thread."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fluid._clock import Clock
from fluid.backends.base import Backend, ForkingBackend
from fluid.engine.events import (
    OUTCOMES,
    BudgetExtended,
    CallRequested,
    DeviceAdded,
    DeviceLost,
    Event,
    GroupSubmitted,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    TrialForgotten,
    TrialsAdded,
)
from fluid.engine.group_terms import GroupTerms
from fluid.engine.state import EngineState
from fluid.engine.trial_spec import TrialSpec
from fluid.errors import FluidError, require_one_of
from fluid.keeping import NOTHING, Retention
from fluid.planning.profile import Profile
from fluid.resources import Device
from fluid.results.group_lines import GroupLine
from fluid.session.forecasts import Forecasts
from fluid.session.inbox import GroupInbox
from fluid.session.payloads import payload_cache
from fluid.session.pump import Pump
from fluid.session.results import TrialListener
from fluid.session.resume import LeftSession
from fluid.session.run_folder import RunFolder
from fluid.session.specs import say_what_is_awaited, spec_of, warn_of_unfusible, with_requirements
from fluid.session.standing import Standing, standing_of
from fluid.session.status import GroupStatus, Status, status_of
from fluid.sizing.goals import NO_GOALS, Goals
from fluid.trainables.import_scan import imports_of
from fluid.trainables.json_form import json_form
from fluid.trainables.payload import TrialPayload
from fluid.trialgroup import PAUSED_BY_USER, Trial, TrialGroup, TrialState

T = TypeVar("T")
#: States that trials keep when the session ends.
_RESTING = frozenset([*(state for state in TrialState if state.ended), TrialState.PAUSED, PAUSED_BY_USER])


class Session:
    """A session that runs. All methods may be called from any thread; what the engine refuses changes nothing.

    Trials are pickled in the caller's thread. The session's thread then asks the engine, registers accepted trials with
    the backend, writes them to the run folder and starts them, in one step.

    Args:
        state: the engine.
        backend: what executes its commands; closed with the session.
        folder: the run folder; closed with the session.
        max_width: most devices for a trial that sets no bound of its own.
        facts: what ``session.json`` says of the session.
        keep: which checkpoints outlive the session.
        goals: when all is to have ended, and what that may cost.
    """

    def __init__(
        self,
        state: EngineState,
        backend: Backend,
        folder: RunFolder,
        max_width: int,
        facts: Mapping[str, Any],
        keep: Retention = NOTHING,
        goals: Goals = NO_GOALS,
    ) -> None:
        self._state, self._backend, self._folder = state, backend, folder
        self._max_width = max_width
        self._insists_on_fusing, self.in_rounds = facts.get("packing") == "fused", bool(facts.get("rounds"))
        self._payloads = payload_cache(backend)
        #: Number of the next group. Used in the session's thread only.
        self._next_group = 0
        self._pump = Pump(state, backend, folder, facts, keep, goals)
        self._keeper = self._pump.keeper
        self.clock: Clock = backend  # Of its events; a hold makes it stand still.
        self.hold = self._pump.hold
        #: Forecasts of its groups.
        logged = None if self.hold.is_virtual else folder
        self.forecasts = Forecasts(state, backend.now, self._pump.inboxes, self._in_thread, logged)
        self._pump.scaling.sizing.end_on = self.forecasts.end_on

    @property
    def inboxes(self) -> list[GroupInbox]:
        """One per group, in order of submission."""
        return list(self._pump.inboxes.values())

    @property
    def profile(self) -> Profile:
        """What was measured so far."""
        return self._state.profile

    # -- trials --------------------------------------------------------------------------------------------

    def submit(self, group: TrialGroup, listener: TrialListener | None, terms: GroupTerms) -> GroupInbox:
        """Runs a group on these terms.

        Raises:
            InvalidFieldError: an id is taken, a trial cannot be pickled, or the best are to be kept without a metric.
        """
        self._keeper.require_goal(group.search)
        payloads, specs = self._prepare(with_requirements(group.active, group))
        if self._insists_on_fusing and not self._pump.inboxes:
            warn_of_unfusible(group)

        def submit() -> GroupInbox:
            group_id = str(self._next_group)
            inbox = GroupInbox(group_id, group, listener, self.hold)
            event = GroupSubmitted(at=self._backend.now(), group_id=group_id, trials=specs, terms=terms)
            self._pump.handle(event, accepted=lambda: self._open_group(inbox, payloads))
            say_what_is_awaited(self._state, group.name, specs)
            return inbox

        return self._pump.act(submit)

    def add(self, group_id: str, trials: list[Trial]) -> None:
        """Adds trials to a group."""
        payloads, specs = self._prepare(with_requirements(trials, self._pump.inboxes[group_id].group))

        def add() -> None:
            inbox, now = self._pump.inboxes[group_id], self._backend.now()
            event = TrialsAdded(at=now, group_id=group_id, trials=specs)
            self._pump.handle(event, accepted=lambda: self._take_in(inbox, payloads))
            say_what_is_awaited(self._state, inbox.group.name, specs)
            self._pump.notify(*(partial(inbox.reopen, trial.id) for trial in trials))

        self._pump.act(add)

    def stop(self, trial_id: str, outcome: str | None, *, now: bool = False) -> None:
        """Stops a trial; with ``now``, by killing its lanes."""
        known = None if outcome is None else TrialState(require_one_of("outcome", outcome, OUTCOMES))
        self.ask(partial(StopRequested, trial_id=trial_id, outcome=known, now=now))

    def pause(self, trial_id: str) -> None:
        """Pauses a trial until it is resumed."""
        self.ask(partial(PauseRequested, trial_id=trial_id))

    def resume_trial(self, trial_id: str) -> None:
        """Lets a paused trial go on."""
        self.ask(partial(ResumeRequested, trial_id=trial_id))

    def extend(self, trial_id: str, budget: int, follow_up_iterations: int) -> None:
        """Gives a trial ``budget`` further iterations."""

        def extend() -> None:
            event = BudgetExtended(
                at=self._backend.now(),
                trial_id=trial_id,
                iterations=budget,
                follow_up_iterations=follow_up_iterations,
            )
            self._pump.handle(event)
            trial = self._state.trials[trial_id]
            if not trial.state.ended:
                self._pump.notify(partial(self._pump.inboxes[trial.group_id].reopen, trial_id))

        self._pump.act(extend)

    def await_departures(self, group_id: str, timeout_s: float) -> tuple[str, ...]:
        """Waits until the stopped trials of a group were cleaned up; returns the ids of those that were not in time."""
        return self._pump.await_departures(group_id, timeout_s)

    def await_kept(self, timeout_s: float) -> bool:
        """Waits until all checkpoints that outlive the session so far are in the run folder; returns whether they are.

        Raises:
            FluidError: the session has ended, or this is its own thread.
        """
        if self.is_in_thread:
            raise FluidError("a listener cannot wait for checkpoints: wait in another thread")
        return bool(wait([self._in_thread(self._keeper.settled)], timeout=timeout_s).done)

    def call(self, trial_id: str, call_id: int, method: str, payload: bytes) -> None:
        """Calls a method of a trial; the group's inbox gets the answer."""

        event = partial(CallRequested, trial_id=trial_id, call_id=call_id, method=method, payload=payload)
        self.ask(event)

    def show_config(self, trial: Trial) -> None:
        """Writes which hyperparameters reports show of a trial."""
        config = json_form(dict(trial.shown.config)) if trial.shown is not None else {}
        self._in_thread(lambda: self._folder.write_shown_config(trial.id, config))

    def forget(self, trial_id: str) -> None:
        """Drops a trial that has ended."""

        def forget() -> None:
            known = self._state.trials.get(trial_id)
            self._pump.handle(TrialForgotten(at=self._backend.now(), trial_id=trial_id))
            self._pump.notify(partial(self._backend.forget, trial_id))
            if known is not None:
                self._pump.notify(partial(self._pump.inboxes[known.group_id].drop, trial_id, known.outcome))

        self._pump.act(forget)

    # -- devices -------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[Device]:
        """The devices in use."""
        return self._in_thread(lambda: self._state.devices)

    @property
    def max_devices(self) -> int:
        """Most devices that the session may come to hold."""
        return self._in_thread(lambda: self._pump.scaling.most)

    def add_device(self, device: Device) -> None:
        """Puts a further device to use."""

        def add() -> None:
            self._backend.add_devices([device])
            self._pump.handle(DeviceAdded(at=self._backend.now(), device=device))

        self._pump.act(add)

    def remove_device(self, device_id: int) -> None:
        """Gives a device up."""
        self._pump.act(lambda: self._pump.handle(DeviceLost(at=self._backend.now(), device_id=device_id)))

    def drain(self, device_id: int | None, deadline_s: float) -> tuple[str, ...]:
        """Drains a device, or the whole session where that is ``None``; returns ids of trials that were not saved."""
        return self._pump.drain(device_id, deadline_s)

    def add_deadline(self, seconds: float, ended: Callable[[str], None]) -> Callable[[], None]:
        """Sizes the session for an end so many seconds from now; returns what drops that deadline again.

        ``ended`` is called in the session's thread, when running iterations are to be saved, with why.
        """
        sizing = self._pump.scaling.sizing
        added = self._in_thread(lambda: sizing.add(seconds, self._backend.now(), ended))

        def drop() -> None:
            with suppress(FluidError):  # The session has ended.
                self._in_thread(lambda: sizing.drop(added))

        return drop

    @property
    def unfinished(self) -> int:
        """Trials that have not ended."""
        return self._in_thread(lambda: sum(group.open for group in self._state.groups.values()))

    # -- processes -----------------------------------------------------------------------------------------

    def preload(self, trainable: Any, modules: Iterable[str] = ()) -> None:
        """Loads what a trainable imports, and further modules, ahead of its first trial, where the backend can."""
        if isinstance(self._backend, ForkingBackend):
            self._backend.preload([*modules, *imports_of(trainable)])

    def start_program(self, program: str) -> socket.socket | None:
        """Forks a process that is no lane; ``None`` where the backend forks none on the driver's machine.

        Args:
            program: ``module:function``, called with the process's end of a connection.

        Returns:
            The caller's end of the connection.
        """
        return self._backend.start_program(program) if isinstance(self._backend, ForkingBackend) else None

    # -- the session itself --------------------------------------------------------------------------------

    def resume(self, left: LeftSession, listeners: Mapping[str, TrialListener]) -> None:
        """Goes on with the groups of an earlier session; ``listeners`` has those of groups, by name."""
        payloads = {
            group_id: {trial: self._payload_of(trial) for trial in group.trials.values()}
            for group_id, group in left.groups.items()
        }
        trackers = left.trackers()

        def register(group_id: str) -> None:
            for trial, payload in payloads[group_id].items():
                rule = self._keeper.admit(group_id, left.groups[group_id].line.search, trial, recover=True)
                self._backend.register(trial.id, payload if rule is None else replace(payload, keep=rule))
            self._keeper.tell_lanes()

        def resume() -> None:
            now = self._backend.now()
            left.complete(self._folder, payloads, now)
            for event in map(self._keeper.recovered, left.events(now, self._spec)):
                group = left.groups[event.group_id].submitted()
                inbox = GroupInbox(event.group_id, group, listeners.get(group.name), self.hold)
                ended = {past.trial.trial_id: past.ended for past in event.trials if past.ended}
                results, offset = left.results.groups.get(event.group_id), left.results.offset_at(now)
                inbox.take_over(ended, left.recovered.failures, results, offset, trackers[event.group_id])
                inbox.outcomes, inbox.has_forgotten = left.recovered.outcomes, bool(event.forgotten)
                self._pump.inboxes[event.group_id] = inbox
                self._pump.handle(event, accepted=partial(register, event.group_id))
                self._next_group = max(self._next_group, int(event.group_id) + 1)

        self._pump.act(resume)

    def status(self) -> Status:
        """How the session stands."""
        return self._in_thread(self._status)

    def group_status(self, group_id: str) -> GroupStatus:
        """How a group stands, also once the session has ended; trials that had not ended then are INTERRUPTED."""
        try:
            return self._in_thread(lambda: self._group_status(group_id))
        except FluidError:
            group = self._group_status(group_id)  # Its thread has ended, or is about to change nothing more.
        rest = {state: number for state, number in group.trials.items() if state in _RESTING}
        left = sum(group.trials.values()) - sum(rest.values())
        return replace(group, trials={**rest, "INTERRUPTED": left} if left else rest)

    def _group_status(self, group_id: str) -> GroupStatus:
        return self._status().groups[list(self._state.groups).index(group_id)]

    def _status(self) -> Status:
        groups = {inbox.group_id: inbox.facts for inbox in self.inboxes}
        at = self._backend.now() - (began := self._pump.began)
        asked, goal = self._pump.scaling.asked, self._pump.scaling.sizing.status(began + at)
        shown, path = self.forecasts.shown, self._folder.path
        found = status_of(self._state, groups, at, began=began, asked=asked, run_dir=path, goal=goal, forecast=shown)
        return replace(found, rehearsed=self.hold.is_virtual)

    def standing(self, group_ids: Collection[str]) -> Standing:
        """How the trials of some groups stand; of a session that has ended, how they stood then."""
        try:
            return self._in_thread(lambda: standing_of(self._state, group_ids))
        except FluidError:  # The session has ended: nothing changes any more.
            return standing_of(self._state, group_ids)

    @property
    def has_ended(self) -> bool:
        """Whether the session was closed, or broke."""
        return self._pump.has_ended

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self._folder.path

    def eta(self, group_id: str) -> float | None:
        """Predicted seconds until a group has ended; ``None`` where no trial of it was measured, or one hangs."""
        return self._in_thread(lambda: self._state.seconds_left(group_id, self._backend.now()))

    @property
    def is_in_thread(self) -> bool:
        """Whether the session's own thread asks, as in a listener."""
        return self._pump.is_in_thread

    def close(self) -> None:
        """Ends the session; waits until its lanes are gone, unless the session's own thread calls it."""
        self.forecasts.close()
        self._pump.close()

    # -- parts of requests ---------------------------------------------------------------------------------

    def ask(self, event: Callable[..., Event]) -> None:
        """Asks the engine for something, by an event that is made at its time."""
        self._pump.act(lambda: self._pump.handle(event(at=self._backend.now())))

    def _in_thread(self, work: Callable[[], T]) -> T:
        return self._pump.call(work)

    def _prepare(self, trials: list[Trial]) -> tuple[dict[Trial, TrialPayload], tuple[TrialSpec, ...]]:
        """Pickles trials, and says what the engine is to know of them."""
        payloads = {trial: self._payload_of(trial) for trial in trials}
        return payloads, tuple(map(self._spec, trials))

    def _payload_of(self, trial: Trial) -> TrialPayload:
        shown = trial.shown.config if trial.shown else None
        payload = self._payloads.payload_of(trial.trainable, trial.config, shown)
        return payload if trial.threads is None else replace(payload, threads=trial.threads)

    def _spec(self, trial: Trial) -> TrialSpec:
        return spec_of(trial, self._max_width, keep_last=self._keeper.retention.how == "last")

    def _open_group(self, inbox: GroupInbox, payloads: Mapping[Trial, TrialPayload]) -> None:
        self._next_group += 1
        self._pump.inboxes[inbox.group_id] = inbox
        self._take_in(inbox, payloads)

    def _take_in(self, inbox: GroupInbox, payloads: Mapping[Trial, TrialPayload]) -> None:
        """Registers trials that the engine has accepted with the backend, and writes them."""
        for trial, payload in payloads.items():
            rule = self._keeper.admit(inbox.group_id, inbox.group.search, trial)
            self._backend.register(trial.id, payload if rule is None else replace(payload, keep=rule))
        group, terms = inbox.group, self._state.groups[inbox.group_id].terms
        self._folder.write_trials(inbox.group_id, GroupLine(group.name, group.search, group.requires, terms), payloads)
