"""Stale trials: those that a killed run has left ``RUNNING`` in the study's storage.

A storage with heartbeats handles them itself. For other storages, each trial records the process that asked for it. If
that process has ended, its trials are told ``FAIL`` and queued again. Trials of a process on another machine, or in
another container, are left alone: it may still be optimizing the same study.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.integrations.optuna import private_api

with try_import("Optuna", extra="optuna"):
    import optuna
    from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

#: How many times a trial is queued again: the trial itself may have crashed the machine.
MAX_RETRY = 3
_KEY = "fluid:run"
_run_numbers = itertools.count()
#: Runs of this process that have not ended.
_active_runs: set[int] = set()


@contextmanager
def this_run() -> Iterator[dict[str, Any]]:
    """Yields what identifies this run on its trials: machine, process and number of the run."""
    number = next(_run_numbers)
    _active_runs.add(number)
    try:
        yield {**_machine(), "pid": os.getpid(), "started": _start_time(os.getpid()), "run": number}
    finally:
        _active_runs.discard(number)


def record_run(study: Study, trial: Trial, run: Mapping[str, Any]) -> None:
    """Records on a trial the run that asked for it; not needed where the storage has heartbeats."""
    if not private_api.has_heartbeat(study):
        private_api.set_system_attr(study, trial, _KEY, dict(run))


def retry_stale_trials(study: Study) -> list[int]:
    """Fails stale trials, and queues them again with the same parameters.

    Returns:
        Their numbers; none where the storage has heartbeats and handles them itself.
    """
    if private_api.has_heartbeat(study):
        private_api.fail_stale_trials(study)
        return []
    retry = _retry_callback()
    numbers = []
    for stale in study.get_trials(deepcopy=True, states=(TrialState.RUNNING,)):
        run = stale.system_attrs.pop(_KEY, None)
        if run is None or not has_ended(run):
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
    if any(run.get(name) != value for name, value in _machine().items()):
        return False
    if _start_time(run["pid"]) != run["started"]:
        return True
    return bool(run["pid"] == os.getpid() and run["run"] not in _active_runs)


def _retry_callback() -> Any:
    storages = optuna.storages
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Renamed in Optuna 4.9, which warns of the old name.
        if hasattr(storages, "RetryHeartbeatStaleTrialCallback"):
            return storages.RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRY)
        return storages.RetryFailedTrialCallback(max_retry=MAX_RETRY)


@lru_cache(maxsize=1)
def _machine() -> dict[str, Any]:
    """Returns what two processes must share to identify each other by process id."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"boot": file.read().strip(), "pids": os.readlink("/proc/self/ns/pid")}


def _start_time(pid: int) -> int | None:
    """Returns a process's start time in clock ticks since boot; ``None`` if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # The process name, in parentheses, may hold anything.
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
