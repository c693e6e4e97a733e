"""Retention in a session: tells lanes which checkpoints are to outlive it, and deletes those that others replace."""

from __future__ import annotations

import inspect
import json
import os
import queue
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluid._logs import logger_of
from fluid.backends.base import Backend
from fluid.directions import known_mode, require_mode
from fluid.engine.commands import Command, Persist, ReportEnd, Save, StopLane, StopTrial
from fluid.engine.events import Event, LaneLost, TrialFailed, TrialNotKept, TrialReleased, TrialSaved
from fluid.errors import InvalidFieldError
from fluid.keeping import FACTS, QUOTA_USED_UP, Keep, KeepRule, WorstKept
from fluid.lane.checkpoints.files import copy_atomically, discard_kept, entries_of, iteration_of
from fluid.lane.checkpoints.paths import folder_name, kept_folder
from fluid.lane.checkpoints.seal import sealed_bytes
from fluid.policies.engine import EngineState
from fluid.results.best import Merit
from fluid.trainables.class_resident import says_it_reports_states
from fluid.trainables.trainable import can_save, kind_of, profile_name
from fluid.trialgroup import Search, Trial, TrialState
from fluid.waiting.waits import BackgroundThread

# -- kept registry -------------------------------------------------------------------------------
#
# The registry of checkpoints that outlive the run: which stay, and which make way for better or newer ones. Pure.


@dataclass(slots=True, eq=False, kw_only=True)
class KeptEntry:
    """A checkpoint that outlives the run.

    Attributes:
        trial_id: its trial.
        iteration: iterations done by its state.
        path: its folder, on ``host``.
        host: name of its machine.
        bytes: of its files.
        value: its metric; ``None`` if trials are not compared.
        place: the trial's place in its group's order of submission.
        gone: whether it was discarded.
        failed: whether its trial has failed.
    """

    trial_id: str
    iteration: int
    path: str
    host: str
    bytes: int
    value: float | None = None
    place: int = 0
    gone: bool = False
    failed: bool = False


@dataclass(slots=True)
class Verdict:
    """What follows from a new checkpoint.

    Attributes:
        discarded: those that are to be deleted; the new one may be among them.
        refused: whether the new one is among them because the quota has no room for it.
    """

    discarded: list[KeptEntry] = field(default_factory=list)
    refused: bool = False


class KeptRegistry:
    """Keeps one checkpoint per trial, the newest or the best; of the best, those of the k best trials of each group.

    Args:
        quota: most bytes of all of them; ``None`` for no limit.

    Attributes:
        bytes: of those that stay.
    """

    def __init__(self, quota: int | None) -> None:
        self.bytes = 0
        self._quota = quota
        self._groups: dict[str, dict[str, KeptEntry]] = {}

    @property
    def room(self) -> int | None:
        """Bytes that are left of the quota; ``None`` if there is none."""
        return None if self._quota is None else max(0, self._quota - self.bytes)

    def of(self, group: str, trial_id: str) -> KeptEntry | None:
        """Returns the checkpoint of a trial; ``None`` if it has none."""
        return self._groups.get(group, {}).get(trial_id)

    def bar(self, rule: KeepRule) -> WorstKept | None:
        """Returns what a checkpoint of a group must pass; ``None`` if any will do."""
        entries = self._groups.get(rule.group, {})
        if rule.how != "best" or len(entries) < rule.k:
            return None
        worst = self._worst(entries, rule)
        return None if worst.failed or worst.value is None else WorstKept(worst.value, worst.place)

    def take(self, rule: KeepRule, entry: KeptEntry, *, fits: bool = False) -> Verdict:
        """Takes a checkpoint that was written.

        Args:
            rule: of its trial.
            entry: the checkpoint.
            fits: whether it is within the quota already, as one of an earlier session.
        """
        entries = self._groups.setdefault(rule.group, {})
        before = entries.get(entry.trial_id)
        if before is not None and before.path == entry.path:
            return Verdict()
        if before is not None and not self._is_preferred(rule, entry, before):
            return Verdict([entry])
        after = {**entries, entry.trial_id: entry}
        leaving = [before] if before is not None else []
        if rule.how == "best" and len(after) > rule.k:
            worst = self._worst(after, rule)
            if worst is entry:
                return Verdict([entry])
            leaving.append(worst)
        size = self.bytes + entry.bytes - sum(one.bytes for one in leaving)
        if self._quota is not None and size > self._quota and not fits:
            return Verdict([entry], refused=True)
        self.bytes = size
        entries[entry.trial_id] = entry
        for one in leaving:
            if one.trial_id != entry.trial_id:
                del entries[one.trial_id]
        return Verdict(leaving)

    @staticmethod
    def _is_preferred(rule: KeepRule, entry: KeptEntry, before: KeptEntry) -> bool:
        if rule.how == "best" and entry.value is not None:
            return rule.is_better(entry.value, before.value)
        return entry.iteration >= before.iteration

    @staticmethod
    def _worst(entries: dict[str, KeptEntry], rule: KeepRule) -> KeptEntry:
        """The worst of some checkpoints."""
        less = rule.mode == "min"
        state = {True: TrialState.FAILED, False: ""}
        return max(
            entries.values(), key=lambda entry: (Merit.of(entry.value, state[entry.failed], less=less), entry.place)
        )


