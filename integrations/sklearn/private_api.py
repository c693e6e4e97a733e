"""All that is used of scikit-learn beyond its public API, in one place. Tested with the release in constraints.txt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fluid._imports import try_import

with try_import("scikit-learn", extra="sklearn") as imports:
    import numpy as np
    from sklearn.base import _fit_context
    from sklearn.metrics._scorer import _MultimetricScorer as MultimetricScorer
    from sklearn.model_selection._search import BaseSearchCV
    from sklearn.model_selection._validation import (
        _fit_and_score,
        _insert_error_scores,
        _score,
        _warn_or_raise_about_fit_failures,
    )
    from sklearn.utils._param_validation import Interval, StrOptions
    from sklearn.utils.metadata_routing import process_routing
    from sklearn.utils.metaestimators import _safe_split
    from sklearn.utils.validation import _check_method_params

__all__ = ["BaseSearchCV", "Interval", "MultimetricScorer", "StrOptions", "fit_context", "imports"]

Method = TypeVar("Method", bound=Callable[..., Any])


def fit_context(method: Method) -> Method:
    """Decorates the ``fit`` of a search: the arguments of the search are checked first."""
    decorated: Method = _fit_context(prefer_skip_nested_validation=False)(method)
    return decorated


def fit_and_score(estimator: Any, X: Any, y: Any, **options: Any) -> dict[str, Any]:
    """Fits an estimator on one split and scores it, as ``cross_validate`` does; sets its parameters first."""
    found: dict[str, Any] = _fit_and_score(
        estimator, X, y, return_n_test_samples=True, return_times=True, return_parameters=False, **options
    )
    return found


def score(estimator: Any, X: Any, y: Any, scorer: Any, params: Any, error_score: Any) -> Any:
    """Scores a fitted estimator: a number, or one for each name."""
    return _score(estimator, X, y, scorer, params, error_score)


def split(estimator: Any, X: Any, y: Any, indices: Any, train_indices: Any = None) -> tuple[Any, Any]:
    """Returns the rows of those indices; for kernel matrices, with the columns of the training rows."""
    part_x, part_y = _safe_split(estimator, X, y, indices, train_indices)
    return part_x, part_y


def method_params(X: Any, params: Any, indices: Any = None) -> dict[str, Any]:
    """Returns the parameters of a method call, those with a value for each row cut to the indices."""
    checked: dict[str, Any] = _check_method_params(X, params=params, indices=indices)
    return checked


def routed_to_steps(pipeline: Any, params: Any) -> dict[str, Any]:
    """Returns what metadata routing gives each step of a pipeline, by the step's name."""
    return dict(process_routing(pipeline, "fit", **params))


def complete_fits(fits: list[dict[str, Any]], scoring: Any, error_score: Any) -> None:
    """Warns of fits that failed, raises if all did, and gives them their scores where the names were not known."""
    _warn_or_raise_about_fit_failures(fits, error_score)
    if callable(scoring):
        _insert_error_scores(fits, error_score)


def scores_of_failure(scorer: Any, error_score: float) -> Any:
    """Returns the scores of a fit that failed."""
    if isinstance(scorer, MultimetricScorer):
        return dict.fromkeys(scorer._scorers, error_score)
    return error_score


def classes_in(y: Any) -> Any:
    """Returns what ``partial_fit`` takes as ``classes``: of several outputs, a list of those of each."""
    labels = np.asarray(y)
    if labels.ndim == 1 or labels.shape[1] == 1:
        return np.unique(labels)
    return [np.unique(column) for column in labels.T]
