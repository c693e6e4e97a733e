"""Trials that a run which was killed has left behind, still ``RUNNING`` in the study's storage.

A storage with a heartbeat deals with them by itself. For others each trial carries a note of the process that asked for
it. Where that process can be seen to have ended, its trials are told ``FAIL`` and queued again. A process of another
machine, or of another container, is never judged: it may be at work on the same study.
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
from fluid.integrations.optuna import private_api as seam

with try_import("Optuna", extra="optuna"):
    import optuna
    from optuna.trial import TrialState

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

#: Times that a trial is queued again. It may be what brings the machine down.
MAX_RETRY = 3
_KEY = "fluid:run"
_numbers = itertools.count()
#: Runs of this process that have not ended.
_under_way: set[int] = set()


@contextmanager
def this_run() -> Iterator[dict[str, Any]]:
    """The note to leave on each trial of a run."""
    number = next(_numbers)
    _under_way.add(number)
    try:
        yield {**_here(), "pid": os.getpid(), "started": _started(os.getpid()), "run": number}
    finally:
        _under_way.discard(number)


def claim(study: Study, trial: Trial, run: Mapping[str, Any]) -> None:
    """Notes on a trial which run it is of."""
    if not seam.has_heartbeat(study):
        seam.note(study, trial, _KEY, dict(run))


def retry_left_trials(study: Study) -> list[int]:
    """Fails the trials that were left behind, and queues them again with the parameters they had.

    Returns:
        Their numbers; none where the storage has a heartbeat, which deals with them by itself.
    """
    if seam.has_heartbeat(study):
        seam.fail_stale_trials(study)
        return []
    retry = _retry_callback()
    numbers = []
    for left in study.get_trials(deepcopy=True, states=(TrialState.RUNNING,)):
        run = left.system_attrs.pop(_KEY, None)
        if run is None or not has_ended(run):
            continue
        try:
            study.tell(left.number, state=TrialState.FAIL)
        except (ValueError, RuntimeError):
            continue  # Another process has just told it.
        retry(study, left)
        numbers.append(left.number)
    return numbers


def has_ended(run: Mapping[str, Any]) -> bool:
    """Whether a run is known to have ended; not if it is out of sight from here."""
    if any(run.get(name) != value for name, value in _here().items()):
        return False
    if _started(run["pid"]) != run["started"]:
        return True
    return bool(run["pid"] == os.getpid() and run["run"] not in _under_way)


def _retry_callback() -> Any:
    storages = optuna.storages
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        # Renamed in Optuna 4.9, which warns of the old name.
        if hasattr(storages, "RetryHeartbeatStaleTrialCallback"):
            return storages.RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRY)
        return storages.RetryFailedTrialCallback(max_retry=MAX_RETRY)


@lru_cache(maxsize=1)
def _here() -> dict[str, Any]:
    """What must be the same for two processes to see each other by their ids."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"boot": file.read().strip(), "pids": os.readlink("/proc/self/ns/pid")}


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; ``None`` if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # Its name, in parentheses, may hold anything.
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
