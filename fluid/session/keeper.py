"""Retention in a session: tells lanes which checkpoints are to outlive it, and deletes those that others replace."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fluid._logs import logger_of
from fluid.backends.base import Backend, KeepingBackend
from fluid.directions import known_mode, require_mode
from fluid.engine.commands import Command, Persist, ReportEnd, Save, StopLane, StopTrial
from fluid.engine.engine import EngineState
from fluid.engine.events import Event, LaneLost, TrialFailed, TrialNotKept, TrialReleased, TrialSaved
from fluid.errors import InvalidFieldError
from fluid.keeping import QUOTA_USED_UP, KeepRule, Retention, WorstKept
from fluid.session.kept_files import KeptFiles, kept_by_earlier_session
from fluid.session.kept_registry import KeptEntry, KeptRegistry
from fluid.trainables.class_resident import says_it_reports_states
from fluid.trainables.trainable import can_save, kind_of, profile_name
from fluid.trialgroup import Search, Trial, TrialState

#: Seconds to wait, as the session ends, for lanes that still save trials.
_PATIENCE = 30.0
_log = logger_of("fluid.session")


class Keeper:
    """Follows which checkpoints are kept. Used in the session's thread only, except where a method says otherwise.

    Args:
        retention: what the user asked for; groups may say more (:meth:`fluid.keeping.Retention.in_group`).
        state: the engine.
        backend: executes its commands.
        folder: the run folder.
        handle: gives the engine an event.
        post: has a call made in the session's thread.
    """

    def __init__(
        self,
        retention: Retention,
        state: EngineState,
        backend: Backend,
        folder: Path,
        *,
        handle: Callable[[Event], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.retention = retention
        self._state = state
        self._backend = backend
        self._folder = folder
        self._handle = handle
        self._registry = KeptRegistry(retention.quota)
        self._files = KeptFiles(folder, backend, post)
        #: How many trials were admitted, by group.
        self._admitted = Counter[str]()
        #: Of trials whose checkpoints may be kept.
        self._rules: dict[str, KeepRule] = {}
        #: What lanes know of each group: the value to beat, and the room that is left.
        self._told: dict[str, tuple[WorstKept | None, int | None]] = {}
        #: Trials that are being saved for good, and the lanes that were told to; ``None`` for a host.
        self._pending: dict[str, int | None] = {}
        self._waiting: list[Future[None]] = []
        #: What the user was warned of.
        self._warned: set[str] = set()

    def require_goal(self, search: Search | None) -> None:
        """Refuses a group whose best trials cannot be told; from any thread.

        Raises:
            InvalidFieldError: it names no metric where the best are kept, or one without a mode that may mean either.
        """
        if search is not None and search.metric:
            require_mode(search.metric, search.mode)
        if self.retention.how == "best" and (search is None or not search.metric):
            reason = f"keep={str(self.retention)!r} needs a metric and its mode, as in search=Search('loss', 'min')"
            raise InvalidFieldError("search", search, reason)

    def admit(self, group_id: str, search: Search | None, trial: Trial, *, recover: bool = False) -> KeepRule | None:
        """Returns what a lane is to be told of a trial; ``None`` if nothing of it is kept.

        Args:
            group_id: the trial's group.
            search: what the group's search algorithm optimizes.
            trial: the trial.
            recover: whether an earlier session may have kept checkpoints of it.
        """
        retention = self.retention.in_group(keeps_best=search is not None and search.keeps_best)
        if retention.how == "none":
            return None
        if not _may_be_saved(trial.trainable):
            name, how = profile_name(trial.trainable), _how_to_save(trial.trainable)
            self._warn(name, "no checkpoint of %s is kept: it cannot be saved; to keep its model, %s", name, how)
            return None
        rule = KeepRule(retention.how, group_id, place=self._admitted[group_id], k=retention.k)
        self._admitted[group_id] += 1
        mode = known_mode(search.metric, search.mode) if search is not None and search.metric else None
        if rule.how == "best" and search is not None and search.metric and mode is not None:
            entry = None if trial.shown is None else trial.shown.metrics
            rule = rule._replace(metric=search.metric, mode=mode, entry=entry)
        if recover:
            for kept in kept_by_earlier_session(self._folder, trial.id, rule):
                self._discard_all(self._registry.take(rule, kept, fits=True).discarded)
            entry_now = self._registry.of(group_id, trial.id)
            rule = rule._replace(best=None if entry_now is None else entry_now.value)
        self._rules[trial.id] = rule
        return rule

    def tell_lanes(self) -> None:
        """Tells lanes what is worth keeping, where that has changed."""
        if not isinstance(self._backend, KeepingBackend):
            return
        for rule in {rule.group: rule for rule in self._rules.values()}.values():
            self._tell(rule)

    def follow(self, events: Iterable[Event], commands: Iterable[Command]) -> None:
        """Takes what happened, and what the engine answered."""
        if not self._rules:
            return
        for command in commands:
            if isinstance(command, (Save, StopTrial)) and command.keep:
                self._pending[command.trial_id] = command.lane_ids[0]
            elif isinstance(command, Persist) and command.keep:
                self._pending[command.trial_id] = None
            elif isinstance(command, StopLane):
                self._lane_gone(command.lane_id)
            elif isinstance(command, ReportEnd) and command.state is TrialState.FAILED:
                self._failed(command.trial_id)
        for event in events:
            if isinstance(event, TrialSaved):
                if event.kept is not None:
                    self._pending.pop(event.trial_id, None)
                    self._saved(event)
            elif isinstance(event, TrialNotKept):
                self._pending.pop(event.trial_id, None)
                self._not_kept(event)
            elif isinstance(event, (TrialReleased, TrialFailed)):
                if self._pending.get(event.trial_id) == event.lane_id:
                    del self._pending[event.trial_id]
            elif isinstance(event, LaneLost):
                self._lane_gone(event.lane_id)
        self._check()

    def settled(self) -> Future[None]:
        """Returns what is set once all that was to be kept is in the run folder."""
        answer: Future[None] = Future()
        self._waiting.append(answer)
        self._check()
        return answer

    def await_pending(self, turn: Callable[[float], None]) -> None:
        """Waits, as the session ends, for what is being saved for good, and for what comes from other machines.

        Not for long. Hosts are there until then: those of other machines delete what has come from there.

        Args:
            turn: handles what happens within so many seconds.
        """
        deadline = self._backend.now() + _PATIENCE
        while (self._pending or not self._files.is_idle) and (left := deadline - self._backend.now()) > 0.0:
            turn(min(1.0, left))
        for trial_id in self._pending:
            _log.warning("the last checkpoint of trial %r is not kept: it was not saved in time", trial_id)

    def finish(self) -> None:
        """Waits, as the session ends, for what comes from other machines; for a while."""
        self._files.close()
        for answer in self._waiting:
            answer.set_result(None)
        self._waiting.clear()

    def _saved(self, event: TrialSaved) -> None:
        rule, kept, checkpoint = self._rules.get(event.trial_id), event.kept, event.checkpoint
        if rule is None or kept is None:
            return
        entry = KeptEntry(
            trial_id=event.trial_id,
            iteration=checkpoint.iteration,
            path=checkpoint.path,
            host=checkpoint.host,
            bytes=kept.bytes,
            value=kept.value,
            place=rule.place,
        )
        verdict = self._registry.take(rule, entry)
        self._discard_all(verdict.discarded)
        if verdict.refused:
            self._handle(TrialNotKept(event.at, entry.trial_id, iteration=entry.iteration, reason=QUOTA_USED_UP))
        elif not entry.gone and entry.path:
            self._files.bring(entry, self._check)
        self._tell(rule)

    def _failed(self, trial_id: str) -> None:
        """Frees the place of a trial that has failed: its checkpoint stays only until another trial has one."""
        rule = self._rules.get(trial_id)
        entry = None if rule is None else self._registry.of(rule.group, trial_id)
        if rule is not None and entry is not None:
            entry.failed = True
            self._tell(rule)

    def _tell(self, rule: KeepRule) -> None:
        told = self._registry.bar(rule), self._registry.room
        if self._told.get(rule.group, (None, None)) != told and isinstance(self._backend, KeepingBackend):
            self._told[rule.group] = told
            self._backend.set_bar(rule.group, *told)

    def _discard_all(self, entries: Iterable[KeptEntry]) -> None:
        for entry in entries:
            trial = self._state.trials.get(entry.trial_id)
            goes_on = trial is not None and trial.state not in (TrialState.STOPPED, TrialState.FAILED)
            used = () if trial is None else (trial.residence.checkpoint, trial.residence.durable)
            in_use = any(one is not None and one.path == entry.path for one in used)
            self._files.discard(entry, demote=goes_on and in_use, done=self._check)

    def _not_kept(self, event: TrialNotKept) -> None:
        most = self.retention.quota
        quota = f", {most:,} bytes" if event.reason == QUOTA_USED_UP and most is not None else ""
        self._warn(
            event.reason.partition(":")[0],
            "the checkpoint of iteration %d of trial %r is not kept in %s: %s%s; the trial goes on, and further such "
            "warnings are not logged",
            event.iteration,
            event.trial_id,
            self._folder,
            event.reason,
            quota,
        )

    def _warn(self, key: str, text: str, *facts: object) -> None:
        if key not in self._warned:
            self._warned.add(key)
            _log.warning(text, *facts)

    def _lane_gone(self, lane_id: int) -> None:
        self._pending = {trial: lane for trial, lane in self._pending.items() if lane != lane_id}

    def _check(self) -> None:
        if self._waiting and not self._pending and self._files.is_idle:
            waiting, self._waiting = self._waiting, []
            for answer in waiting:
                answer.set_result(None)


def _how_to_save(trainable: Any) -> str:
    """What makes the trials of a trainable ones that can be saved."""
    if inspect.isclass(trainable):
        return "give it save_checkpoint(folder) and load_checkpoint(state)"
    return "give it a parameter state, and yield (metrics, state)"


def _may_be_saved(trainable: Any) -> bool:
    """Whether trials of a trainable can be saved, at least once they have reported a state."""
    reports_states = says_it_reports_states(trainable) or kind_of(trainable) in ("function", "ray_function")
    return reports_states or can_save(trainable)
