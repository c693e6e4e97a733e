"""The registry of checkpoints that outlive the run: which stay, and which make way for better or newer ones. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluid.keeping import KeepRule, WorstKept
from fluid.results.best import Merit


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
        return max(
            entries.values(), key=lambda entry: (Merit.of(entry.value, failed=entry.failed, less=less), entry.place)
        )