# -- kept files ----------------------------------------------------------------------------------
#
# The files of checkpoints that outlive the run: brought to the run folder and deleted in a thread of their own.


_HERE = "localhost"
#: Seconds to wait, as the session ends, for checkpoints that come from other machines.
_COPIES_S = 120.0
_log = logger_of("fluid.session")


class KeptFiles:
    """Works on the files in the order it is told to.

    Args:
        folder: the run folder.
        backend: reaches the files of other machines.
        post: has a call made in the session's thread.
    """

    def __init__(self, folder: Path, backend: Backend, post: Callable[[Callable[[], None]], None]) -> None:
        self._folder = str(folder)
        self._backend = backend
        self._post = post
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None
        self._lock = threading.Lock()
        self._waiting = 0
        self._warned = False

    @property
    def is_idle(self) -> bool:
        """Whether all is done."""
        with self._lock:
            return self._waiting == 0

    def bring(self, entry: KeptEntry, done: Callable[[], None]) -> None:
        """Copies a checkpoint to the run folder, if it is elsewhere; then calls ``done`` in the session's thread."""
        if os.path.dirname(entry.path) != self._place_of(entry) or not os.path.isdir(entry.path):
            self._submit(lambda: self._bring(entry), done)

    def discard(self, entry: KeptEntry, *, demote: bool, done: Callable[[], None]) -> None:
        """Deletes a checkpoint; with ``demote``, its trial may still be restored from it."""
        entry.gone = True
        self._submit(lambda: self._discard(entry, demote), done)

    def close(self) -> None:
        """Waits until all is done, for a while."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_COPIES_S)
            if self._thread.is_alive():
                _log.warning("checkpoints of other machines have not all come to %s", self._folder)

    def _place_of(self, entry: KeptEntry) -> str:
        return kept_folder(self._folder, folder_name(entry.trial_id))

    def _submit(self, job: Callable[[], None], done: Callable[[], None]) -> None:
        with self._lock:
            self._waiting += 1

        def run() -> None:
            try:
                job()
            except Exception:
                _log.exception("the files of a checkpoint could not be handled")
            finally:
                with self._lock:
                    self._waiting -= 1
                self._post(done)

        self._jobs.put(run)
        if self._thread is None:
            self._thread = BackgroundThread("fluid-kept", self._run)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _bring(self, entry: KeptEntry) -> None:
        if entry.gone:
            return
        name, host, source = os.path.basename(entry.path), entry.host, entry.path
        folder = self._place_of(entry)
        target = os.path.join(folder, name)
        try:
            if host == _HERE:
                copy_atomically(source, folder)
            else:
                self._backend.fetch_kept(host, source, target)
        except (OSError, shutil.Error) as error:
            if not self._warned:
                self._warned = True
                what = f"the checkpoint of iteration {entry.iteration} of trial {entry.trial_id!r}"
                _log.warning("%s could not be brought from %s to %s: %s", what, host, self._folder, error)
            return
        entry.path, entry.host = target, _HERE
        if host != _HERE:
            self._post(lambda: self._tell_to_discard(host, source, demote=True))

    def _discard(self, entry: KeptEntry, demote: bool) -> None:
        if entry.host != _HERE:
            host, path = entry.host, entry.path
            self._post(lambda: self._tell_to_discard(host, path, demote=demote))
        elif entry.path:
            discard_kept(entry.path, demote=demote)

    def _tell_to_discard(self, host: str, path: str, *, demote: bool) -> None:
        self._backend.discard_kept(host, path, demote=demote)


def kept_by_earlier_session(folder: Path, trial_id: str, rule: KeepRule) -> Iterator[KeptEntry]:
    """Finds what an earlier session kept of a trial by the same rule, by the files alone; deletes unfinished copies.

    One whose seal cannot be read stays, and counts for nothing: the error may pass, or its user may know what to do.
    """
    for path in sorted(entries_of(kept_folder(str(folder), folder_name(trial_id))), key=iteration_of):
        size = sealed_bytes(path)
        if os.path.basename(path).startswith("."):
            shutil.rmtree(path, ignore_errors=True)
            continue
        if size is None:
            _log.warning("%s, kept by an earlier session, is damaged or cannot be read: it stays as it is", path)
            continue
        facts: object = None
        with suppress(OSError, ValueError), open(os.path.join(path, FACTS), encoding="utf-8") as file:
            facts = json.load(file)
        chosen = facts if isinstance(facts, dict) else {}
        value = chosen.get("value")
        is_like = (chosen.get("metric"), chosen.get("mode")) == (rule.metric, rule.mode)
        if rule.how == "last" or (is_like and isinstance(value, float)):
            yield KeptEntry(
                trial_id=trial_id,
                iteration=iteration_of(path),
                path=path,
                host=_HERE,
                bytes=size,
                value=value,
                place=rule.place,
            )


# -- keeper --------------------------------------------------------------------------------------


#: Seconds to wait, as the session ends, for lanes that still save trials.
_SAVES_S = 30.0


class Keeper:
    """Follows which checkpoints are kept. Used in the session's thread only, except where a method says otherwise.

    Args:
        keep: what the user asked for; groups may say more (:meth:`fluid.keeping.Keep.in_group`).
        state: the engine.
        backend: executes its commands.
        folder: the run folder.
        handle: gives the engine an event.
        post: has a call made in the session's thread.
    """

    def __init__(
        self,
        keep: Keep,
        state: EngineState,
        backend: Backend,
        folder: Path,
        *,
        handle: Callable[[Event], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.keep = keep
        self._state = state
        self._backend = backend
        self._folder = folder
        self._handle = handle
        self._registry = KeptRegistry(keep.quota)
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
        if self.keep.how == "best" and (search is None or not search.metric):
            reason = f"keep={self.keep.keep!r} needs a metric and its mode, as in search=Search('loss', 'min')"
            raise InvalidFieldError("search", search, reason)

    def admit(self, group_id: str, search: Search | None, trial: Trial, *, recover: bool = False) -> KeepRule | None:
        """Returns what a lane is to be told of a trial; ``None`` if nothing of it is kept.

        Args:
            group_id: the trial's group.
            search: what the group's search algorithm optimizes.
            trial: the trial.
            recover: whether an earlier session may have kept checkpoints of it.
        """
        keep = self.keep.in_group(keeps_best=search is not None and search.keeps_best)
        if keep.how == "none" or (keep.how == "last" and trial.is_shared_run):
            return None  # What is left of a shared run is wanted by its trials, and not later.
        if not may_be_saved(trial.trainable):
            name, how = profile_name(trial.trainable), how_to_save(trial.trainable)
            self._warn(name, "no checkpoint of %s is kept: it cannot be saved; to keep its model, %s", name, how)
            return None
        rule = KeepRule(keep.how, group_id, place=self._admitted[group_id], k=keep.k)
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
            elif isinstance(command, ReportEnd) and command.state in (TrialState.FAILED, TrialState.INFEASIBLE):
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
        deadline = self._backend.now() + _SAVES_S
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
        if self._told.get(rule.group, (None, None)) != told:
            self._told[rule.group] = told
            self._backend.set_bar(rule.group, *told)

    def _discard_all(self, entries: Iterable[KeptEntry]) -> None:
        for entry in entries:
            trial = self._state.trials.get(entry.trial_id)
            goes_on = trial is not None and not trial.state.is_over
            used = () if trial is None else (trial.residence.checkpoint, trial.residence.durable)
            in_use = any(one is not None and one.path == entry.path for one in used)
            self._files.discard(entry, demote=goes_on and in_use, done=self._check)

    def _not_kept(self, event: TrialNotKept) -> None:
        most = self.keep.quota
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


def how_to_save(trainable: Any) -> str:
    """What makes the trials of a trainable ones that can be saved."""
    if inspect.isclass(trainable):
        return "give it save_checkpoint(folder) and load_checkpoint(state)"
    return "give it a parameter state, and yield (metrics, state)"


def may_be_saved(trainable: Any) -> bool:
    """Whether trials of a trainable can be saved, at least once they have reported a state."""
    if can_save(trainable) or says_it_reports_states(trainable):
        return True
    return kind_of(trainable) in ("function", "ray_function")
