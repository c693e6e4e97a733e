"""Answers what objectives in lanes ask of their trials and of the study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fluid.integrations.optuna import private_api
from fluid.integrations.optuna.known_objects import as_message
from fluid.integrations.optuna.request import Request
from fluid.session.listeners import TrialRequest

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial


def answer(request: TrialRequest, study: Study, trial: Trial) -> None:
    """Does what an objective asks for with the driver's own objects; an exception is raised in the objective."""
    try:
        asked = Request(*request.read())
        args, kwargs = asked.call or ((), {})
        if asked.target == "choice":
            value: Any = private_api.index_of_choice(trial, asked.name, *args)
        else:
            owner = {"trial": trial, "study": study, "storage": trial.storage}[asked.target]
            value = getattr(owner, asked.name)
            if asked.call is not None:
                value = value(*args, **kwargs)
    except Exception as error:
        request.refuse(error)
    else:
        request.answer(as_message(value))
