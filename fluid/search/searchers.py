"""Searchers: objects that ask a search library for configs and tell it what came of them.

A searcher brings its own search space, which a :class:`~fluid.search.samplers.Sampler` gets from :func:`fluid.run`.
:class:`AskTell` makes one of any pair of functions; adapters for libraries that say more are in ``fluid.integrations``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fluid.errors import InvalidFieldError, require_integer
from fluid.search.samplers import LearningSampler, Sampler
from fluid.search.suggestion import ELSEWHERE, Suggestion


class AskLater(Exception):
    """Raised by a searcher that suggests nothing until it is told a result of a suggestion that is open.

    Example:
        >>> from fluid.search import AskLater
        >>> class OneAtATime:
        ...     is_waiting = False
        ...     def ask(self):
        ...         if self.is_waiting:
        ...             raise AskLater
        ...         self.is_waiting = True
        ...         return {"x": 1}
        ...     def tell(self, config, value):
        ...         self.is_waiting = False
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchOutcome:
    """What came of a suggestion.

    Example:
        >>> from fluid.search import SearchOutcome
        >>> SearchOutcome(token=0, config={"lr": 0.1}, values=(0.25,), state="DONE", iteration=27).values
        (0.25,)

    Attributes:
        token: that of the suggestion.
        config: the config that was suggested.
        values: of each metric, the last number that the trial reported; ``None`` if the trial failed, is infeasible,
            has reported none, or reported NaN.
        state: ``"DONE"``, ``"STOPPED"`` (before its budget), ``"PAUSED"`` (at the budget that the suggestion named)
            ``"INFEASIBLE"`` (it raised :class:`fluid.Infeasible`) or ``"FAILED"``.
        iteration: iterations done.
        budget: iterations to which the trial was last allowed to run: those of the rung to which it came, or was on its
            way; 0 if that is not known.
        metrics: all that the last iteration reported.
        seconds: that the iterations took.
        failure: why the trial failed, or is infeasible: its kind, such as ``"out_of_memory"``, and its message;
            ``None`` otherwise.
    """

    token: int
    config: Mapping[str, Any]
    values: tuple[float, ...] | None
    state: str
    iteration: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    failure: tuple[str, str] | None = None
    budget: int = 0


class Searcher(Protocol):
    """Suggests configs, and is told what came of them. It is used by one thread: the one that called ``fluid.run``.

    One of a library that knows by itself what it optimizes may have a method ``mode_of(metric)``, too, which returns
    ``"min"``, ``"max"`` or ``None``: it counts where ``fluid.run`` is given no mode, and the metric's name says none.

    One that has a method ``observe(outcome)`` hears, besides, of each suggestion that has come to a rung of
    ``"asha"``, before it is decided whether it goes on: its state is ``"PAUSED"``, its values are those at the rung.

    Where several drivers work the sweep (``docs/cluster.md``), each asks a searcher of its own. One that has a
    method ``share()`` is told of all configs, those of the others with the token -1; it is called before the first
    config is asked for, but not in the driver that has begun the sweep.

    Example:
        >>> from fluid.search import AskTell, Searcher
        >>> configs = iter([{"x": 1}, {"x": 2}])
        >>> searcher: Searcher = AskTell(lambda: next(configs, None), lambda config, value: None)
        >>> searcher.begin(["loss"], ["min"])
        >>> searcher.ask().config
        {'x': 1}
    """

    @property
    def size(self) -> int | None:
        """How many suggestions there are in all; None if that is not known."""
        ...

    def begin(self, metrics: Sequence[str], modes: Sequence[str]) -> None:
        """Called once, before all others.

        Args:
            metrics: names of the metrics that are optimized.
            modes: ``"min"`` or ``"max"`` for each of them.

        Raises:
            InvalidFieldError: the library optimizes something else.
        """
        ...

    def ask(self) -> Suggestion | None:
        """The next config to try; None if there is none left. It may take its time: trials run on meanwhile.

        Raises:
            AskLater: there is none until a result was told.
        """
        ...

    def tell(self, outcome: SearchOutcome) -> None:
        """Tells what came of a suggestion, once for each."""
        ...


