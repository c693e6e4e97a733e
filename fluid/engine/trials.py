"""The trials of a session: one record each, found by id, or by row, the number that placement and planners use."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView

from fluid.engine.records import TrialRecord


class Trials:
    """The records of a session's trials by id, in order of arrival. Reads like a mapping.

    Attributes:
        by_row: the same records by row; :meth:`add` and :meth:`remove` keep both.
        constrained: whether any trial so far asked for certain devices.
        touched: ids of those whose state has changed in this call of the engine.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, TrialRecord] = {}
        self.by_row: dict[int, TrialRecord] = {}
        self.constrained = False
        self.touched: set[str] = set()
        self._rows = 0

    def __getitem__(self, trial_id: str) -> TrialRecord:
        return self._by_id[trial_id]

    def get(self, trial_id: str) -> TrialRecord | None:
        """The record of a trial; ``None`` if there is none."""
        return self._by_id.get(trial_id)

    def __contains__(self, trial_id: object) -> bool:
        return trial_id in self._by_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def keys(self) -> KeysView[str]:
        """The ids."""
        return self._by_id.keys()

    def items(self) -> ItemsView[str, TrialRecord]:
        """The ids and records."""
        return self._by_id.items()

    def values(self) -> ValuesView[TrialRecord]:
        """The records."""
        return self._by_id.values()

    def shrink_ended(self) -> None:
        """Drops, as a call of the engine ends, what is not needed of the trials that have ended in it."""
        for trial_id in self.touched:
            trial = self._by_id.get(trial_id)
            if trial is not None and trial.state.ended:
                trial.shrink()
        self.touched.clear()

    def new_row(self) -> int:
        """A row that was never used."""
        self._rows += 1
        return self._rows

    def add(self, trial: TrialRecord) -> None:
        """Adds a trial whose id and row are new."""
        self._by_id[trial.trial_id] = self.by_row[trial.row] = trial
        if trial.constraint is not None:
            self.constrained = True

    def remove(self, trial: TrialRecord) -> None:
        """Removes a trial; its row is not used again."""
        del self._by_id[trial.trial_id], self.by_row[trial.row]
