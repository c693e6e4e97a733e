"""Stale trials: those that a killed run has left ``RUNNING`` in the study's storage.

A storage with heartbeats handles them itself. In other storages, each run records on the study which process it is and
which trials it has under way. If that process has ended, its trials are told ``FAIL`` and queued again. Trials of a
process on another machine, or in another container, are left alone: it may still be optimizing the same study.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.integrations.optuna import private_api
from fluid.processes.identity import begun_at, own_machine

with try_import("Optuna", extra="optuna"):
    import optuna
    from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.study import Study

#: How many times a trial is queued again: the trial itself may have crashed the machine.
MAX_RETRY = 3
#: Begins the names of the study's attributes that hold runs.
_KEY = "fluid:run"
_lock = threading.Lock()
_run_numbers = itertools.count()
#: Runs of this process that have not ended, by their places in it.
_active_runs: dict[int, int] = {}


class StudyRun:
    """One run on a study, as other processes see it: a context manager, in which it has not ended.

    Attributes:
        record: identifies it: machine, process and number of the run.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        self._is_recorded = not private_api.has_heartbeat(study)
        with _lock:
            number = next(_run_numbers)
            self._place = next(place for place in itertools.count() if place not in _active_runs)
            _active_runs[self._place] = number
        process = {**own_machine()._asdict(), "pid": os.getpid()}
        self.record: dict[str, Any] = {**process, "started": begun_at(os.getpid()), "run": number}
        #: A process has one attribute for each of the runs that it has at a time, however many follow one another.
        self._key = ":".join([_KEY, *map(str, process.values()), str(self._place)])

    def __enter__(self) -> StudyRun:
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            del _active_runs[self._place]

    def under_way(self, trials: Iterable[int]) -> None:
        """Records the numbers of the trials that this run has under way; trials that were told may be among them."""
        if self._is_recorded:
            private_api.set_system_attr(self._study, self._key, {**self.record, "trials": sorted(trials)})


def retry_stale_trials(study: Study, taken_up: Container[int] = ()) -> list[int]:
    """Fails stale trials, and queues them again with the same parameters.

    Args:
        study: the study.
        taken_up: numbers of those that go on where they were.

    Returns:
        Their numbers; none where the storage has heartbeats and handles them itself.
    """
    if private_api.has_heartbeat(study):
        private_api.fail_stale_trials(study)
        return []
    runs = [run for key, run in private_api.system_attrs(study).items() if key.startswith(f"{_KEY}:")]
    left = {number for run in runs if has_ended(run) for number in run["trials"]}
    if not left:
        return []
    retry = _retry_callback()
    numbers = []
    for stale in study.get_trials(deepcopy=True, states=(TrialState.RUNNING,)):
        if stale.number not in left or stale.number in taken_up:
            continue
        try:
            study.tell(stale.number, state=TrialState.FAIL)
        except (ValueError, RuntimeError):
            continue  # Another process has told it meanwhile.
        retry(study, stale)
        numbers.append(stale.number)
    return numbers


def has_ended(run: Mapping[str, Any]) -> bool:
    """Whether a run is known to have ended; False for one whose process cannot be observed from here."""
    if any(run.get(name) != value for name, value in own_machine()._asdict().items()):
        return False
    if begun_at(run["pid"]) != run["started"]:
        return True
    return bool(run["pid"] == os.getpid() and run["run"] not in _active_runs.values())


def _retry_callback() -> Any:
    storages = optuna.storages
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Renamed in Optuna 4.9, which warns of the old name.
        if hasattr(storages, "RetryHeartbeatStaleTrialCallback"):
            return storages.RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRY)
        return storages.RetryFailedTrialCallback(max_retry=MAX_RETRY)
