"""A submitted trial, as the engine knows it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from fluid.engine.trial_spec import TrialSpec
from fluid.planning.fusion_groups import text_of
from fluid.trainables.trainable import can_save, is_elastic, is_fusible, profile_name
from fluid.trialgroup import Trial, TrialGroup

_log = logging.getLogger("fluid.session")


def warn_of_unfusible(group: TrialGroup) -> None:
    """Says so if no trial of a group is of a class that can be fused."""
    if not any(is_fusible(trial.trainable) for trial in group.active):
        text = "packing='fused', and no trial of %r can be fused: %s is no FusedTrainable; each runs alone on a device"
        _log.warning(text, group.name, profile_name(group.active[0].trainable))


def spec_of(trial: Trial, max_width: int, *, keep_last: bool) -> TrialSpec:
    """Returns what the engine is to know of a trial.

    Args:
        trial: as the user submitted it.
        max_width: most devices, if the trial sets no bound of its own.
        keep_last: whether its newest checkpoint is to outlive the run.
    """
    elastic = is_elastic(trial.trainable)
    shares = trial.devices is not None and trial.devices < 1.0
    fusible = is_fusible(trial.trainable)
    gang = not elastic and trial.devices is not None and trial.devices >= 2
    return TrialSpec(
        trial_id=trial.id,
        budget=trial.budget,
        priority=trial.priority,
        profile_key=f"{trial.key} on {trial.devices:g} devices" if gang and trial.devices else trial.key,
        max_width=1 if shares or not elastic else trial.max_width or max_width,
        memory=trial.memory,
        can_save=can_save(trial.trainable),
        retry_errors=trial.retry_errors,
        follow_up_iterations=trial.follow_up_iterations,
        iteration_timeout_s=trial.iteration_timeout_s,
        requires=trial.requires,
        devices=trial.devices,
        gang=gang,
        keep_last=keep_last,
        fusible=fusible,
        config=tuple(_values(trial.config if trial.shown is None else trial.shown.config)) if fusible else (),
    )


def _values(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The values of a config as texts, by dotted name, nested dicts resolved."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", text_of(value)
