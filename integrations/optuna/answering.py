"""Answers what objectives in lanes ask of their trials and of the study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluid.integrations.optuna.request import Request
from fluid.session.results import TrialRequest

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial


def answer(request: TrialRequest, study: Study, trial: Trial) -> None:
    """Does what an objective asks for with the driver's own objects; an exception is raised in the objective."""
    try:
        asked = Request(*request.read())
        owner = {"trial": trial, "study": study, "storage": trial.storage}[asked.target]
        value = getattr(owner, asked.name)
        if asked.call is not None:
            args, kwargs = asked.call
            value = value(*args, **kwargs)
    except Exception as error:
        request.refuse(error)
    else:
        request.answer(value)
