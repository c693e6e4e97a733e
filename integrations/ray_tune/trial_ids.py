"""Ids of Tune's trials in Fluid: Tune's own, with a number from the second submission of a trial on.

A session takes each id once. A sweep that is restored in the executor in which it was begun has the trials of before.
"""

from __future__ import annotations

import threading
from typing import ClassVar
from weakref import WeakKeyDictionary

from fluid.executor import FluidExecutor
from fluid.results.run_files import TRIALS, json_lines


class TrialIds:
    """Makes ids that no trial of an executor has had; shared by all sweeps of the executor.

    Args:
        executor: its run folder says which ids sessions before have taken.
    """

    _of_executor: ClassVar[WeakKeyDictionary[FluidExecutor, TrialIds]] = WeakKeyDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, executor: FluidExecutor) -> None:
        entries = (line.entry or {} for line in json_lines(executor.run_dir / TRIALS))
        self._taken = frozenset(str(entry["trial"]) for entry in entries if "trial" in entry)
        #: Number of ids made for each of Tune's trials.
        self._made: dict[str, int] = {}

    @classmethod
    def of(cls, executor: FluidExecutor) -> TrialIds:
        """Returns the ids of an executor."""
        with cls._lock:
            if executor not in cls._of_executor:
                cls._of_executor[executor] = cls(executor)
            return cls._of_executor[executor]

    def new(self, trial_id: str) -> str:
        """Returns an id for a further submission of one of Tune's trials."""
        while True:
            with self._lock:
                number = self._made.get(trial_id, 0)
                self._made[trial_id] = number + 1
            made = f"{trial_id}.{number}" if number else str(trial_id)
            if made not in self._taken:
                return made
