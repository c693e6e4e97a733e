"""What an earlier session has left of a sweep, so that :func:`fluid.run` can go on with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluid.engine.events import Failure
from fluid.errors import InvalidFieldError
from fluid.results.loading import load
from fluid.results.records import Result
from fluid.results.run_files import RunFiles
from fluid.trialgroup import TrialState


@dataclass(frozen=True, kw_only=True)
class EarlierTrial:
    """A trial of the sweep.

    Attributes:
        trial_id: its id.
        config: its hyperparameters, as JSON has them.
        budget: iterations that it may run in all.
        ended: ``DONE``, ``STOPPED`` or ``FAILED``; ``None`` if it had not ended.
        failure: why it failed.
    """

    trial_id: str
    config: Mapping[str, Any]
    budget: int
    ended: TrialState | None
    failure: Failure | None


@dataclass(frozen=True, kw_only=True)
class EarlierSweep:
    """A sweep in the folder of a session that has ended.

    Attributes:
        trials: in the order in which they were started.
        results: in the order in which they were reported.
    """

    trials: tuple[EarlierTrial, ...]
    results: tuple[Result, ...]


def read_sweep(run_dir: str | Path, name: str) -> EarlierSweep:
    """Reads a sweep.

    Raises:
        InvalidFieldError: the folder is not that of a session, or has no sweep of this name.
    """
    files = RunFiles(run_dir, "run_dir")
    found = load(run_dir)
    trials = {trial.trial_id: trial for trial in found.trials if trial.group == name}
    if not trials:
        there = sorted({trial.group for trial in found.trials})
        raise InvalidFieldError("name", name, f"is no sweep of {files.path}, which has {', '.join(there) or 'none'}")
    known = {trial_id: history for group in files.journal().groups.values() for trial_id, history in group.items()}
    iterations = {(one.trial_id, one.iteration): one for trial in trials.values() for one in trial.results}
    reported = ((entry.get("trial"), entry.get("iteration")) for entry in files.results())
    return EarlierSweep(
        trials=tuple(
            EarlierTrial(
                trial_id=trial_id,
                config=trial.config,
                budget=max(known[trial_id].budget, trial.iteration) if trial_id in known else max(1, trial.iteration),
                ended=known[trial_id].ended if trial_id in known else None,
                failure=trial.failure,
            )
            for trial_id, trial in sorted(trials.items())
        ),
        results=tuple(iterations[key] for key in dict.fromkeys(reported) if key in iterations),
    )


def is_same_config(config: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether a config is the one that is stored as JSON; ``True`` where JSON cannot hold it."""
    try:
        return bool(json.loads(json.dumps(config)) == json.loads(json.dumps(stored)))
    except (TypeError, ValueError):
        return True
