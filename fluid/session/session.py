"""A session: the requests of submitters, each made one step of the session's thread."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from msgspec import structs

from fluid._clock import Clock, wall_seconds
from fluid.backends.base import Backend
from fluid.engine.events import (
    OUTCOMES,
    BudgetExtended,
    CallRequested,
    DeviceAdded,
    DeviceLost,
    Event,
    FailRequested,
    Failure,
    GroupRecovered,
    GroupSubmitted,
    GroupTerms,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    TrialForgotten,
    TrialsAdded,
    TrialSpec,
)
from fluid.errors import FluidError, InvalidFieldError, parse_duration, require_integer, require_one_of
from fluid.joint.membership import Membership
from fluid.keeping import NOTHING, Keep
from fluid.measure.profile import Profile
from fluid.packing import PACKINGS
from fluid.policies.engine import EngineState
from fluid.policies.owners.owners import is_by_itself
from fluid.random_state import Seeds
from fluid.resources import Device
from fluid.results.best import BestSoFar
from fluid.results.code_changes import CodeChange
from fluid.results.journal import changed
from fluid.results.submitted import GroupLine
from fluid.session.facts import SweepInTime
from fluid.session.folder.folder import RunFolder
from fluid.session.folder.resume import LeftSession, lost_checkpoints
from fluid.session.forecasting.forecasts import Forecasts
from fluid.session.inbox import GroupInbox
from fluid.session.joint.content import NOT_SHARED, GroupContent
from fluid.session.joint.session import JointSession
from fluid.session.listeners import TrialListener, words_on_saved
from fluid.session.pump import Pump
from fluid.session.reuse import NOTHING_REUSED, Reused
from fluid.session.specs import (
    ISOLATING,
    Isolating,
    SessionPickler,
    say_what_is_awaited,
    spec_of,
    warn_of_unfusible,
    with_requirements,
)
from fluid.session.starts import SharedTrials, kept_seeds, require_no_start, share_prefixes, start_state
from fluid.session.status import GroupStatus, Status
from fluid.session.status_reader import Standing, StatusReader, standing_of
from fluid.session.trial_records import TrialRecords
from fluid.sizing.goals import NO_GOALS, Goals
from fluid.trainables.import_scan import imports_of
from fluid.trainables.json_form import json_form
from fluid.trainables.payload import TrialPayload
from fluid.trainables.trainable import is_fusible
from fluid.trial_fields import TrialProcess
from fluid.trialgroup import PAUSED_BY_USER, Search, Submission, Trial, TrialGroup, TrialState, avoid_names

# -- group requests ------------------------------------------------------------------------------
#
# What a group's handle asks of its session: changes of the group and its trials, each a step of the session's thread.
#
# In that step the engine is asked first. What it accepts is then done wholly: the group that the user holds is
# changed, too, and waiters wait for further trials, before anyone is told. An interrupted caller has nothing to undo.


#: What the engine, and other drivers, are to know of trials, and what registers and writes them once it has accepted
#: them.
Prepared = tuple[tuple[TrialSpec, ...], GroupContent, Callable[[], None]]


class Submitted(NamedTuple):
    """Trials of one call.

    Attributes:
        payloads: by trial, also of runs that they share.
        specs: what the engine is to know of each.
        reused: from which states of earlier runs they start.
    """

    payloads: dict[Trial, TrialPayload]
    specs: tuple[TrialSpec, ...]
    reused: Reused


class GroupRequests:
    """The requests of one group's submitter, from any thread.

    Args:
        inbox: of the group.
        pump: the session's thread.
        state: the engine.
        backend: executes its commands.
        folder: the run folder.
        prepare: pickles trials.
    """

    def __init__(
        self,
        inbox: GroupInbox,
        pump: Pump,
        state: EngineState,
        backend: Backend,
        folder: RunFolder,
        prepare: Callable[[list[Trial]], Prepared],
    ) -> None:
        self._inbox = inbox
        self._pump = pump
        self._state = state
        self.backend = backend
        self._folder = folder
        self._prepare = prepare

    def ask(self, event: Callable[..., Event]) -> None:
        """Asks the engine for something, by an event that is made at its time."""
        self._pump.act(lambda: self._handle(event))

    def add(self, trials: list[Trial]) -> None:
        """Adds trials to the group, all of them or none."""
        inbox = self._inbox
        specs, content, take_in = self._prepare(trials)

        def accepted() -> None:
            for trial in trials:
                inbox.change(inbox.group.add, trial)
                self._pump.notify(partial(inbox.reopen, trial.id))
            take_in()

        def add() -> None:
            inbox.require_new(trials)
            event = TrialsAdded(self.backend.now(), inbox.group_id, specs)
            self._pump.handle_new(event, accepted, inbox.group.name, content)
            say_what_is_awaited(self._state, inbox.group.name, specs)

        self._pump.work(add)

    def extend(self, trial_id: str, budget: int, follow_up_iterations: int) -> None:
        """Gives a trial ``budget`` further iterations."""
        inbox = self._inbox

        def extend() -> None:
            joint = self._pump.joint
            further = budget if joint is None else joint.extends(trial_id, budget, inbox.group.name)
            if further:
                at = self.backend.now()
                self._pump.extend(inbox, BudgetExtended(at, trial_id, further, follow_up_iterations))

        self._pump.work(extend)

    def stop(self, trial_id: str, outcome: str | None, *, now: bool = False) -> None:
        """Stops a trial; with ``now``, by killing its lanes."""
        inbox, known = self._inbox, None
        if outcome is not None:
            known = TrialState(require_one_of("outcome", outcome, OUTCOMES))
        event = partial(StopRequested, trial_id=trial_id, outcome=known, now=now)

        def accepted() -> None:
            inbox.stop(trial_id, outcome)

        self._pump.act(lambda: self._stop(event, accepted))

    def fail(self, trial_id: str, failure: Failure) -> None:
        """Stops a trial, which has failed as its submitter finds."""
        self._pump.act(lambda: self._stop(partial(FailRequested, trial_id=trial_id, failure=failure), lambda: None))

    def _stop(self, event: Callable[..., StopRequested | FailRequested], accepted: Callable[[], None]) -> None:
        self._pump.stop(self._inbox, event(at=self.backend.now()), accepted)

    def pause(self, trial_id: str) -> None:
        """Pauses a trial until it is resumed."""
        self.ask(partial(PauseRequested, trial_id=trial_id))

    def resume(self, trial_id: str) -> None:
        """Lets a paused trial go on."""
        self._pump.work(lambda: self._handle(partial(ResumeRequested, trial_id=trial_id)))

    def call(self, trial_id: str, method: str, payload: bytes) -> Future[Any]:
        """Calls a method of a trial; returns a future of what that returns."""
        call_id, future = self._inbox.expect_answer(method)
        event = partial(CallRequested, trial_id=trial_id, call_id=call_id, method=method, payload=payload)
        try:
            self._pump.work(lambda: self._handle(event))
        except BaseException:
            self._inbox.withdraw_call(call_id)
            raise
        return future

    def show_config(self, trial_id: str, config: Mapping[str, Any]) -> None:
        """Says, and writes, which hyperparameters reports show of a trial."""
        form = json_form(dict(config))

        def show() -> None:
            self._inbox.show(trial_id, config)
            self._folder.write_shown_config(trial_id, form)

        self._pump.call(show)

    def forget(self, trial_id: str) -> None:
        """Drops a trial that has ended."""

        def forget() -> None:
            known = self._state.trials.get(trial_id)
            self._handle(partial(TrialForgotten, trial_id=trial_id))
            self._pump.notify(partial(self.backend.forget, trial_id))
            if self._pump.joint is not None:
                self._pump.joint.forgotten(trial_id)
            if known is not None:
                self._pump.notify(partial(self._inbox.drop, trial_id, known.outcome))

        self._pump.act(forget)

    def _handle(self, event: Callable[..., Event], accepted: Callable[[], None] | None = None) -> None:
        self._pump.handle(event(at=self.backend.now()), accepted=accepted)


# -- session -------------------------------------------------------------------------------------


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
        isolating: which trials run in a process that has run no other one.
        membership: in the shared folder whose sweeps the session works with others; ``None`` for a session by itself.
        quiet: whether only what goes wrong is told in warnings.
        widens_replayed: whether the user has given ``max_width``, see :func:`fluid.session.specs.spec_of`.

    Attributes:
        backend: as given; methods of it that say so may be called from any thread.
    """

    def __init__(
        self,
        state: EngineState,
        backend: Backend,
        folder: RunFolder,
        max_width: int,
        facts: Mapping[str, Any],
        keep: Keep = NOTHING,
        goals: Goals = NO_GOALS,
        isolating: Isolating = ISOLATING,
        membership: Membership | None = None,
        *,
        quiet: bool = False,
        widens_replayed: bool = False,
    ) -> None:
        self.quiet = quiet
        self._state = state
        self.backend = backend
        self._folder = folder
        self._max_width = max_width
        self._widens_replayed = widens_replayed
        self.isolating = isolating
        self._insists_on_fusing = PACKINGS[facts["packing"]].insists_on_fusing
        self.in_rounds = bool(facts.get("rounds"))
        self.gives_up_early = state.gives_up_early
        self._pickler = SessionPickler(backend)
        self._records = TrialRecords()
        backend.hear_records(self._records.take)
        #: Number of the next group. Used in the session's thread only.
        self._next_group = 0
        #: Numbers of the trials, in order of submission.
        self._numbers = itertools.count()
        #: Numbers of the runs that trials share.
        self._shared_runs = itertools.count()
        self._pump = Pump(state, backend, folder, facts, keep, goals, membership, quiet)
        self._keeper = self._pump.keeper
        self.clock: Clock = backend  # Of its events; a hold makes it stand still.
        self.hold, self.waits = self._pump.hold, self._pump.waits
        #: Forecasts of its groups.
        logged = None if self.hold.is_virtual else folder
        self.forecasts = Forecasts(state, backend.now, self._pump.inboxes, self._in_thread, logged)
        self._pump.scaling.sizing.end_on = self.forecasts.end_on
        self._statuses = StatusReader(state, self._pump.inboxes, self._pump.deadlines.lateness)

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
        payloads, specs, reused = self._prepare(group, group.active)
        content = self._content(payloads)
        if self._insists_on_fusing and not self._pump.inboxes:
            warn_of_unfusible(group)

        def submit() -> GroupInbox:
            self._pump.endings.require_devices()
            group_id = str(self._next_group)
            inbox = GroupInbox(group_id, group, listener, self.waits)
            event = GroupSubmitted(at=self.backend.now(), group_id=group_id, trials=specs, terms=terms)
            accepted = partial(self._open_group, inbox, payloads, reused)
            self._pump.handle_new(event, accepted, group.name, content)
            self._tell_known(inbox, reused)
            say_what_is_awaited(self._state, group.name, specs)
            self._pump.deadlines.act(self.backend.now())
            return inbox

        opened = self._pump.work(submit)
        self._folder.delete_replaced()
        return opened

    def requests(self, inbox: GroupInbox) -> GroupRequests:
        """What the handle of a group asks for."""

        def prepare(trials: list[Trial]) -> Prepared:
            payloads, specs, reused = self._prepare(inbox.group, trials)

            def take_in() -> None:
                self._take_in(inbox, payloads, reused)
                self._pump.notify(partial(self._tell_known, inbox, reused))

            return specs, self._content(payloads), take_in

        return GroupRequests(inbox, self._pump, self._state, self.backend, self._folder, prepare)

    def await_departures(self, group_id: str, timeout_s: float) -> tuple[str, ...]:
        """Waits until the stopped trials of a group were cleaned up; returns the ids of those that were not in time."""
        departures = self._pump.departures
        with self.waits.waiting("trials to be cleaned up"), suppress(FutureTimeoutError):
            self._in_thread(lambda: departures.wait_for(group_id)).result(timeout_s)
        return self._in_thread(lambda: departures.of(group_id))

    def departure(self, group_id: str, trial_id: str) -> Future[None]:
        """Returns a future that is done when a stopped trial was cleaned up."""
        departures = self._pump.departures
        return self._in_thread(lambda: departures.wait_for(group_id, trial_id))

    def await_kept(self, timeout_s: float) -> bool:
        """Waits until all checkpoints that outlive the session so far are in the run folder; returns whether they are.

        Raises:
            FluidError: the session has ended, or this is its own thread.
        """
        with self.waits.waiting("checkpoints"):
            return bool(wait([self._in_thread(self._keeper.settled)], timeout=timeout_s).done)

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
            self.backend.add_devices([device])
            self._pump.handle(DeviceAdded(at=self.backend.now(), device=device))

        self._pump.act(add)

    def remove_device(self, device_id: int) -> None:
        """Gives a device up."""

        def remove() -> None:
            if all(device.index != device_id for device in self._state.devices):
                raise InvalidFieldError("device_id", device_id, "is not in use")
            self._pump.handle(DeviceLost(at=self.backend.now(), device_id=device_id))

        self._pump.act(remove)

    def lend_devices(self) -> bool:
        """Gives all devices back to the cluster until they are reclaimed; trials wait meanwhile.

        Returns:
            Whether the backend has its devices from a cluster.
        """
        return self._pump.act(lambda: self._pump.scaling.sizing.held.lend())

    def reclaim_devices(self) -> None:
        """Asks for the devices again that were lent; each takes trials as it comes."""
        self._pump.act(lambda: self._pump.scaling.sizing.held.reclaim())

    def drain(self, device_id: int | None, deadline_s: float) -> tuple[str, ...]:
        """Drains a device, or the whole session where that is ``None``; returns ids of trials that were not saved."""
        with self.waits.waiting("a drain"):
            answer = self._pump.act(lambda: self._pump.drains.begin(device_id, deadline_s))
            unsaved: tuple[str, ...] = answer.result()
        return unsaved

    def add_deadline(self, seconds: float, sweep: SweepInTime) -> Callable[[], None]:
        """Tells a sweep what cannot end by so many seconds from now; returns what drops that deadline again."""
        sizing = self._pump.scaling.sizing
        added = self._in_thread(lambda: sizing.add(seconds, self.backend.now(), sweep))

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
        self.backend.preload([*modules, *imports_of(trainable)])

    def start_program(self, program: str) -> socket.socket | None:
        """Forks a process that is no lane; ``None`` where the backend forks none on the driver's machine.

        Args:
            program: ``module:function``, called with the process's end of a connection.

        Returns:
            The caller's end of the connection.
        """
        return self.backend.start_program(program)

    # -- the session itself --------------------------------------------------------------------------------

    def resume(
        self, left: LeftSession, listeners: Mapping[str, TrialListener], changes: Sequence[CodeChange] = ()
    ) -> None:
        """Goes on with the groups of an earlier session.

        Args:
            left: the session.
            listeners: those of groups, by name.
            changes: what of the trials' code has changed since.
        """
        once = Submission()
        self._numbers = itertools.count(left.submitted_trials)
        self._shared_runs = itertools.count(len(left.trial_ids))
        payloads = {
            group_id: self._payloads(group.trials.values(), once, left.seeds) for group_id, group in left.groups.items()
        }
        trackers = left.trackers()
        avoid_names(left.trial_ids, (group.line.name for group in left.groups.values()))

        def register(group_ids: Sequence[str]) -> None:
            for group_id in group_ids:
                for trial, payload in payloads[group_id].items():
                    rule = self._keeper.admit(group_id, left.groups[group_id].line.search, trial, recover=True)
                    self.backend.register(trial.id, payload if rule is None else replace(payload, keep=rule))
            self._keeper.tell_lanes()

        def resume() -> None:
            now = self.backend.now()
            left.complete(self._folder, payloads, changes, now)
            events = left.events(now, self._spec, self._adapted)
            self._folder.journal((), lost_checkpoints(left.recovered, events))
            returning: list[GroupRecovered] = []
            for event in events:
                group = left.groups[event.group_id].submitted()
                inbox = GroupInbox(event.group_id, group, listeners.get(group.name), self.waits)
                if getattr(inbox.listener, "tells_unfinished", False):  # A sweep's call says anew when it is to end.
                    event = structs.replace(event, terms=replace(event.terms, deadline=None))
                ended = {past.trial.trial_id: past.ended for past in event.trials if past.ended}
                results = left.results.groups.get(event.group_id)
                offset = left.results.axis.offsets[-1] + self._folder.shift
                inbox.take_over(ended, left.recovered.failures, results, offset, trackers[event.group_id])
                inbox.outcomes, inbox.has_forgotten = left.recovered.outcomes, bool(event.forgotten)
                inbox.shared_runs |= frozenset(past.trial.trial_id for past in event.trials if past.trial.is_shared_run)
                inbox.note_seeds(payloads[event.group_id])
                self._pump.inboxes[event.group_id] = inbox
                self._next_group = max(self._next_group, int(event.group_id) + 1)
                returning.append(event)
            # Where deadlines decide who comes first, all of them have to be known before any trial starts.
            together = any(is_by_itself(event.terms) for event in returning)
            for instant in [returning] if together else [[event] for event in returning]:
                self._pump.handle(*instant, accepted=partial(register, [event.group_id for event in instant]))

        self._pump.act(resume)

    def status(self) -> Status:
        """How the session stands."""
        return self._in_thread(self._status)

    def group_status(self, group_id: str) -> GroupStatus:
        """How a group stands, also once the session has ended; trials that had not ended then are INTERRUPTED."""
        try:
            return self._in_thread(lambda: self._statuses.group(group_id, self.backend.now()))
        except FluidError:  # Its thread has ended, or is about to change nothing more.
            group = self._statuses.group(group_id, self.backend.now())
        rest = {state: number for state, number in group.trials.items() if state in _RESTING}
        left = sum(group.trials.values()) - sum(rest.values())
        return replace(group, trials={**rest, "INTERRUPTED": left} if left else rest)

    def _status(self) -> Status:
        now, began, scaling = self.backend.now(), self._pump.began, self._pump.scaling
        goal, shown = scaling.sizing.status(now), partial(self.forecasts.shown, lasts=self.forecasts.lasts())
        found = self._statuses.read(
            now - began,
            began=began,
            run_dir=self._folder.path,
            forecast=shown,
            goal=goal,
            loading=self.backend.loading,
        )
        return replace(found, asked=scaling.asked, rehearsed=self.hold.is_virtual)

    def standing(self, group_ids: Collection[str], only: str | None = None) -> Standing:
        """How the trials of some groups stand, or only one; of a session that has ended, how they stood then."""
        try:
            return self._in_thread(lambda: standing_of(self._state, group_ids, only))
        except FluidError:  # The session has ended: nothing changes any more.
            return standing_of(self._state, group_ids, only)

    def best_so_far(self, inbox: GroupInbox) -> BestSoFar | None:
        """The best result of a group by the metric of its search; ``None`` if there is none."""
        try:
            return self._in_thread(lambda: inbox.facts.best)
        except FluidError:  # As above.
            return inbox.facts.best

    @property
    def joint(self) -> JointSession | None:
        """What the session does in a shared folder, for its own thread; ``None`` for a session by itself."""
        return self._pump.joint

    def do(self, work: Callable[[], T]) -> T:
        """Has a piece of work done in the session's thread, and returns or raises what it does."""
        return self._pump.act(work)

    @property
    def has_ended(self) -> bool:
        """Whether the session was closed, or broke."""
        return self._pump.has_ended

    @property
    def names_files(self) -> bool:
        """Whether a warning has told where the log of a trial is."""
        return self._pump.names_files

    def require_open(self, what: str) -> None:
        """Refuses what would wait for trials that never end.

        Args:
            what: waits, for the error.

        Raises:
            FluidError: no trial will run any more, or the session's own thread asks, as in a listener.
        """
        self._pump.require_open()
        with self.waits.waiting(what):
            pass

    @property
    def over(self) -> FluidError | None:
        """Why no trial will run any more: it has ended, or was drained; ``None`` while trials may."""
        return self._pump.over

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return self._folder.path

    def eta(self, group_id: str) -> float | None:
        """Predicted seconds until a group has ended; ``None`` where no trial of it was measured, or one hangs."""
        return self._in_thread(lambda: self._state.seconds_left(group_id, self.backend.now()))

    @property
    def is_in_thread(self) -> bool:
        """Whether the session's own thread asks, as in a listener."""
        return self._pump.is_in_thread

    def close(self) -> None:
        """Ends the session; waits until its lanes are gone, unless the session's own thread calls it."""
        self.forecasts.close()
        self._pump.close()
        if not self.is_in_thread:
            self._records.close()

    # -- parts of requests ---------------------------------------------------------------------------------

    def _in_thread(self, work: Callable[[], T]) -> T:
        return self._pump.call(work)

    def _prepare(self, group: TrialGroup, trials: list[Trial]) -> Submitted:
        """Pickles trials of a group, and says what the engine is to know of them."""
        trials = with_requirements(trials, group)
        submission, reused = group.submission or Submission(), NOTHING_REUSED
        shared = SharedTrials(trials, {})
        if self._pump.joint is not None:
            require_no_start(trials)
        else:
            if len(trials) > 1:
                new_id, replays = partial(self._new_run, group.name), self.backend.replays
                shared = share_prefixes(trials, new_id, replays=replays)
            if submission.reuse is not None:
                reused = submission.reuse.apply(shared, self.run_dir)
                shared = reused.shared
        payloads = self._payloads(shared.trials, submission, reused.seeds, shared.roots)
        specs = tuple(self._spec(trial, group.search) for trial in shared.trials)
        return Submitted(payloads, specs, reused)

    def _new_run(self, name: str) -> str:
        """A new id of a run that trials of a group share."""
        return f"{name}-shared-{next(self._shared_runs):05d}"

    def _content(self, payloads: Mapping[Trial, TrialPayload]) -> GroupContent:
        return NOT_SHARED if self._pump.joint is None else GroupContent.of(payloads)

    def _payloads(
        self,
        trials: Iterable[Trial],
        submission: Submission,
        known: Mapping[str, Seeds] = MappingProxyType({}),
        roots: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[Trial, TrialPayload]:
        """Pickles trials; those without known seeds, by id, get the seeds of the next place in the order.

        Those that share a run, and the run, get the seeds of the first of them, whose id is in ``roots``. One that
        starts from another one's state has that one's: what its ``setup`` draws is to be what the state belongs to.
        """
        trials = list(trials)
        given: dict[str, Seeds] = {}
        places = {trial.id: next(self._numbers) for trial in trials if not (trial.is_shared_run or trial.id in known)}

        def process_of(trial: Trial) -> TrialProcess:
            seeds = known.get(trial.id) or self._parents_seeds(trial, given)
            seeds = seeds or submission.origin.seeds(places[roots.get(trial.id, trial.id)])
            given[trial.id] = seeds
            alone = self.isolating.isolates(trial, fusible=is_fusible(trial.trainable))
            return TrialProcess(trial.threads, seeds, trial.chdir, alone)

        return self._pickler.payloads_of(trials, submission, process_of)

    def _parents_seeds(self, trial: Trial, given: Mapping[str, Seeds]) -> Seeds | None:
        """The seeds of the trial from whose state one starts, if it does; ``None`` if they are unknown."""
        start = trial.start_from
        if start is None or start.is_shared:
            return None
        if start.path:
            return kept_seeds(start)
        groups = self._pump.inboxes.values()
        found = (inbox.seeds_of(start.parent) for inbox in groups)
        return given.get(start.parent) or next((seeds for seeds in found if seeds is not None), None)

    def _spec(self, trial: Trial, search: Search | None) -> TrialSpec:
        keep_last = self._keeper.keep.how == "last" and not trial.is_shared_run
        return spec_of(
            trial,
            self._max_width,
            keep_last=keep_last,
            isolating=self.isolating,
            search=search,
            widens_replayed=self._widens_replayed,
            start=None if trial.start_from is None else start_state(trial, trial.start_from, self.run_dir),
        )

    def _adapted(self, spec: TrialSpec, trial: Trial | None) -> TrialSpec:
        """What an earlier session's engine knew of a trial, as this session's user wants it."""
        keep_last = self._keeper.keep.how == "last" and not spec.is_shared_run
        isolated = trial is None or self.isolating.isolates(trial, fusible=spec.fusible)
        return changed(spec, keep_last=keep_last, isolated=isolated)

    def _open_group(self, inbox: GroupInbox, payloads: Mapping[Trial, TrialPayload], reused: Reused) -> None:
        self._next_group += 1
        self._pump.inboxes[inbox.group_id] = inbox
        self._take_in(inbox, payloads, reused)

    def _tell_known(self, inbox: GroupInbox, reused: Reused) -> None:
        """Tells the engine what earlier runs have reported of trials that start from their states."""
        if reused.known:
            self._pump.handle(*reused.events(inbox.group_id, self.backend.now()))

    def _take_in(self, inbox: GroupInbox, payloads: Mapping[Trial, TrialPayload], reused: Reused) -> None:
        """Registers trials that the engine has accepted with the backend, and writes them."""
        inbox.note_seeds(payloads)
        inbox.shared_runs |= frozenset(trial.id for trial in payloads if trial.is_shared_run)
        for trial, payload in payloads.items():
            rule = self._keeper.admit(inbox.group_id, inbox.group.search, trial)
            self.backend.register(trial.id, payload if rule is None else replace(payload, keep=rule))
        group, terms = inbox.group, self._state.groups[inbox.group_id].terms
        counts = terms.deadline is not None and not self.hold.is_virtual
        line = GroupLine(group.name, group.search, group.requires, terms, wall_seconds() if counts else None)
        self._folder.write_trials(inbox.group_id, line, payloads, reused.contents)


# -- door ----------------------------------------------------------------------------------------
#
# What an executor offers of its session beside groups: its devices, drains, and what was measured.


class SessionDoor:
    """The part of :class:`fluid.executor.FluidExecutor` that hands requests on to its session."""

    _session: Session

    def add_device(self, device: Device) -> None:
        """Puts a further device to use while trials run.

        Raises:
            InvalidFieldError: the device does not exist, or is in use already.
        """
        self._session.add_device(device)

    def remove_device(self, device_id: int) -> None:
        """Gives a device up: its trials go on elsewhere from their newest checkpoint.

        Raises:
            InvalidFieldError: the device is not in use.
        """
        self._session.remove_device(device_id)

    def drain(self, device: int | Device, deadline_s: float) -> bool:
        """Gives a device up without losing work; waits until it is gone.

        The device takes no new trial. Each trial that runs there is paused at the end of its iteration, saved to disk,
        and goes on elsewhere; no iteration is repeated. States that the device keeps are saved too. At the deadline the
        device is removed as it is: trials that are not saved by then go on from their newest checkpoint.

        Args:
            device: its index, or the device.
            deadline_s: seconds that trials have to be saved, or text such as ``"90s"``. One that cannot be saved runs
                on until then.

        Returns:
            Whether nothing is lost.

        Raises:
            InvalidFieldError: the device is not in use, or the deadline is negative.
            FluidError: the executor is closed, or this is called by a listener.
        """
        index = device.index if isinstance(device, Device) else require_integer("device", device, at_least=0)
        return not self._session.drain(index, parse_duration("deadline_s", deadline_s, zero=True))

    def drain_all(self, deadline_s: float) -> bool:
        """Saves all trials, so that :meth:`close` loses nothing; waits until they are saved.

        No trial starts any more. Each trial that runs is paused at the end of its iteration and saved to disk.
        :meth:`resume` then goes on with the session and repeats nothing. Further work is refused.

        Args:
            deadline_s: seconds that trials have to be saved, or text such as ``"90s"``. One that cannot be saved runs
                on until then.

        Returns:
            Whether nothing is lost.

        Raises:
            InvalidFieldError: the deadline is negative.
            FluidError: the executor is closed, or this is called by a listener.
        """
        return not self._session.drain(None, parse_duration("deadline_s", deadline_s, zero=True))

    @property
    def session(self) -> Session:
        """What runs the trials; for integrations."""
        return self._session

    @property
    def profile(self) -> Profile:
        """What was measured so far."""
        return self._session.profile

    @property
    def devices(self) -> list[Device]:
        """The devices in use."""
        return self._session.devices

    @property
    def in_rounds(self) -> bool:
        """Whether all trials advance together, an iteration each in turn."""
        return self._session.in_rounds

    @property
    def isolating(self) -> Isolating:
        """Which trials run in a process that has run no other one, of those that do not say so themselves."""
        return self._session.isolating

    @property
    def max_devices(self) -> int:
        """Most devices that the session may come to hold: those in use, those parked, or ``autoscale`` if more."""
        return self._session.max_devices


# -- saving --------------------------------------------------------------------------------------
#
# What an executor does at a notice of preemption.


def save_all(session: Session, deadline_s: float) -> str:
    """Saves all trials; returns a line that says how many, and how to go on."""
    if session.hold.is_virtual:
        return ""  # A rehearsal has nothing to save, and begins anew.
    try:
        unsaved, unfinished = len(session.drain(None, deadline_s)), session.unfinished
    except FluidError:
        return ""  # It was closed meanwhile.
    saved = words_on_saved(unfinished, unsaved)
    if session.joint is not None:
        return f"{saved}; {session.joint.others}"
    if session.inboxes and all(getattr(inbox.listener, "tells_unfinished", False) for inbox in session.inboxes):
        return saved  # Those who tell of them say how to go on.
    return f"{saved}; go on with FluidExecutor.resume({str(session.run_dir)!r})"
