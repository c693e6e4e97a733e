"""The direction of an objective where the call does not say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluid.errors import InvalidFieldError
from fluid.integrations.transformers.direction import direction_said


def trainer(best: str | None = None, greater: bool | None = None, compute_metrics: Any = None) -> Any:
    args = SimpleNamespace(metric_for_best_model=best, greater_is_better=greater)
    return SimpleNamespace(args=args, compute_metrics=compute_metrics)


@pytest.mark.parametrize(
    ("made", "objective", "expected"),
    [
        (trainer(), None, "minimize"),
        (trainer("accuracy", True, print), None, "maximize"),
        (trainer(), lambda metrics: metrics["eval_f1"], "maximize"),
        (trainer(), lambda metrics: metrics.pop("eval_loss"), "minimize"),
        (trainer("margin", False), lambda metrics: metrics["eval_margin"], "minimize"),
    ],
)
def test_what_is_said(made: Any, objective: Any, expected: str) -> None:
    assert direction_said(made, objective) == expected


@pytest.mark.parametrize(
    ("made", "objective", "what"),
    [
        (trainer(compute_metrics=print), None, "the sum of what compute_metrics returns"),
        (trainer(), lambda metrics: -metrics["eval_f1"], "what compute_objective returns"),
        (trainer(), lambda metrics: metrics["eval_margin"], "what compute_objective makes of eval_margin"),
        (trainer("perplexity", True), lambda metrics: metrics["eval_perplexity"], "eval_perplexity"),
        (trainer(), lambda metrics: (metrics["eval_loss"], metrics["eval_f1"]), "what compute_objective returns"),
    ],
)
def test_what_is_not_said_is_asked_for(made: Any, objective: Any, what: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"{what} may mean either; pass direction=") as refused:
        direction_said(made, objective)
    assert refused.value.field == "direction"
