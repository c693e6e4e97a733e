"""Ax on Fluid: Ax's Client suggests configs, and is told what trials came to.

:class:`AxSearcher` is a :class:`~fluid.search.searchers.Searcher`, for the argument ``searcher`` of :func:`fluid.run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.keeping import value_of
from fluid.search import AskLater, SearchOutcome, Suggestion

with try_import("Ax", extra="ax") as _ax:
    from ax.exceptions.core import DataRequiredError, OptimizationComplete
    from ax.exceptions.generation_strategy import MaxParallelismReachedException


class AxSearcher:
    """Suggests what an Ax ``Client`` suggests.

    A trial that has run to its budget is completed, one that ASHA has stopped is marked as early stopped, with its last
    values and its iteration as the progression, and one that failed is marked as failed. If Ax lets no more trials be
    under way at once, the sweep waits for a result. A config that the end of the sweep kept from running is abandoned.

    Example:
        >>> import fluid
        >>> from ax.api.client import Client
        >>> from ax.api.configs import RangeParameterConfig
        >>> from fluid.integrations.ax import AxSearcher
        >>> client = Client(random_seed=0)
        >>> client.configure_experiment([RangeParameterConfig(name="x", parameter_type="float", bounds=(0, 1))])
        >>> client.configure_generation_strategy(method="random_search")
        >>> def train(config):
        ...     for step in range(1, 10):
        ...         yield {"loss": config["x"] + 1 / step}
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, metric="loss", searcher=AxSearcher(client), samples=3, budget=9)
        >>> len(result.trials), len(client.summarize())
        (3, 3)

    Args:
        client: its experiment is configured. If its objective is not, it becomes that of ``fluid.run``.

    Raises:
        MissingDependencyError: Ax is not installed.
    """

    size: int | None = None

    def __init__(self, client: Any) -> None:
        _ax.check()
        if not callable(getattr(client, "get_next_trials", None)):
            raise InvalidFieldError("client", client, "must be an ax.api.client.Client")
        self._client = client
        self._metrics: tuple[str, ...] = ()
        #: All metrics that Ax is to be told, those of outcome constraints too.
        self._told: tuple[str, ...] = ()

    def begin(self, metrics: Sequence[str], modes: Sequence[str]) -> None:
        wanted = dict(zip(metrics, modes, strict=True))
        if _optimization(self._client) is None:
            for metric in metrics:
                if not metric.isidentifier():
                    raise InvalidFieldError(
                        "metric", metric, "cannot be in an objective of Ax: use letters, digits and _"
                    )
            objective = ", ".join(f"-{metric}" if mode == "min" else metric for metric, mode in wanted.items())
            self._client.configure_optimization(objective=objective)
        config = _optimization(self._client)
        configured = {name: "min" if weight < 0 else "max" for name, weight in config.objective.metric_weights}
        if configured != wanted:
            both = f"metric={list(configured)} and mode={list(configured.values())}"
            raise InvalidFieldError("mode", list(modes), f"is not what the client optimizes: {both}")
        self._metrics = tuple(metrics)
        self._told = tuple(sorted(config.metric_names))

    def mode_of(self, metric: str) -> str | None:
        """``"min"`` or ``"max"`` of a metric that the client optimizes; else ``None``."""
        config = _optimization(self._client)
        weight = None if config is None else dict(config.objective.metric_weights).get(metric)
        return None if weight is None else "min" if weight < 0 else "max"

    def ask(self) -> Suggestion | None:
        try:
            found = self._client.get_next_trials(max_trials=1)
        except (DataRequiredError, MaxParallelismReachedException) as error:
            raise AskLater(str(error)) from error
        except OptimizationComplete:
            return None
        if not found:
            raise AskLater("Ax lets no more trials be under way")
        ((index, config),) = found.items()
        return Suggestion(index, dict(config))

    def tell(self, outcome: SearchOutcome) -> None:
        client, index = self._client, outcome.token
        if outcome.values is not None:
            data = self._data(outcome.values, outcome.metrics)
            if outcome.state == "STOPPED":
                client.attach_data(index, data, progression=outcome.iteration)
                client.mark_trial_early_stopped(index)
            else:
                client.complete_trial(index, data, progression=outcome.iteration)
        elif outcome.state == "STOPPED" and not outcome.iteration:
            client.mark_trial_abandoned(index)
        else:
            reason = "it has reported no number" if outcome.failure is None else outcome.failure[1]
            client.mark_trial_failed(index, failed_reason=reason)

    def _data(self, values: tuple[float, ...], metrics: Mapping[str, Any]) -> dict[str, float]:
        data = dict(zip(self._metrics, values, strict=True))
        for name in self._told:
            if name not in data and (value := value_of(metrics, name)) is not None:
                data[name] = float(value)
        return data


def _optimization(client: Any) -> Any:
    """What the client optimizes; None if that is not configured. It has no public word for this."""
    return client._experiment.optimization_config
