"""Sampling by an Optuna study in memory: TPE, and spaces that are functions of an Optuna trial."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.search.conversion import TuneRange
from fluid.search.domains import Choice, Domain, FloatRange, IntRange
from fluid.search.space import ConditionalSpace, Space, field_of
from fluid.search.suggestion import ELSEWHERE, OpenSuggestions, Suggestion
from fluid.user_values import text_of

with try_import("Optuna", extra="optuna") as _optuna:
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
    from optuna.exceptions import ExperimentalWarning
    from optuna.samplers import RandomSampler, TPESampler
    from optuna.trial import TrialState

#: So many trials must have come to a rung for TPE to learn from their values there.
_ENOUGH = 3
#: Optuna's study takes no news of a trial that it was told of: it is made anew once one in so many trials has some.
_STALE = 20


class StudySampler:
    """Suggests what one of Optuna's samplers suggests.

    Where trials are compared at rungs, most of them have no value of the whole budget, and values at unlike iterations
    say little about each other. What TPE learns from is therefore what trials came to at one rung, the highest that
    enough trials have come to, as in BOHB (Falkner et al., ICML 2018). Those that were stopped below count as worse
    than these, the lower the worse, and those that were found infeasible as the worst of all.

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
            for name in space.parents_first:
                self._distributions[name] = _to_optuna(field_of(space.paths[name]), space.domains[name])
        self._modes = modes
        self._learns = algorithm == "tpe"
        self._sampler = _make_sampler(algorithm, seed)
        self._points = points
        self._open = OpenSuggestions(len(modes))
        #: What there is to learn from, in the order of the suggestions: by token, and of other samplers by their text.
        self._known: dict[int | str, _Known] = {}
        #: The study that has it, but for the news.
        self._study: Any = None
        self._news: set[int | str] = set()
        #: The rung whose values it has.
        self._rung = 0

    def ask(self) -> Suggestion:
        index = self._open.count
        point = dict(self._points[index]) if index < len(self._points) else {}
        trial, config = self._sample(self._space, point, f"points[{index}]")
        suggestion = self._open.add(config)
        if self._learns:
            self._known[suggestion.token] = _Known(trial.params, trial.distributions, asked=trial)
        return suggestion

    def tell(self, token: int, values: float | Sequence[float] | None, *, failed: bool = False) -> None:
        found = self._open.close(token, values, failed=failed)
        if (known := self._known.get(token)) is not None:
            known.values, known.has_failed = found, found is None
            self._news.add(token)

    def hear(
        self, token: int, config: Mapping[str, Any], values: Sequence[float] | None, state: str, iteration: int
    ) -> None:
        key = text_of(config) if token == ELSEWHERE else token
        known = self._of_another(key, config) if token == ELSEWHERE else self._known.get(key)
        is_worst = state == "INFEASIBLE" or (state == "FAILED" and values is not None)
        if token != ELSEWHERE and state != "PAUSED":
            self._open.close(token, values, failed=is_worst)
        if known is None:
            return
        self._news.add(key)
        if is_worst:
            known.is_worst = True
        elif values is None:
            known.has_failed = state != "PAUSED"
        elif state == "PAUSED":
            known.at_rungs[iteration] = values[0]
        elif state != "STOPPED" or iteration not in known.at_rungs:
            known.values = tuple(values)

    def share(self) -> None:
        """Suggests other configs than a sampler of the same seed and points."""
        self._points = ()
        self._sampler.reseed_rng()

    def _of_another(self, key: int | str, config: Mapping[str, Any]) -> _Known | None:
        """What is known of a config that another sampler has suggested; of a function's space, ``None``."""
        if not isinstance(self._space, Space) or not self._learns:
            return None
        domains = self._space.domains
        found = {name: _into_optuna(domains[name], value) for name, value in self._space.values_in(config).items()}
        new = _Known(found, {name: self._distributions[name] for name in found})
        return self._known.setdefault(key, new)

    def _sample(self, space: Space | ConditionalSpace, point: dict[str, Any], field: str) -> tuple[Any, dict[str, Any]]:
        if isinstance(space, Space):
            fixed = {name: _into_optuna(space.domains[name], point[name]) for name in space.domains if name in point}
        else:
            fixed = point
        self._bring_up_to_date()
        if fixed:
            self._study.enqueue_trial(fixed)
        trial = self._study.ask()
        try:
            if isinstance(space, Space):
                return trial, space.config({**self._suggested(space, trial), **point})
            config = space.config(trial)
            for name in point:
                if name not in trial.params:
                    raise InvalidFieldError(f"{field}[{name!r}]", point[name], "was not suggested by the space")
            return trial, config
        except BaseException:
            self._study.tell(trial, state=TrialState.FAIL)
            raise

    def _suggested(self, space: Space, trial: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, distribution in self._distributions.items():
            if not space.is_idle(name, values):
                values[name] = _from_optuna(space.domains[name], _suggest(trial, name, distribution))
        return values

    def _bring_up_to_date(self) -> None:
        """Tells the study the news, or makes it anew."""
        everything = self._known.values()
        at_rung = Counter(iteration for known in everything for iteration in known.at_rungs)
        rung = max((one for one, number in at_rung.items() if number >= _ENOUGH), default=min(at_rung, default=0))
        if self._study is not None and rung == self._rung:
            self._news = {key for key in self._news if not self._known[key].tell(self._study, rung)}
            if len(self._news) <= len(everything) // _STALE:
                return
        self._study, self._rung = _make_study(self._modes, self._sampler), rung
        self._news.clear()
        for known in everything:
            known.asked = None
            if (trial := known.trial(rung)) is not None:
                self._study.add_trial(trial)


@dataclass(slots=True)
class _Known:
    """What is known of a suggestion.

    Attributes:
        params, distributions: of Optuna's trial.
        at_rungs: its values at the rungs that it has come to, by their iterations.
        values: what it came to in the end; ``None`` until then, and if it was stopped at a rung.
        has_failed: whether it failed, or came to no number, so that nothing is learnt from it.
        is_worst: whether it counts as the worst.
        asked: the study's trial, until the study is told of it; ``None`` if it has none that can be.
    """

    params: Mapping[str, Any]
    distributions: Mapping[str, Any]
    at_rungs: dict[int, float] = field(default_factory=dict)
    values: tuple[float, ...] | None = None
    has_failed: bool = False
    is_worst: bool = False
    asked: Any = None

    def tell(self, study: Any, rung: int) -> bool:
        """Tells a study what there is; returns whether the study knows all of it."""
        if self.asked is None:
            return False
        trial = self.trial(rung)
        if trial is None:
            study.tell(self.asked, state=TrialState.FAIL)
        elif trial.state == TrialState.RUNNING:
            return True
        elif trial.state == TrialState.PRUNED:
            for step, value in trial.intermediate_values.items():
                self.asked.report(value, step)
            study.tell(self.asked, state=TrialState.PRUNED)
        else:
            study.tell(self.asked, trial.values)
        self.asked = None
        return True

    def trial(self, rung: int) -> Any:
        """The trial that Optuna is to know, where it learns from values at a rung; ``None`` for none."""
        if self.has_failed:
            return None
        facts: dict[str, Any] = {"params": self.params, "distributions": self.distributions}
        last = max(self.at_rungs, default=0)
        if self.is_worst or (last and rung not in self.at_rungs and self.values is None):
            facts |= {"state": TrialState.PRUNED}
            facts |= {} if self.is_worst else {"intermediate_values": {last: self.at_rungs[last]}}
        elif rung in self.at_rungs:
            facts["values"] = [self.at_rungs[rung]]
        elif self.values is not None:
            facts["values"] = list(self.values)
        else:
            facts["state"] = TrialState.RUNNING  # It counts as bad until there is more.
        return optuna.trial.create_trial(**facts)


def _suggest(trial: Any, name: str, distribution: Any) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    kind = trial.suggest_int if isinstance(distribution, IntDistribution) else trial.suggest_float
    return kind(name, distribution.low, distribution.high, log=distribution.log)


def _make_sampler(algorithm: str, seed: int | None) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, constant_liar=True) if algorithm == "tpe" else RandomSampler(seed=seed)


def _make_study(modes: Sequence[str], sampler: Any) -> Any:
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
