"""SMAC on Fluid: a facade suggests configs, seeds and budgets, and is told costs.

:class:`SMACSearcher` is a :class:`~fluid.search.searchers.Searcher`, the argument ``searcher`` of :func:`fluid.run`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.search import SearchOutcome, Suggestion
from fluid.search.searchers import WorstSoFar

with try_import("SMAC", extra="smac") as _smac:
    from smac.main.exceptions import ConfigurationSpaceExhaustedException
    from smac.runhistory import StatusType, TrialInfo, TrialValue


class SMACSearcher:
    """Suggests what a SMAC facade suggests.

    A facade with budgets (multi-fidelity) says how far each trial runs: call ``fluid.run`` with ``algorithm="full"``
    and the scenario's ``max_budget`` as ``budget``. A config that it promotes continues from its state.

    SMAC minimizes: values of metrics with mode ``"max"`` are negated. A trial that failed gets the scenario's
    ``crash_cost``, or, if that is infinite, which SMAC's model does not take, the worst cost so far.

    Example:
        >>> import tempfile, fluid
        >>> from ConfigSpace import ConfigurationSpace
        >>> from smac import HyperparameterOptimizationFacade, Scenario
        >>> from fluid.integrations.smac import SMACSearcher
        >>> space = ConfigurationSpace({"x": (0.0, 1.0)}, seed=0)
        >>> scenario = Scenario(space, deterministic=True, n_trials=3, output_directory=tempfile.mkdtemp())
        >>> facade = HyperparameterOptimizationFacade(scenario, logging_level=False)
        >>> def train(config):
        ...     for step in range(1, 10):
        ...         yield {"loss": config["x"] + 1 / step}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, metric="loss", searcher=SMACSearcher(facade), budget=9)
        >>> len(result.trials), facade.runhistory.finished
        (3, 3)

    Args:
        facade: made without a target function. If its scenario is not deterministic, each config has SMAC's ``seed``;
            if it has instances, each has an ``instance``.

    Raises:
        InvalidFieldError: it is no facade, or its space has a hyperparameter called ``seed`` or ``instance``.
        MissingDependencyError: SMAC is not installed.
    """

    def __init__(self, facade: Any) -> None:
        _smac.check()
        if not callable(getattr(facade, "ask", None)) or not hasattr(facade, "runhistory"):
            raise InvalidFieldError("facade", facade, "must be a facade of SMAC")
        self._facade = facade
        scenario = facade.scenario
        #: The names under which configs have fields of SMAC's trials.
        self._besides = [
            *([] if scenario.deterministic else ["seed"]),
            *([] if scenario.instances is None else ["instance"]),
        ]
        for name in self._besides:
            if name in scenario.configspace:
                raise InvalidFieldError("facade", name, "is SMAC's own: give the hyperparameter another name")
        #: The scenario's number of trials, less those of an earlier run that SMAC has loaded.
        self.size: int | None = max(0, scenario.n_trials - facade.runhistory.submitted)
        self._signs: tuple[float, ...] = ()
        self._worst = WorstSoFar(())
        self._count = 0
        self._open: dict[int, TrialInfo] = {}
        #: The newest suggestion of each config, seed and instance.
        self._newest: dict[tuple[Any, ...], int] = {}
        #: Failures that have no cost yet, as no trial has one.
        self._held: list[tuple[TrialInfo, SearchOutcome]] = []

    def begin(self, metrics: Sequence[str], modes: Sequence[str]) -> None:
        objectives = self._facade.scenario.count_objectives()
        if objectives != len(metrics):
            raise InvalidFieldError("metric", list(metrics), f"must be as many as SMAC's {objectives} objectives")
        self._signs = tuple(1.0 if mode == "min" else -1.0 for mode in modes)
        self._worst = WorstSoFar([True for _ in modes])

    def ask(self) -> Suggestion | None:
        if self._count == self.size:
            return None
        try:
            info = self._facade.ask()
        except (StopIteration, ConfigurationSpaceExhaustedException):
            return None
        token, self._count = self._count, self._count + 1
        self._open[token] = info
        key = (self._facade.runhistory.get_config_id(info.config), info.seed, info.instance)
        continues, self._newest[key] = self._newest.get(key), token
        config = {name: _plain(value) for name, value in dict(info.config).items()}
        config.update({name: getattr(info, name) for name in self._besides})
        if info.budget is None:
            return Suggestion(token, config)
        return Suggestion(token, config, budget=round(info.budget), continues=continues)

    def tell(self, outcome: SearchOutcome) -> None:
        info = self._open.pop(outcome.token)
        if outcome.values is not None:
            costs = tuple(sign * value for sign, value in zip(self._signs, outcome.values, strict=True))
            self._worst.add(costs)
            self._tell(info, outcome, costs)
            held, self._held = self._held, []
            for one in held:
                self._tell_failed(*one)
        elif outcome.iteration or outcome.state != "STOPPED":  # Else it never ran: to SMAC it still does.
            self._tell_failed(info, outcome)

    def _tell_failed(self, info: TrialInfo, outcome: SearchOutcome) -> None:
        crash_cost = self._facade.scenario.crash_cost
        costs = tuple(crash_cost) if isinstance(crash_cost, list) else (crash_cost,) * len(self._signs)
        if not all(map(math.isfinite, costs)):
            if self._worst.values is None:
                self._held.append((info, outcome))
                return
            costs = self._worst.values
        self._tell(info, outcome, costs)

    def _tell(self, info: TrialInfo, outcome: SearchOutcome, costs: tuple[float, ...]) -> None:
        status = StatusType.SUCCESS
        if outcome.values is None:
            kind = "" if outcome.failure is None else outcome.failure[0]
            status = _STATUS.get(kind, StatusType.CRASHED)
        cost = costs[0] if len(costs) == 1 else list(costs)
        self._facade.tell(info, TrialValue(cost=cost, time=outcome.seconds, status=status))


_STATUS: Mapping[str, Any] = {}
if _smac.available:
    _STATUS = {"out_of_memory": StatusType.MEMORYOUT, "timeout": StatusType.TIMEOUT}


def _plain(value: Any) -> Any:
    """A value without NumPy's type."""
    return value.item() if hasattr(value, "item") else value
