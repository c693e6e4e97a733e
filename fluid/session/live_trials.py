"""The trials of a session as users see them: results from the run folder, states from the engine, configs as given."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fluid.errors import FluidError
from fluid.results.best import BestTrial, best_result
from fluid.results.iterations import StoredIteration, files_of, only_of, result_of, trial_result
from fluid.results.loading import completed
from fluid.results.metrics import Goal, goals_of, known_goals
from fluid.results.records import Result, TrialResult
from fluid.results.run_files import RESULTS, JsonLines, ReplacedError
from fluid.results.stored_run import read_run
from fluid.results.submitted import UNFINISHED, SubmittedTrial, shown_state, submitted_trial
from fluid.results.sweep import SweepResult
from fluid.session.inbox import GroupInbox
from fluid.session.session import Session
from fluid.session.status_reader import Standing
from fluid.trialgroup import Search, Trial, TrialState

#: The submitted trials by the group and the name that they are shown as.
Parts = dict[tuple[str, str], list[SubmittedTrial]]


class LiveTrials:
    """Reads trials of a session, also after it has ended. Keeps what it has read: each call reads what is new.

    What it gives is its reader's own, who may change it.

    Thread-safe, and may be used by a listener: the session's thread reads on its own, as a thread that reads may be
    interrupted by a signal handler that waits for the session.

    Args:
        session: the session.
        inboxes: of the groups whose trials are read.
    """

    def __init__(self, session: Session, inboxes: Sequence[GroupInbox]) -> None:
        self._session = session
        self._inboxes = {inbox.group_id: inbox for inbox in inboxes}
        self._lock = threading.RLock()
        self._reads = False
        #: What the session's thread reads with.
        self._of_listeners: LiveTrials | None = None
        self._begin()

    def _begin(self) -> None:
        self._results_file = self._session.run_dir / RESULTS
        self._lines = JsonLines(self._results_file, read=only_of(self._inboxes))
        #: By id of the submitted trial.
        self._results: dict[str, list[Result]] = {}
        #: Trials that had been forgotten when they were first asked for, by id, from the run folder.
        self._filed: dict[str, SubmittedTrial] | None = None
        #: What was made of each shown trial, with what it was made of.
        self._made: dict[tuple[str, str], tuple[object, TrialResult]] = {}

    def read(self) -> tuple[TrialResult, ...]:
        """The trials, in order of submission.

        Raises:
            FluidError: the run folder was deleted, or a signal handler asks that has interrupted this very call.
        """
        return self._own._read()

    @property
    def _own(self) -> LiveTrials:
        """What the thread that asks reads with."""
        if not self._session.is_in_thread:
            return self
        self._of_listeners = self._of_listeners or LiveTrials(self._session, list(self._inboxes.values()))
        return self._of_listeners

    def _read(self) -> tuple[TrialResult, ...]:
        for inbox in self._inboxes.values():
            inbox.keep_forgotten()  # First, so that none is forgotten unseen.
        standing = self._session.standing(self._inboxes)  # Not under the lock, which a listener may wait for.
        with self._reading():
            parts = self._parts(standing)
            self._read_results({part.trial_id: part for of_trial in parts.values() for part in of_trial})
            return tuple(self._make(shown, of_trial).lent() for shown, of_trial in parts.items())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Holds the lock, and begins anew if it is interrupted between reading a result and keeping it."""
        with self._lock:
            if self._reads:
                raise FluidError("the trials are being read by what this signal handler has interrupted")
            self._reads = True
            try:
                yield
            except BaseException:
                self._begin()
                raise
            finally:
                self._reads = False

    def best(self, metric: Any = None, mode: Any = None) -> BestTrial:
        """The best trial, as that of :meth:`sweep`; where the group follows it anyway, no other trial is read.

        Raises:
            InvalidFieldError: metric or mode cannot be used.
            FluidError: no trial has reported the metric, or the run folder was deleted.
        """
        found = self._own._followed(metric, mode)
        return found or self.sweep().best_by(*completed(metric, mode, self._searches))

    def _followed(self, metric: Any, mode: Any) -> BestTrial | None:
        """The best trial that the one group follows; ``None`` if it follows another metric, or shows other names."""
        if len(self._inboxes) != 1:
            return None
        (inbox,) = self._inboxes.values()
        goals, best = known_goals(*completed(metric, mode, [inbox.group.search])), self._session.best_so_far(inbox)
        if best is None or goals != (Goal(best.metric, best.mode == "min"),) or best.trial_id in inbox.failures:
            return None
        if best.trial_id not in inbox.group or any(trial.shown is not None for trial in inbox.group):
            return None
        standing = self._session.standing(self._inboxes, best.trial_id)
        with self._reading():
            parts = list(self._current(inbox, [inbox.group[best.trial_id]], standing))
            self._read_results({part.trial_id: part for part in parts})
            trial = self._make((inbox.group_id, best.trial_id), parts) if parts else None
        found = None if trial is None else best_result(trial, goals[0])
        if trial is None or found is None:
            return None
        value, result = found
        metrics = result.lent().metrics
        return BestTrial(
            trial=trial.lent(),
            metric=best.metric,
            mode=best.mode,
            value=value,
            iteration=result.iteration,
            metrics=metrics,
        )

    def sweep(self, metric: Any = None, mode: Any = None) -> SweepResult:
        """The trials as a sweep; metric and mode are those of the groups' searches where none are given.

        Raises:
            InvalidFieldError: metric or mode cannot be used.
            FluidError: the run folder was deleted.
        """
        groups = [inbox.group for inbox in self._inboxes.values()]
        wanted = completed(metric, mode, self._searches)
        if metric is not None:
            goals_of(*wanted)  # Raises.
        trials = self.read()
        ended = all(inbox.done for inbox in self._inboxes.values())
        return SweepResult.make(
            trials,
            *wanted,
            run_dir=self._session.run_dir,
            name=groups[0].name if len(groups) == 1 else self._session.run_dir.name,
            state="DONE" if ended else UNFINISHED if self._session.has_ended else "RUNNING",
        )

    @property
    def _searches(self) -> list[Search | None]:
        return [inbox.group.search for inbox in self._inboxes.values()]

    # -- under the lock ------------------------------------------------------------------------------------

    def _parts(self, standing: Standing) -> Parts:
        if self._filed is None:
            forgotten = any(
                standing.forgotten.get(group_id) or inbox.has_forgotten for group_id, inbox in self._inboxes.items()
            )
            self._filed = self._read_forgotten() if forgotten else {}
        found: Parts = {}
        for group_id, inbox in self._inboxes.items():
            current = {part.trial_id: part for part in self._current(inbox, inbox.group, standing)}
            past = {**self._filed, **inbox.forgotten}
            ours = [part for part in {**past, **current}.values() if part.group_id == group_id]
            for part in sorted(ours, key=lambda part: part.place) if past else ours:
                found.setdefault((group_id, part.shown_id), []).append(part)
        return found

    def _current(self, inbox: GroupInbox, trials: Iterable[Trial], standing: Standing) -> Iterator[SubmittedTrial]:
        """Trials of a group that the engine knows, and how each stands."""
        ended, failures, search, place_of = inbox.states, inbox.failures, inbox.group.search, inbox.places
        seeds = inbox.seeds
        for trial in trials:
            if trial.id not in standing.states:
                continue  # It was stopped before the group was submitted, or is being submitted.
            state = ended.get(trial.id, standing.states[trial.id])
            if state.ended or (state is TrialState.PAUSED and trial.id not in standing.set_aside):
                text = shown_state(state, inbox.outcomes.get(trial.id, standing.outcomes.get(trial.id)), search)
            else:
                text = UNFINISHED if self._session.has_ended else state.value
            facts = failures.get(trial.id), place_of(trial.id), seeds.get(trial.id)
            yield submitted_trial(trial, inbox.group_id, text, *facts)

    def _read_forgotten(self) -> dict[str, SubmittedTrial]:
        """The trials in the files that the groups no longer have."""
        return {
            part.trial_id: part
            for group in read_run(self._session.run_dir).groups
            if group.group_id in self._inboxes
            for parts in group.trials.values()
            for part in parts
            if part.trial_id not in self._inboxes[group.group_id].group
        }

    def _read_results(self, parts: Mapping[str, SubmittedTrial]) -> None:
        for reported in self._new_results():
            part = parts.get(reported.trial_id)
            if part is None:  # It was submitted a moment ago.
                group = self._inboxes[reported.group_id].group
                if reported.trial_id not in group:
                    continue
                part = submitted_trial(group[reported.trial_id], reported.group_id, "", None)
            self._results.setdefault(reported.trial_id, []).append(result_of(reported, part))

    def _new_results(self) -> Iterator[StoredIteration]:
        """The results that were written since the last call; all of them must be taken."""
        try:
            for line in self._lines.new():
                if isinstance(line.value, StoredIteration):
                    yield line.value
        except (FileNotFoundError, ReplacedError):
            raise FluidError(f"the results are gone: {self._results_file} was deleted or replaced") from None

    def _make(self, shown: tuple[str, str], parts: Sequence[SubmittedTrial]) -> TrialResult:
        # The config in the end: one that was told later is another object.
        found = [
            (part.trial_id, part.state, len(self._results.get(part.trial_id, ())), id(part.config)) for part in parts
        ]
        if shown in self._made and self._made[shown][0] == found:
            return self._made[shown][1]
        group = self._inboxes[shown[0]].group
        trial_id = parts[-1].trial_id
        files = files_of(self._session.run_dir, parts)
        if trial_id in group:
            files = replace(files, source=partial(_given, group[trial_id]))
        made = trial_result(group.name, parts, lambda part: self._results.get(part.trial_id, ()), files)
        self._made[shown] = found, made
        return made


def _given(trial: Trial) -> tuple[Any, Mapping[str, Any]]:
    return trial.trainable, trial.config
