"""Sampling by an Optuna study in memory: TPE, and spaces that are functions of an Optuna trial."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.search.conversion import TuneRange
from fluid.search.domains import Choice, Domain, FloatRange, IntRange
from fluid.search.space import ConditionalSpace, Space, field_of
from fluid.search.suggestion import OpenSuggestions, Suggestion

with try_import("Optuna", extra="optuna") as _optuna:
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import RandomSampler, TPESampler
    from optuna.trial import TrialState


class StudySampler:
    """Suggests what one of Optuna's samplers suggests.

    Args:
        space: the search space.
        algorithm: ``"random"`` or ``"tpe"``.
        modes: ``"min"`` or ``"max"`` for each metric.
        seed: seed of Optuna's sampler; None for other random numbers every time.
        points: values by name, of the first suggestions.

    Raises:
        InvalidFieldError: a hyperparameter is of a kind that Optuna does not have.
        MissingDependencyError: Optuna is not installed.
    """

    size: int | None = None

    def __init__(
        self,
        space: Space | ConditionalSpace,
        algorithm: str,
        *,
        modes: Sequence[str],
        seed: int | None,
        points: Sequence[Mapping[str, Any]],
    ) -> None:
        _optuna.check()
        self._space = space
        self._distributions: dict[str, Any] = {}
        if isinstance(space, Space):
            for name, domain in space.domains.items():
                self._distributions[name] = _to_optuna(field_of(space.paths[name]), domain)
        self._study = _make_study(algorithm, modes, seed)
        self._points = points
        self._open = OpenSuggestions(len(modes))
        #: Optuna's trial of each open suggestion.
        self._trials: dict[int, Any] = {}

    def ask(self) -> Suggestion:
        index = self._open.count
        point = dict(self._points[index]) if index < len(self._points) else {}
        trial, config = self._sample(self._space, point, f"points[{index}]")
        suggestion = self._open.add(config)
        self._trials[suggestion.token] = trial
        return suggestion

    def tell(self, token: int, values: float | Sequence[float] | None, *, failed: bool = False) -> None:
        found = self._open.close(token, values, failed=failed)
        trial = self._trials.pop(token)
        if found is None:
            self._study.tell(trial, state=TrialState.FAIL)
        else:
            self._study.tell(trial, list(found))

    def share(self) -> None:
        """Suggests other configs than a sampler of the same seed and points."""
        self._points = ()
        self._study.sampler.reseed_rng()

    def learn(self, config: Mapping[str, Any], values: Sequence[float]) -> None:
        """Takes what came of a config that another sampler has suggested; of a function's space, nothing.

        Args:
            config: the config, nested as the space.
            values: one for each metric.
        """
        if not isinstance(self._space, Space):
            return
        found = {}
        for name, domain in self._space.domains.items():
            value: Any = config
            for key in self._space.paths[name]:
                value = value[key]
            found[name] = _into_optuna(domain, value)
        trial = optuna.trial.create_trial(params=found, distributions=self._distributions, values=list(values))
        self._study.add_trial(trial)

    def _sample(self, space: Space | ConditionalSpace, point: dict[str, Any], field: str) -> tuple[Any, dict[str, Any]]:
        if isinstance(space, Space):
            fixed = {name: _into_optuna(space.domains[name], point[name]) for name in space.domains if name in point}
        else:
            fixed = point
        if fixed:
            self._study.enqueue_trial(fixed)
        trial = self._study.ask(self._distributions)
        try:
            if isinstance(space, Space):
                values = {name: _from_optuna(domain, trial.params[name]) for name, domain in space.domains.items()}
                return trial, space.config({**values, **point})
            config = space.config(trial)
            for name in point:
                if name not in trial.params:
                    raise InvalidFieldError(f"{field}[{name!r}]", point[name], "was not suggested by the space")
            return trial, config
        except BaseException:
            self._study.tell(trial, state=TrialState.FAIL)
            raise


def _make_study(algorithm: str, modes: Sequence[str], seed: int | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        sampler = TPESampler(seed=seed, constant_liar=True) if algorithm == "tpe" else RandomSampler(seed=seed)
    # Optuna announces every new study; this one is not the user's.
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(verbosity, optuna.logging.WARNING))
    try:
        return optuna.create_study(directions=[f"{mode}imize" for mode in modes], sampler=sampler)
    finally:
        optuna.logging.set_verbosity(verbosity)


def _to_optuna(field: str, domain: Domain) -> Any:
    """The distribution in which Optuna searches a domain."""
    values, log = _values(domain)
    if values is None:
        raise InvalidFieldError(field, domain, "is a normal distribution, which tpe cannot search; give it bounds")
    if isinstance(values, Choice):
        return CategoricalDistribution(range(values.size))
    if _is_by_index(values, log):
        assert values.size is not None
        return IntDistribution(0, values.size - 1)
    # Optuna has no steps on a logarithmic scale: what it suggests is rounded to them.
    kind = IntDistribution if isinstance(values, IntRange) else FloatDistribution
    return kind(values.low, values.high, log=log)


def _from_optuna(domain: Domain, value: Any) -> Any:
    """The value of a domain that Optuna's value stands for."""
    values, log = _values(domain)
    assert values is not None
    if _is_by_index(values, log):
        return values.at(value)
    if isinstance(values, FloatRange) and values.size is None:
        return min(value, values.greatest)
    return values.at(values.index(value))


def _into_optuna(domain: Domain, value: Any) -> Any:
    """The opposite of :func:`_from_optuna`."""
    values, log = _values(domain)
    return domain.index(value) if values is not None and _is_by_index(values, log) else value


def _values(domain: Domain) -> tuple[Choice | FloatRange | IntRange | None, bool]:
    """The values of a domain, None if it has no bounds, and whether their scale is logarithmic."""
    if isinstance(domain, TuneRange):
        return domain.values, domain.log
    assert isinstance(domain, Choice | FloatRange | IntRange)
    return domain, not isinstance(domain, Choice) and domain.log


def _is_by_index(values: Choice | FloatRange | IntRange, log: bool) -> bool:
    """Whether Optuna searches the index of the value.

    It warns of choices that its databases cannot hold, takes True and 1 for the same, and warns of an upper bound that
    its steps do not reach.
    """
    return values.size is not None and not log
