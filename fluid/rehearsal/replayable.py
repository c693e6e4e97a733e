"""What can be replayed: the protocol of one method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from fluid.measure.runtime_model import FusedRates


class ReplayedIteration(NamedTuple):
    """One iteration of a trial that is replayed.

    Example:
        >>> from fluid.rehearsal import ReplayedIteration
        >>> one = ReplayedIteration({"loss": 0.5}, seconds=60.0)
        >>> one.metrics["loss"], one.memory_bytes, one.spread
        (0.5, None, 0.0)

    Attributes:
        metrics: what the trial reports.
        seconds: how long the iteration takes alone on one device of speed 1.
        memory_bytes: peak device memory; ``None`` if unknown.
        spread: half the width of the range in which the first metric of the sweep lies with 80 %, where it is a guess;
            0 where it was measured.
    """

    metrics: Mapping[str, Any]
    seconds: float
    memory_bytes: float | None = None
    spread: float = 0.0


class ReplayedFusion(NamedTuple):
    """With which trials a trial that is replayed can train in one step, and how long such a step takes.

    Example:
        >>> from fluid.rehearsal import FusedRates, ReplayedFusion
        >>> wide = ReplayedFusion("width 64", FusedRates((1, 2, 4), (1.0, 1.1, 1.3)))
        >>> wide.rates.stretch(4)
        1.3

    Attributes:
        key: equal for trials that can.
        rates: seconds of a step of so many trials, over those of one alone.
    """

    key: str
    rates: FusedRates


@runtime_checkable
class Replayable(Protocol):
    """Tells what a trial does without running it.

    A trainable that has this method, a class or an object, is replayed by ``FluidExecutor(backend="simulated")``. A
    function is given it as an attribute: ``train.replay = ...``.

    What else a rehearsal needs to know, it takes from the trainable: ``fluid_elastic`` says whether its trials can span
    several devices, and ``fluid_fusible`` whether they may train in one step with others. A trainable that has
    ``replay`` and nothing to run, and does not say whether it is elastic, is widened if the user gives ``max_width=``.
    A further method ``fusion(config)``, of the trainable or of the source in its place, returns the
    :class:`ReplayedFusion` of a trial, or ``None``; without it trials are not fused: it is not known what that takes.

    Example:
        >>> import fluid
        >>> from fluid.rehearsal import ReplayedIteration
        >>> class Model:
        ...     @staticmethod
        ...     def replay(config, iterations):
        ...         return [ReplayedIteration({"loss": config["lr"] / i}, seconds=60.0) for i in iterations]
        >>> trials = [fluid.Trial(Model, {"lr": lr}, budget=10) for lr in (0.1, 0.2, 0.3)]
        >>> with fluid.FluidExecutor(backend="simulated", devices=3, max_width=1, verbose=0) as executor:
        ...     handle = executor.submit_trialgroup(fluid.TrialGroup(trials))
        ...     ended = handle.wait()
        >>> handle.makespan
        600.0
    """

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        """Returns what a trial of a config does in some iterations, in order.

        Args:
            config: the trial's.
            iterations: consecutive numbers, the first iteration of a trial being 1. Each is asked for once, unless the
                trial has to repeat it; all that a trial is given to do is asked for in one call.

        Returns:
            One for each iteration; fewer if the trial is done by itself with the last of them.
        """
        ...
