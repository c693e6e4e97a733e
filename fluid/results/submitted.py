"""The groups and trials of a session, combined from ``trials.jsonl``, the journal and the results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from typing import Any

from fluid.engine.events import PLAIN_TERMS, Failure, GroupDeadline, GroupTerms
from fluid.errors import InvalidFieldError, require_number, require_text
from fluid.policies.owners.deadlines import MOST, weight_of
from fluid.random_state import Seeds
from fluid.resources import Requires
from fluid.results.journal import Recovered
from fluid.results.run_files import read_search
from fluid.trial_fields import StartFrom
from fluid.trialgroup import PAUSED_BY_USER, Search, Trial, TrialState

#: States of which the journal tells a reason.
_WITH_REASON = (TrialState.FAILED, TrialState.INFEASIBLE)

# -- group lines ---------------------------------------------------------------------------------
#
# The line of a group in ``trials.jsonl``: its name, its search, what it requires of devices, and its terms.


@dataclass(frozen=True, slots=True)
class GroupLine:
    """What the line says of a group.

    Attributes:
        name: its name.
        search: what its search algorithm said of it; ``None`` if none submits its trials.
        requires: what its trials require of devices, where they do not say otherwise; ``None`` for nothing.
        terms: whose group it is, and how urgent; its deadline counts from its submission.
        submitted_at: when that was, seconds since 1970, of a group with a deadline; ``None`` if unknown.
    """

    name: str
    search: Search | None = None
    requires: Requires | None = None
    terms: GroupTerms = PLAIN_TERMS
    submitted_at: float | None = None

    def with_terms(self, journaled: GroupTerms | None) -> GroupLine:
        """The line with the terms that the journal has, if it has any; the deadline stays as it was given."""
        if journaled is None:
            return self
        known = journaled if self.submitted_at is None else replace(journaled, deadline=self.terms.deadline)
        return replace(self, terms=known)

    def terms_left(self, now: float) -> GroupTerms:
        """The terms of a session that goes on: the deadline counts from the group's submission.

        Args:
            now: seconds since 1970.
        """
        if self.terms.deadline is None or self.submitted_at is None:
            return self.terms
        return replace(self.terms, deadline=self.terms.deadline.after(max(0.0, now - self.submitted_at)))

    def entry(self, group_id: str) -> dict[str, Any]:
        """The line as a JSON object; what is as it is by default is left out."""
        entry: dict[str, Any] = {"group": group_id, "name": self.name}
        if self.search is not None:
            entry |= asdict(self.search)
        for name in ("owner", "priority", "preempt", "weight"):
            if (value := getattr(self.terms, name)) != getattr(PLAIN_TERMS, name):
                entry[name] = value
        if (deadline := self.terms.deadline) is not None:
            entry["deadline"] = [list(step) for step in deadline.steps]
            entry |= {"on_miss": deadline.on_miss} if deadline.on_miss == "stop" else {}
            entry |= {} if self.submitted_at is None else {"submitted_at": self.submitted_at}
        if self.requires is not None:
            asked = ((field.name, getattr(self.requires, field.name), field.default) for field in fields(Requires))
            entry["requires"] = {name: value for name, value, default in asked if value != default}
        return entry

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> GroupLine:
        """Reads a line; what it lacks, or cannot be used, is as it is by default."""
        group_id = str(entry.get("group", ""))
        search = read_search(entry)
        expected = None if search is None else search.trials
        submitted = entry.get("submitted_at")
        at = float(submitted) if isinstance(submitted, int | float) and math.isfinite(submitted) else None
        return cls(str(entry.get("name") or group_id), search, _requires(entry), _terms(entry, expected), at)


def _terms(entry: Mapping[str, Any], expected: int | None) -> GroupTerms:
    owner, priority = None, PLAIN_TERMS.priority
    with suppress(InvalidFieldError):
        owner = require_text("owner", entry["owner"]) if "owner" in entry else None
    with suppress(InvalidFieldError):
        priority = require_number("priority", entry.get("priority", priority), at_least=0.0)
    weight = PLAIN_TERMS.weight
    with suppress(InvalidFieldError):
        weight = weight_of(entry.get("weight", weight))
    return GroupTerms(owner, priority, entry.get("preempt") is True, expected, _deadline(entry), weight)


def _deadline(entry: Mapping[str, Any]) -> GroupDeadline | None:
    try:
        steps = tuple((float(at), float(cost)) for at, cost in entry["deadline"])
    except (KeyError, TypeError, ValueError):
        return None
    usable = bool(steps) and all(abs(each) <= MOST for each in chain(*steps)) and list(steps) == sorted(steps)
    return GroupDeadline(steps, "stop" if entry.get("on_miss") == "stop" else "late") if usable else None


def _requires(entry: Mapping[str, Any]) -> Requires | None:
    asked = entry.get("requires")
    if not isinstance(asked, Mapping):
        return None
    try:
        return Requires(**asked)
    except (InvalidFieldError, TypeError):
        return None


# -- submitted -----------------------------------------------------------------------------------


#: States of trials that had not ended when the folder was read, and of those that the journal does not mention.
UNFINISHED, UNKNOWN = "UNFINISHED", "UNKNOWN"


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedTrial:
    """A trial as it was submitted, and how it stands.

    Attributes:
        trial_id, group_id: the trial and its group, as the engine knows them.
        shown_id: the name under which it is shown; several trials of one name are shown as one.
        before: iterations that the shown trial had done before this one was submitted.
        inner: the entry of its results that holds the metrics; ``None`` if the results are the metrics.
        key: its profile key; empty if unknown.
        config: its hyperparameters, as they are shown.
        state: ``"DONE"``, ``"STOPPED"``, ``"FAILED"``, ``"PAUSED"``, ``"PAUSED BY THE USER"``, ``"UNFINISHED"`` or
            ``"UNKNOWN"``; while its session runs, the others of :class:`fluid.trialgroup.TrialState` too.
        budget: iterations it might run; ``None`` if unknown, or if a search algorithm extends it step by step.
        failure: why it failed; ``None`` if it did not.
        place: its place in its group's order of submission.
        seeds: of its random number generators; ``None`` if unknown.
        start: the state of another trial from which it starts; ``None`` if it begins afresh.
        is_shared_run: whether Fluid has added it, to run iterations once for several trials.
    """

    trial_id: str
    group_id: str
    shown_id: str
    before: int = 0
    inner: str | None = None
    key: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str
    budget: int | None = None
    failure: Failure | None = None
    place: int = 0
    seeds: Seeds | None = None
    start: StartFrom | None = None
    is_shared_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedGroup(GroupLine):
    """One TrialGroup, with what its line says.

    Attributes:
        group_id: the group.
        trials: the trials by the name under which they are shown, each as the submitted trials that it is made of, in
            order; the last determines its state.
        shared_runs: those that Fluid has added, to run iterations once for several of them.
    """

    group_id: str
    trials: dict[str, list[SubmittedTrial]] = field(default_factory=dict)
    shared_runs: dict[str, list[SubmittedTrial]] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, list[SubmittedTrial]]:
        """The trials, then what Fluid has added."""
        return {**self.trials, **self.shared_runs}

    @property
    def owner_name(self) -> str:
        """Its owner in words; the group itself where it names none."""
        return f"group {self.name!r}" if self.terms.owner is None else self.terms.owner

    @property
    def owner_words(self) -> str:
        """The same, with the deadline of a group that has one."""
        deadline = self.terms.deadline
        return self.owner_name + ("" if deadline is None else f" (deadline {deadline.text})")


def shown_state(state: TrialState, outcome: TrialState | None, search: Search | None) -> str:
    """How a trial is shown: once it has ended, as its submitter said; else one that a search may extend is paused."""
    if outcome is not None:
        return outcome.value
    if state is TrialState.PAUSED:
        return PAUSED_BY_USER
    paused = state is TrialState.DONE and search is not None and search.extends
    return (TrialState.PAUSED if paused else state).value


def read_trial(trial_id: str, entry: Mapping[str, Any], **facts: Any) -> SubmittedTrial:
    """A trial as its line of ``trials.jsonl`` tells; what the line lacks, or cannot be used, is as it is by default.

    Args:
        trial_id: its id.
        entry: the line; empty if there is none.
        facts: other fields, and those that are known better.
    """
    before, inner, config = (entry.get(name) for name in ("iterations", "metrics", "config"))
    known = {
        "group_id": str(entry.get("group", "")),
        "shown_id": str(entry.get("shown", trial_id)),
        "before": before if isinstance(before, int) else 0,
        "inner": inner if isinstance(inner, str) else None,
        "key": str(entry.get("key", "")),
        "config": config if isinstance(config, Mapping) else {},
        "seeds": Seeds.read(entry.get("seeds")),
        "start": _start(entry.get("start")),
        "is_shared_run": entry.get("is_shared_run") is True,
    }
    return SubmittedTrial(trial_id=trial_id, **{**known, **facts})


def _start(found: object) -> StartFrom | None:
    if not isinstance(found, Mapping):
        return None
    parent, at, path = (found.get(name) for name in ("parent", "at", "path"))
    iterations = at if isinstance(at, int) and not isinstance(at, bool) else None
    return StartFrom(str(parent or ""), iterations, str(path or ""), found.get("is_shared") is True)


def submitted_trial(
    trial: Trial, group_id: str, state: str, failure: Failure | None, place: int = 0, seeds: Seeds | None = None
) -> SubmittedTrial:
    """A trial that the user submitted in this process."""
    shown = trial.shown
    return SubmittedTrial(
        trial_id=trial.id,
        group_id=group_id,
        shown_id=trial.id if shown is None else shown.trial_id,
        before=0 if shown is None else shown.iterations,
        inner=None if shown is None else shown.metrics,
        key=trial.key,
        config=trial.config if shown is None else shown.config,
        state=state,
        budget=trial.budget if shown is None else None,
        failure=failure,
        place=place,
        seeds=seeds,
        start=trial.start_from,
        is_shared_run=trial.is_shared_run,
    )


class SubmittedTrials:
    """Combines the three files about trials.

    Args:
        entries: the lines of ``trials.jsonl``.
        journal: what the journal says.
        reported: the group of each trial that has results.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]], journal: Recovered, reported: Mapping[str, str]) -> None:
        self._journal = journal
        self._reported = reported
        #: The trials that the journal mentions.
        self._journaled = journal.histories
        self._group_of = {trial: group for group, trials in journal.groups.items() for trial in trials}
        self._group_of |= {trial: group for group, trials in journal.forgotten.items() for trial in trials}
        #: The entry of each trial in ``trials.jsonl``.
        self._entries: dict[str, Mapping[str, Any]] = {}
        #: Configs that were told after the trial was submitted, by trial id.
        self._told_later: dict[str, Any] = {}
        #: The line of each group.
        self._groups: dict[str, GroupLine] = {}
        for entry in entries:
            if "trial" in entry:
                self._entries.setdefault(str(entry["trial"]), entry)
            elif "shown" in entry:
                self._told_later[str(entry["shown"])] = entry.get("config")
            elif "group" in entry:
                self._groups.setdefault(str(entry["group"]), GroupLine.read(entry))

    def lost(self, *, has_journal: bool) -> list[str]:
        """Sentences about trials of a session that has ended, which one of the files should have and has not.

        A file that was cut at the end of a line is like one that a killed session left: only the others tell.

        Args:
            has_journal: whether the journal could be read.
        """
        notes = []
        if has_journal and (count := len(self._reported.keys() - self._journaled.keys())):
            notes.append(f"journal.jsonl does not have {_trials(count)} with results: their states are unknown.")
        if count := len(self._journaled.keys() - self._entries.keys()):
            notes.append(f"trials.jsonl does not have {_trials(count)} of the journal: their configs are unknown.")
        return notes

    def groups(self) -> tuple[SubmittedGroup, ...]:
        """The groups, and their trials, in the order of ``trials.jsonl``; then those that only other files mention."""
        found: dict[str, SubmittedGroup] = {}
        places = Counter[str]()
        for trial in self._trials(places):
            if trial.group_id not in found:
                line = self._groups.get(trial.group_id, GroupLine(trial.group_id))
                line = line.with_terms(self._journal.terms.get(trial.group_id))
                found[trial.group_id] = SubmittedGroup(
                    *(line.name, line.search, line.requires, line.terms, line.submitted_at), group_id=trial.group_id
                )
            group = found[trial.group_id]
            (group.shared_runs if trial.is_shared_run else group.trials).setdefault(trial.shown_id, []).append(trial)
        return tuple(found.values())

    def _trials(self, places: Counter[str]) -> Iterator[SubmittedTrial]:
        for trial_id in dict.fromkeys([*self._entries, *self._journaled, *self._reported]):
            if not self._journaled or trial_id in self._journaled or trial_id in self._reported:
                yield self.trial(trial_id, places)  # Any other one was refused by the engine.

    def trial(self, trial_id: str, places: Counter[str] | None = None) -> SubmittedTrial:
        """A trial of which a line or the journal tells.

        Args:
            trial_id: its id.
            places: how many trials of each group came before; gets this one.
        """
        entry, known = self._entries.get(trial_id, {}), self._journaled.get(trial_id)
        told = self._reported.get(trial_id, "") if known is None else self._group_of[trial_id]
        group_id = str(entry.get("group", told))
        state = self._state(trial_id, self._groups.get(group_id, GroupLine("")).search)
        facts: dict[str, Any] = {"group_id": group_id, "state": state}
        if trial_id in self._told_later:
            entry = {**entry, "config": self._told_later[trial_id]}
        if known is not None:
            facts["key"] = str(entry.get("key", known.trial.profile_key))
            facts["budget"] = None if "shown" in entry else known.budget
            facts["failure"] = self._journal.failures.get(trial_id) if state in _WITH_REASON else None
        if (start := _start(entry.get("start"))) is not None:
            facts["start"] = start._replace(at=self._journal.forked.get(trial_id, start.at))
        if places is not None:
            facts["place"] = places[group_id]
            places[group_id] += 1
        return read_trial(trial_id, entry, **facts)

    def _state(self, trial_id: str, search: Search | None) -> str:
        if trial_id not in self._journaled:
            return UNKNOWN
        outcome, ended = self._journal.outcomes.get(trial_id), self._journaled[trial_id].ended
        if ended is None:
            if outcome is not None:
                return outcome.value
            return PAUSED_BY_USER if self._journaled[trial_id].paused else UNFINISHED
        return shown_state(ended, outcome, search)


def _trials(count: int) -> str:
    return "1 trial" if count == 1 else f"{count:,} trials"
