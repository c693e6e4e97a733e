"""The code with which the trials of a session go on: what of it has changed, and which trials take the new one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fluid._logs import logger_of
from fluid.engine.events import TrialHistory
from fluid.errors import InvalidFieldError
from fluid.results.code_changes import CodeChange
from fluid.session.folder.resume import LeftGroup, LeftSession
from fluid.session.specs import with_requirements
from fluid.trainables.trainable_code import TrainableCode, code_of
from fluid.trialgroup import Trial, TrialState

_log = logger_of("fluid.session")

#: Which unfinished trials take the code given: those that have not begun, or all.
CODES = ("begun", "new")
#: Fields of a trial that the user may give otherwise in a session that goes on.
_FIELDS = (
    *("priority", "max_width", "memory", "retry_errors", "iteration_timeout_s", "requires", "devices", "threads"),
    *("isolation", "chdir"),
)


@dataclass(frozen=True, slots=True)
class GivenCode:
    """What the user gives to a session that goes on.

    Attributes:
        trainables: by name of a group, its trainable now, or a :class:`Trial` whose other fields count, too.
        code: one of :data:`CODES`.
    """

    trainables: Mapping[str, Any]
    code: str = "begun"

    @classmethod
    def checked(cls, trainables: Any, code: Any) -> GivenCode:
        """What the user gave, checked.

        Raises:
            InvalidFieldError: the trainables are no dict by name, one cannot be used, or the code is neither word.
        """
        if not isinstance(trainables, Mapping):
            raise InvalidFieldError("trainables", trainables, "must be a dict of trainables by name of their group")
        if code not in CODES:
            reason = "must be 'begun', so that a trial keeps the code that it began with, or 'new', for all trials"
            raise InvalidFieldError("code", code, reason)
        for name, given in trainables.items():
            trial = given if isinstance(given, Trial) else Trial(given)  # Raises.
            if trial.config or trial.budget != 1:
                reason = "has a config or a budget: trials that go on keep theirs; leave that out"
                raise InvalidFieldError(f"trainables[{name!r}]", given, reason)
        return cls(trainables, code)

    def apply(self, left: LeftSession) -> list[CodeChange]:
        """Gives the trials what they are to go on with, and says what has changed.

        Raises:
            InvalidFieldError: the session has no group of a name.
        """
        known = {group.line.name for group in left.groups.values()}
        for name in self.trainables:
            if name not in known:
                there = ", ".join(sorted(known)) or "none"
                raise InvalidFieldError(f"trainables[{name!r}]", name, f"is no group of the session, which has {there}")
        changes = []
        for group_id, group in left.groups.items():
            for change in self._of_group(left, group_id, group):
                _log.warning("%s", change.warning(group.line.name))
                changes.append(change)
        return changes

    def _of_group(self, left: LeftSession, group_id: str, group: LeftGroup) -> Iterator[CodeChange]:
        given = self.trainables.get(group.line.name)
        template = given if isinstance(given, Trial) else None
        if template is not None:
            template, given = with_requirements([template], group.submitted())[0], template.trainable
        now = None if given is None else code_of(given)
        unpickled: dict[int, TrainableCode | None] = {}
        differences: dict[tuple[int, int], tuple[tuple[str, ...], tuple[str, ...]]] = {}
        found: dict[tuple[tuple[str, ...], tuple[str, ...]], CodeChange] = {}
        for trial_id, trial in list(group.trials.items()):
            history = left.recovered.groups.get(group_id, {}).get(trial_id)
            if trial_id in left.unusable or _is_over(history, group, left.recovered.outcomes.get(trial_id)):
                continue
            reported = max(left.results.reported.get(trial_id, 0), 0 if history is None else history.reported)
            has_begun = reported > 0 or (history is not None and history.checkpoint is not None)
            if (key := id(trial.trainable)) not in unpickled:
                unpickled[key] = code_of(trial.trainable)
            before = left.codes.get(trial_id)  # One object for all trials of one trainable.
            if (pair := (key, id(before))) not in differences:
                imported = _difference(unpickled[key], before)
                differences[pair] = () if given is None else _difference(now, unpickled[key]), imported
            changed, imported = differences[pair]
            takes = given is not None and (self.code == "new" or (bool(changed) and not has_begun))
            fields = {} if template is None else _other_fields(trial, template)
            if takes or fields:
                new = {"trainable": given, **fields} if takes else fields
                group.trials[trial_id] = trial.changed(**new)
                left.renewed.add(trial_id)
            if changed or imported:
                change = found.setdefault((changed, imported), CodeChange(group_id, changed, imported))
                (change.taken if takes or not changed else change.kept)[trial_id] = reported
        yield from found.values()


def _is_over(history: TrialHistory | None, group: LeftGroup, outcome: TrialState | None) -> bool:
    """Whether a trial runs no more: also none that a search may extend."""
    if history is None or history.ended is None:
        return False
    search = group.line.search
    waits = history.ended is TrialState.DONE and search is not None and search.extends and outcome is None
    return not waits


def _difference(code: TrainableCode | None, earlier: TrainableCode | None) -> tuple[str, ...]:
    return () if code is None or earlier is None else code.changed_since(earlier)


def _other_fields(trial: Trial, template: Trial) -> dict[str, Any]:
    return {name: getattr(template, name) for name in _FIELDS if getattr(template, name) != getattr(trial, name)}
