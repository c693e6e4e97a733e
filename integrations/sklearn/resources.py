"""The resource of a search that stops candidates early: what an iteration of a candidate adds, and how it trains.

An iteration is one ``partial_fit`` over the training data; or a fit with more of a parameter, such as ``n_estimators``,
or of the samples, as much more as the next rung has. Such a fit is scored at rungs only, as scores of a forest cost
as much as its trees are many.
"""

from __future__ import annotations

import inspect
import numbers
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.base import clone
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
        seed: of the order in which samples are added.
    """

    resource: str
    shares: tuple[float, ...]
    rungs: tuple[int, ...]
    epochs: int
    seed: int


def last_step(estimator: Any) -> Any:
    """Returns the estimator that trains step by step: that at the end of a pipeline."""
    return estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator


def resource_of(estimator: Any, resource: Any) -> str:
    """Returns the resource that ``"auto"`` stands for, or the one that was given.

    Raises:
        InvalidFieldError: the estimator does not have it.
    """
    last = last_step(estimator)
    parameters = last.get_params(deep=False) if hasattr(last, "get_params") else {}
    if resource == "auto":
        if hasattr(last, "partial_fit"):
            return PARTIAL_FIT
        warm = [name for name in _PARAMETERS if name in parameters and "warm_start" in parameters]
        return warm[0] if warm else SAMPLES
    kind = type(last).__name__
    if resource == PARTIAL_FIT and not hasattr(last, "partial_fit"):
        raise InvalidFieldError("resource", resource, f"{kind} has no partial_fit")
    if resource not in (PARTIAL_FIT, SAMPLES) and not {resource, "warm_start"} <= set(parameters):
        raise InvalidFieldError("resource", resource, f"{kind} has no such parameter that a warm start could raise")
    return str(resource)


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
            self._fit_on(share, *read())
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
            warnings.simplefilter("ignore", ConvergenceWarning)  # It may be trained further.
            _call(last.fit, X, y, params)
        self.amount = amount

    def _fit_on(self, share: float, X: Any, y: Any, params: dict[str, Any]) -> None:
        rows = _rows(X)
        self.amount = max(1, round(share * rows))
        chosen = np.sort(np.random.default_rng(self._ladder.seed).permutation(rows)[: self.amount])
        self.estimator = clone(self.estimator)
        part_x, part_y = private_api.split(self.estimator, X, y, chosen)
        _call(self.estimator.fit, part_x, part_y, private_api.method_params(X, params, chosen))


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
