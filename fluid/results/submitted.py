"""The groups and trials of a session, combined from ``trials.jsonl``, the journal and the finished iterations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fluid.engine.events import Failure
from fluid.engine.journal import PastTrial, Recovered
from fluid.results.folder_files import read_search
from fluid.results.iterations import FinishedIteration, FinishedIterations
from fluid.results.run_files import RunFiles
from fluid.trialgroup import Search, TrialState

#: States of trials that had not ended when the folder was read, and of those that the journal does not mention.
UNFINISHED, UNKNOWN = "UNFINISHED", "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTrial:
    """One trial, as it is shown.

    Attributes:
        trial_id, group_id: the trial, by the name that the user knows, and its group.
        parts: ids of the submitted trials that it is made of, each with the iterations done before it, in order; the
            last determines the state.
        key: its profile key; empty if unknown.
        config: its hyperparameters.
        state: ``"DONE"``, ``"STOPPED"``, ``"FAILED"``, ``"PAUSED"``, ``"UNFINISHED"`` or ``"UNKNOWN"``.
        budget: iterations it might run; ``None`` if unknown, or if a search algorithm extends it step by step.
        failure: why it failed; ``None`` if it did not.
        finished: its finished iterations, in order.
    """

    trial_id: str
    group_id: str
    parts: tuple[tuple[str, int], ...]
    key: str
    config: Mapping[str, Any]
    state: str
    budget: int | None
    failure: Failure | None
    finished: tuple[FinishedIteration, ...]


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """One TrialGroup.

    Attributes:
        group_id, name: the group.
        trials: its trials, in order of submission.
        search: what its search algorithm said of it; ``None`` if none submitted the trials.
    """

    group_id: str
    name: str
    trials: tuple[LoadedTrial, ...]
    search: Search | None


@dataclass
class _SubmittedGroup:
    """A group while it is read.

    Attributes:
        parts: the submitted trials, in order, by the name under which they are shown. Several have one name if a
            trial of the search algorithm was submitted anew from a checkpoint.
    """

    name: str
    search: Search | None = None
    parts: dict[str, list[str]] = field(default_factory=dict)


class SubmittedTrials:
    """Combines the three files about trials.

    Groups and trials are in the order of ``trials.jsonl``, followed by those that only the other files mention.

    Args:
        files: the run folder.
        journal: what its journal says.
        done: its finished iterations.
    """

    def __init__(self, files: RunFiles, journal: Recovered, done: FinishedIterations) -> None:
        self._journal = journal
        self._done = done
        #: The trials that the journal mentions.
        self._journaled: dict[str, PastTrial] = {
            **{
                trial: PastTrial(group, history, journal.failures.get(trial))
                for group, trials in journal.groups.items()
                for trial, history in trials.items()
            },
            **journal.past,
        }
        #: The entry of each trial in ``trials.jsonl``.
        self._entries: dict[str, Mapping[str, Any]] = {}
        self._groups: dict[str, _SubmittedGroup] = {}
        for entry in files.trials():
            if "trial" in entry:
                self._entries.setdefault(str(entry["trial"]), entry)
            else:
                group = str(entry.get("group", ""))
                self._groups.setdefault(group, _SubmittedGroup(str(entry.get("name") or group), read_search(entry)))

    def groups(self) -> tuple[LoadedGroup, ...]:
        """The groups."""
        order: dict[str, None] = {}
        for trial in dict.fromkeys([*self._entries, *self._journaled, *self._done.by_trial]):
            if self._journaled and trial not in self._journaled and trial not in self._done.by_trial:
                continue  # The engine refused it.
            entry = self._entries.get(trial, {})
            group = str(entry.get("group", self._group_of(trial)))
            name = str(entry.get("shown", trial))
            self._groups.setdefault(group, _SubmittedGroup(group)).parts.setdefault(name, []).append(trial)
            order[group] = None
        return tuple(
            LoadedGroup(
                group,
                self._groups[group].name,
                tuple(self._trial(group, name, parts) for name, parts in self._groups[group].parts.items()),
                self._groups[group].search,
            )
            for group in order
        )

    def _group_of(self, trial: str) -> str:
        return self._journaled[trial].group_id if trial in self._journaled else self._done.group_of.get(trial, "")

    def _trial(self, group: str, name: str, parts: Sequence[str]) -> LoadedTrial:
        """Combines the submitted trials that are shown as one; the last determines its state."""
        entry, known = self._entries.get(parts[-1], {}), self._journaled.get(parts[-1])
        config = entry.get("config")
        state = self._state(parts[-1], self._groups[group].search)
        return LoadedTrial(
            trial_id=name,
            group_id=group,
            parts=tuple((part, self._before(part)) for part in parts),
            key=str(entry.get("key", "" if known is None else known.history.trial.profile_key)),
            config=config if isinstance(config, Mapping) else {},
            state=state,
            budget=None if known is None or "shown" in entry else known.history.budget,
            failure=known.failure if known is not None and state == TrialState.FAILED else None,
            finished=tuple(iteration for part in parts for iteration in self.iterations(part)),
        )

    def _state(self, trial: str, search: Search | None) -> str:
        if trial not in self._journaled:
            return UNKNOWN
        ended = self._journal.outcomes.get(trial, self._journaled[trial].history.ended)
        if ended is TrialState.DONE and search is not None and search.extends and trial not in self._journal.outcomes:
            return TrialState.PAUSED.value
        return ended.value if ended is not None else UNFINISHED

    def _before(self, trial: str) -> int:
        """Iterations that the shown trial had done before this one was submitted."""
        before = self._entries.get(trial, {}).get("iterations")
        return before if isinstance(before, int) else 0

    def iterations(self, trial: str) -> Iterator[FinishedIteration]:
        """The iterations of a submitted trial, numbered as in the trial it is shown as, with that trial's metrics."""
        before, outer = self._before(trial), self._entries.get(trial, {}).get("metrics")
        for iteration in self._done.by_trial.get(trial, ()):
            if before:
                iteration = replace(iteration, number=iteration.number + before)
            if isinstance(outer, str):
                inner = iteration.reported.get(outer) if isinstance(iteration.reported, Mapping) else None
                flat = _nested(iteration.metrics, f"{outer}/")
                iteration = replace(iteration, metrics=flat, reported=inner)
            yield iteration


def _nested(metrics: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix) and value is not None
    }
