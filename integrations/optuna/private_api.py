"""Every private name of Optuna that Fluid uses: what ``study.optimize`` itself does around a trial.

``study.stop``, which callbacks such as ``MaxTrialsCallback`` call, and the heartbeats of a storage work within
``study.optimize`` only. The names used here are the same from Optuna 3.0 to 5.0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import

with try_import("Optuna", extra="optuna"):
    import optuna
    from optuna.progress_bar import _ProgressBar
    from optuna.storages._heartbeat import get_heartbeat_thread, is_heartbeat_enabled
    from optuna.study._tell import _check_values_are_feasible

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial


@contextmanager
def optimizing(study: Study) -> Iterator[None]:
    """Marks the study as being optimized: ``study.stop`` may be called, ``study.optimize`` may not.

    Raises:
        RuntimeError: the study is being optimized already, as in a callback.
    """
    if study._thread_local.in_optimize_loop:
        raise RuntimeError("Nested invocation of optimize isn't allowed.")
    study._stop_flag = False
    study._thread_local.in_optimize_loop = True
    try:
        yield
    finally:
        study._thread_local.in_optimize_loop = False
        study._storage.remove_session()


def trial_of(study: Study, frozen: FrozenTrial) -> Trial:
    """A trial that another process has asked for, as if this one had."""
    return optuna.trial.Trial(study, frozen._trial_id)


def was_stopped(study: Study) -> bool:
    """Whether ``study.stop`` was called."""
    return bool(study._stop_flag)


def has_heartbeat(study: Study) -> bool:
    """Whether the study's storage detects dead trials by their heartbeats."""
    return bool(is_heartbeat_enabled(study._storage))


def fail_stale_trials(study: Study) -> None:
    """Makes a storage with heartbeats fail, and retry, the trials whose heartbeat has stopped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)


def problem_with_values(study: Study, values: Any) -> str:
    """Returns why a study cannot take what an objective returned; empty if it can."""
    return _check_values_are_feasible(study, values if isinstance(values, Sequence) else [values]) or ""


@contextmanager
def progress_bar(shown: bool, n_trials: int | None, timeout: float | None) -> Iterator[Any]:
    """Yields Optuna's progress bar, whose ``update`` takes the seconds since the start and the study."""
    bar = _ProgressBar(shown, n_trials, timeout)
    try:
        yield bar
    finally:
        bar.close()


def heartbeat(study: Study, trial: Trial) -> Any:
    """Returns a thread that sends a trial's heartbeat from ``start`` to ``join``."""
    return get_heartbeat_thread(trial._trial_id, study._storage)


def index_of_choice(trial: Trial, name: str, choices: Sequence[Any]) -> int:
    """Returns which of the choices a trial suggests."""
    value = trial.suggest_categorical(name, choices)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of the types of the choices; Optuna has just warned.
        return int(optuna.distributions.CategoricalDistribution(choices).to_internal_repr(value))


def system_attrs(study: Study) -> dict[str, Any]:
    """Returns the attributes of a study apart from the user's attributes."""
    return dict(study._storage.get_study_system_attrs(study._study_id))


def set_system_attr(study: Study, key: str, value: Any) -> None:
    """Sets an attribute of a study apart from the user's attributes."""
    study._storage.set_study_system_attr(study._study_id, key, value)
