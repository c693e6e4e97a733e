"""The resource of a search that stops candidates early: what an iteration of a candidate adds, and how it trains.

An iteration is one ``partial_fit`` over the training data; or a fit with more of a parameter, such as ``n_estimators``,
or of the samples, as much more as the next rung has. Such a fit is scored at rungs only, as scores of a forest cost
as much as its trees are many.
"""

from __future__ import annotations

import contextlib
import inspect
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.base import clone, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.pipeline import Pipeline

from fluid.errors import InvalidFieldError
from fluid.integrations.sklearn import private_api
from fluid.search.rungs import rungs_of

PARTIAL_FIT, SAMPLES = "partial_fit", "n_samples"
#: Parameters that a warm start may raise, the first one that the estimator has.
_PARAMETERS = ("n_estimators", "max_iter")
#: Estimators whose ``max_iter`` counts all iterations, not those of the present fit alone.
_TOTAL_ITERATIONS = ("HistGradientBoostingClassifier", "HistGradientBoostingRegressor")
#: Training data, their targets, and the parameters of ``fit``.
_Data = tuple[Any, Any, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """How far candidates train, step by step.

    Attributes:
        resource: ``"partial_fit"``, ``"n_samples"``, or the parameter of the (last) estimator that a warm start raises.
        shares: of the whole resource after each iteration; the last one is 1.
        rungs: iterations at which candidates are compared; the last one is ``len(shares)``.
        epochs: passes over the data in all, with ``partial_fit``.
        seed: of the order in which samples are added; see :func:`sample_order`.
    """

    resource: str
    shares: tuple[float, ...]
    rungs: tuple[int, ...]
    epochs: int
    seed: int


def last_step(estimator: Any) -> Any:
    """Returns the estimator that trains step by step: that at the end of a pipeline."""
    return estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator


def estimators_of(template: Any, candidates: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Returns the estimators that candidates make of one: it, or others where they replace it or steps of it."""
    found: dict[Any, Any] = {}
    for params in candidates:
        replaced = {name: value for name, value in params.items() if hasattr(value, "fit")}
        key = tuple((name, id(value)) for name, value in replaced.items())
        if key not in found:
            with contextlib.suppress(Exception):  # The fits of this candidate fail, and say so.
                found[key] = clone(template).set_params(**replaced)
    return list(found.values()) or [template]


def resource_of(estimators: Sequence[Any], resource: Any) -> str:
    """Returns the resource that ``"auto"`` stands for, or the one that was given.

    Args:
        estimators: of the candidates; all get the same resource.
        resource: as given.

    Raises:
        InvalidFieldError: one of the estimators does not have it.
    """
    last_steps = [last_step(estimator) for estimator in estimators]
    if resource == "auto":
        return next(
            (name for name in (PARTIAL_FIT, *_PARAMETERS) if all(_has(step, name) for step in last_steps)), SAMPLES
        )
    for step in last_steps:
        if resource != SAMPLES and not _has(step, resource):
            lacks = "no partial_fit" if resource == PARTIAL_FIT else "no such parameter that a warm start could raise"
            raise InvalidFieldError("resource", resource, f"{type(step).__name__} has {lacks}")
    return str(resource)


def _has(estimator: Any, resource: str) -> bool:
    if resource == PARTIAL_FIT:
        return hasattr(estimator, "partial_fit")
    parameters = estimator.get_params(deep=False) if hasattr(estimator, "get_params") else {}
    return {resource, "warm_start"} <= set(parameters)


def make_ladder(resource: str, *, budget: int, eta: int, min_budget: int, least_share: float, seed: int) -> Ladder:
    """Returns the steps of a resource.

    Args:
        resource: what :func:`resource_of` returned.
        budget: parts into which the whole resource is divided.
        eta: one in so many candidates continues at each rung.
        min_budget: parts at the first rung, at least.
        least_share: of the samples that a candidate can be fitted on.
        seed: of the order in which samples are added.
    """
    if resource == SAMPLES:
        min_budget = max(min_budget, min(budget, int(np.ceil(budget * least_share))))
    rungs = rungs_of(budget, eta, min_budget)
    if resource == PARTIAL_FIT:
        shares = tuple(part / budget for part in range(1, budget + 1))
    else:
        shares, rungs = tuple(part / budget for part in rungs), tuple(range(1, len(rungs) + 1))
    return Ladder(resource=resource, shares=shares, rungs=rungs, epochs=budget, seed=seed)


class SteppedFit:
    """Fits one estimator step by step on one training set. Pickled without the data.

    Args:
        estimator: with its parameters set; is changed.
        ladder: the steps.
        classes: of all data, for ``partial_fit``.

    Attributes:
        estimator: as far as it is fitted.
        amount: of the resource that was used so far: passes over the data, the parameter's value, or samples.
    """

    def __init__(self, estimator: Any, ladder: Ladder, classes: Any = None) -> None:
        self.estimator = estimator
        self.amount = 0
        self._ladder = ladder
        self._classes = classes
        #: What the last step of a pipeline is fitted on; kept, as other steps may take long to make it.
        self._prepared: _Data | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_prepared": None}

    def advance(self, iteration: int, read: Callable[[], _Data]) -> None:
        """Trains one iteration.

        Args:
            iteration: its number, from 0.
            read: gives the training data, their targets, and the parameters of ``fit``.
        """
        ladder, share = self._ladder, self._ladder.shares[iteration]
        if ladder.resource == SAMPLES:
            self._fit_on_samples(ladder.shares[iteration:], *read())
            return
        data = self._prepared or self._prepare(read())
        if ladder.resource == PARTIAL_FIT:
            self._pass(*data)
        else:
            self._raise_parameter(ladder.resource, share, *data)

    def _prepare(self, data: _Data) -> _Data:
        if not isinstance(self.estimator, Pipeline):
            return data
        self._prepared = _through_head(self.estimator, *data, is_fitted=self.amount > 0)
        return self._prepared

    def _pass(self, X: Any, y: Any, params: dict[str, Any]) -> None:
        last = last_step(self.estimator)
        if y is not None and "classes" in inspect.signature(last.partial_fit).parameters:
            params = {**params, "classes": self._classes}
        _call(last.partial_fit, X, y, params)
        self.amount += 1

    def _raise_parameter(self, name: str, share: float, X: Any, y: Any, params: dict[str, Any]) -> None:
        last = last_step(self.estimator)
        if self.amount == 0:
            self._whole = last.get_params()[name]
            if isinstance(self._whole, bool) or not isinstance(self._whole, numbers.Integral):
                raise InvalidFieldError(name, self._whole, "must be a whole number to be the resource")
        amount = max(1, round(share * int(self._whole)))
        if amount <= self.amount:
            return
        adds = name == "max_iter" and type(last).__name__ not in _TOTAL_ITERATIONS
        last.set_params(**{name: amount - self.amount if adds else amount, "warm_start": True})
        with warnings.catch_warnings():
            if share < 1:  # It may be trained further.
                warnings.simplefilter("ignore", ConvergenceWarning)
            _call(last.fit, X, y, params)
        self.amount = amount

    def _fit_on_samples(self, shares: Sequence[float], X: Any, y: Any, params: dict[str, Any]) -> None:
        """Fits on the first share of the samples, or on the next one that the estimator can be fitted on."""
        rows = _rows(X)
        order, least = sample_order(y if is_classifier(self.estimator) else None, rows, self._ladder.seed)
        for share in shares:
            amount = max(least, round(share * rows))
            if amount <= self.amount:  # It was needed for an earlier share.
                return
            chosen = np.sort(order[:amount])
            estimator = clone(self.estimator)
            part_x, part_y = private_api.split(estimator, X, y, chosen)
            try:
                _call(estimator.fit, part_x, part_y, private_api.method_params(X, params, chosen))
            except Exception:
                if share == shares[-1]:
                    raise
            else:
                self.estimator, self.amount = estimator, amount
                return


def sample_order(labels: Any, rows: int, seed: int) -> tuple[Any, int]:
    """Returns the order in which samples are added, and how many of them are the fewest to fit on.

    Args:
        labels: of the samples, one or several each: the fewest have each label, and further ones come in proportion to
            the rows of labels; ``None`` for a random order.
        rows: number of samples.
        seed: of the order.
    """
    order = np.random.default_rng(seed).permutation(rows)
    if labels is None:
        return order, 1
    table = np.asarray(labels.toarray() if hasattr(labels, "toarray") else labels).reshape(rows, -1)[order]
    if table.dtype == object:
        table = table.astype(str)
    codes = [np.unique(column, return_inverse=True)[1] for column in table.T]
    first = np.unique(np.concatenate([np.unique(column, return_index=True)[1] for column in codes]))
    _, kinds, sizes = np.unique(np.stack(codes, axis=1), axis=0, return_inverse=True, return_counts=True)
    by_kind = np.argsort(kinds.ravel(), kind="stable")
    places = np.empty(rows)
    places[by_kind] = np.concatenate([(np.arange(size) + 0.5) / size for size in sizes])
    places[first] = -1.0
    return order[np.argsort(places, kind="stable")], len(first)


def fit_on_all(estimator: Any, X: Any, y: Any, params: dict[str, Any], ladder: Ladder | None, iterations: int) -> Any:
    """Fits an estimator on all data, as far as its candidate was trained; returns it.

    Args:
        estimator: with its parameters set; is changed.
        X: data.
        y: targets; ``None`` if there are none.
        params: of ``fit``.
        ladder: the steps of the candidate; ``None`` if it was fitted at once.
        iterations: that the candidate trained.
    """
    if ladder is None or (ladder.resource != PARTIAL_FIT and iterations == len(ladder.shares)):
        _call(estimator.fit, X, y, params)
        return estimator
    fit = SteppedFit(estimator, ladder, None if y is None else private_api.classes_in(y))
    for iteration in range(iterations):
        fit.advance(iteration, lambda: (X, y, params))
    return fit.estimator


def _call(method: Any, X: Any, y: Any, params: dict[str, Any]) -> None:
    if y is None:
        method(X, **params)
    else:
        method(X, y, **params)


def _rows(X: Any) -> int:
    return int(X.shape[0]) if hasattr(X, "shape") else len(X)


def _through_head(pipeline: Any, X: Any, y: Any, params: dict[str, Any], *, is_fitted: bool) -> _Data:
    """Passes data through all steps of a pipeline but the last, which are fitted first if they are not."""
    of_head, of_last = _params_of_steps(pipeline, params)
    if len(pipeline.steps) == 1:
        return X, y, of_last
    head = pipeline[:-1]
    if is_fitted:
        return head.transform(X), y, of_last
    inputs = head.fit_transform(X, y, **of_head)
    pipeline.steps[:-1] = head.steps
    return inputs, y, of_last


def _params_of_steps(pipeline: Any, params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides the parameters of a pipeline's ``fit`` into those of its head, and those of its last step."""
    last = pipeline.steps[-1][0]
    if not get_config()["enable_metadata_routing"]:
        mine = {name: value for name, value in params.items() if name.partition("__")[0] == last}
        others = {name: value for name, value in params.items() if name not in mine}
        return others, {name.partition("__")[2]: value for name, value in mine.items()}
    routed = private_api.routed_to_steps(pipeline, params)
    for step, methods in routed.items():
        if step != last and any(methods.values()):
            reason = f"cannot be trained step by step, as its step {step!r} takes metadata: pass resource=None"
            raise InvalidFieldError("estimator", pipeline, reason)
    return {}, dict(routed[last]["fit"])