class SamplerSearcher:
    """A sampler as a searcher.

    Args:
        sampler: it knows its metrics' modes.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.size: int | None = sampler.size

    def begin(self, metrics: Sequence[str], modes: Sequence[str]) -> None:
        pass

    def ask(self) -> Suggestion | None:
        return self._sampler.ask()

    def share(self) -> None:
        """Suggests other configs than the searcher of the same seed that has begun the sweep."""
        if isinstance(self._sampler, LearningSampler):
            self._sampler.share()

    def observe(self, outcome: SearchOutcome) -> None:
        """Takes how a suggestion stands at a rung."""
        if isinstance(self._sampler, LearningSampler):
            self.tell(outcome)

    def tell(self, outcome: SearchOutcome) -> None:
        if isinstance(self._sampler, LearningSampler):
            self._sampler.hear(outcome.token, outcome.config, outcome.values, outcome.state, outcome.iteration)
        elif outcome.token != ELSEWHERE:
            self._sampler.tell(outcome.token, outcome.values, failed=outcome.values is None)


class AskTell:
    """A searcher made of a library's two functions: one that asks and one that tells.

    Example:
        >>> import fluid
        >>> from fluid.search import AskTell
        >>> class Halves:  # An optimizer of your own: it halves x for as long as that helps.
        ...     x, best = 8.0, float("inf")
        ...     def ask(self):
        ...         return None if self.best < 1 else {"x": self.x}
        ...     def tell(self, config, value):
        ...         if value < self.best:
        ...             self.x, self.best = config["x"] / 2, value
        >>> def train(config):
        ...     yield {"loss": config["x"] ** 2}
        >>> mine = Halves()
        >>> with fluid.FluidExecutor(backend="local", devices=1, verbose=0):
        ...     result = fluid.run(train, metric="loss", searcher=AskTell(mine.ask, mine.tell), max_concurrent=1)
        >>> result.best.config, result.best.value
        ({'x': 0.5}, 0.25)

    Args:
        ask: returns what to try next, ``None`` if there is nothing left; may raise :class:`AskLater`.
        tell: called as ``tell(asked, value)`` with what ``ask`` returned and the metric's value, or a list of one for
            each of several metrics.
        config: makes the config, a dict, of what ``ask`` returned; by default that is the config.
        minimizes: whether ``tell`` takes less as better, as most libraries do: the values of metrics with mode
            ``"max"`` are then negated. ``False`` to tell values as they were reported.
        tell_failed: called as ``tell_failed(asked)`` for a trial without a value: it failed, or reported NaN. By
            default ``tell`` gets the worst value so far, or nothing before the first value. It is called as well for a
            config that the end of the sweep kept from running, which by default is not told.
        size: how many configs ``ask`` returns in all; ``None``, the default, if that is not known.
    """

    def __init__(
        self,
        ask: Callable[[], Any],
        tell: Callable[[Any, Any], object],
        *,
        config: Callable[[Any], Mapping[str, Any]] | None = None,
        minimizes: bool = True,
        tell_failed: Callable[[Any], object] | None = None,
        size: int | None = None,
    ) -> None:
        for name, given in {"ask": ask, "tell": tell, "config": config, "tell_failed": tell_failed}.items():
            if not callable(given) and (given is not None or name in ("ask", "tell")):
                raise InvalidFieldError(name, given, "must be a function")
        self._ask = ask
        self._tell = tell
        self._config = config
        self._minimizes = minimizes
        self._tell_failed = tell_failed
        self.size = None if size is None else require_integer("size", size, at_least=1)
        self._signs: tuple[float, ...] = ()
        self._worst = WorstSoFar(())
        self._count = 0
        #: What was asked, of each open suggestion.
        self._open: dict[int, Any] = {}

    def begin(self, metrics: Sequence[str], modes: Sequence[str]) -> None:
        self._signs = tuple(-1.0 if mode == "max" and self._minimizes else 1.0 for mode in modes)
        self._worst = WorstSoFar([mode == "min" or self._minimizes for mode in modes])

    def ask(self) -> Suggestion | None:
        if (asked := self._ask()) is None:
            return None
        config = asked if self._config is None else self._config(asked)
        if not isinstance(config, Mapping) or not all(isinstance(name, str) for name in config):
            raise InvalidFieldError("searcher", config, "must suggest a dict of names and values; config= makes one")
        token, self._count = self._count, self._count + 1
        self._open[token] = asked
        return Suggestion(token, dict(config))

    def tell(self, outcome: SearchOutcome) -> None:
        asked = self._open.pop(outcome.token)
        values = None
        if outcome.values is not None:
            values = tuple(sign * value for sign, value in zip(self._signs, outcome.values, strict=True))
            self._worst.add(values)
        elif self._tell_failed is not None:
            self._tell_failed(asked)
            return
        elif outcome.iteration or outcome.state != "STOPPED":  # Else it never ran.
            values = self._worst.values
        if values is not None:
            self._tell(asked, values[0] if len(values) == 1 else list(values))


class WorstSoFar:
    """The worst value of each metric that is finite, for libraries without a word for failure.

    Example:
        >>> from fluid.search.searchers import WorstSoFar
        >>> worst = WorstSoFar([True])
        >>> worst.add((0.5,)), worst.add((0.1,)), worst.values
        (None, None, (0.5,))

    Args:
        less_is_better: for each metric.

    Attributes:
        values: the worst ones; ``None`` before the first.
    """

    def __init__(self, less_is_better: Sequence[bool]) -> None:
        self._worse = tuple(max if less else min for less in less_is_better)
        self.values: tuple[float, ...] | None = None

    def add(self, values: tuple[float, ...]) -> None:
        """Takes the values of a trial."""
        if all(map(math.isfinite, values)):
            known = self.values or values
            self.values = tuple(worse(*pair) for worse, *pair in zip(self._worse, known, values, strict=True))
