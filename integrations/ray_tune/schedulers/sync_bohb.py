"""BOHB with synchronous stages, as a scheduler of Ray Tune."""

from __future__ import annotations

import math
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.result import TRAINING_ITERATION
from ray.tune.schedulers import TrialScheduler
from ray.tune.utils.util import flatten_dict

from fluid.errors import require_integer
from fluid.integrations.ray_tune.schedulers.successive_halving import (
    ROUNDING,
    HalvingSchedule,
    SuccessiveHalvingScheduler,
)


class SyncBOHB(SuccessiveHalvingScheduler):
    """BOHB with synchronous stages: give ``search_alg=TuneBOHB(...)`` with it.

    Brackets of Hyperband run one after another, the largest first. The model receives the results of a stage when it is
    complete, in the order in which trials were made. So the configurations of a bracket follow from all results of the
    brackets before it and do not depend on which trial was faster. With any other searcher this is synchronous
    Hyperband. Sizes and rungs are HpBandSter's.

    Args:
        metric: by which trials are compared; ``None`` for that of the sweep.
        mode: ``"max"`` or ``"min"``; ``None`` for that of the sweep.
        time_attr: what ``max_t`` and ``grace_period`` are counted in: an entry of the results that never decreases.
        max_t: where trials end; the largest budget.
        grace_period: no rung is below it; the smallest budget.
        reduction_factor: of trials from rung to rung, and of time; often called eta.
        brackets_at_once: how many brackets may be under way at a time.

    Raises:
        InvalidFieldError: an argument cannot be used.

    Example:
        >>> from fluid import tune
        >>> scheduler = tune.SyncBOHB("loss", "min", max_t=9)
        >>> scheduler.configurations()  # Of one bracket of each size: 9, 3 and 3 trials.
        15
    """

    # The controller does not tell searchers of a trial's last result, so trials wait there until the model has it.
    _at_the_end = TrialScheduler.PAUSE

    def __init__(
        self,
        metric: str | None = None,
        mode: str | None = None,
        *,
        time_attr: str = TRAINING_ITERATION,
        max_t: float = 81,
        grace_period: float = 1,
        reduction_factor: float = 3,
        brackets_at_once: int = 1,
    ) -> None:
        super().__init__(
            metric,
            mode,
            time_attr=time_attr,
            max_t=max_t,
            grace_period=grace_period,
            reduction_factor=reduction_factor,
        )
        self._brackets_at_once = require_integer("brackets_at_once", brackets_at_once, at_least=1)
        self._halvings = math.floor(math.log(self._max_t / self._grace_period, self._factor) + ROUNDING)

    def configurations(self, brackets: int | None = None) -> int:
        """Returns how many configurations a number of brackets take: what ``num_samples`` should be.

        Args:
            brackets: ``None`` for one of each size.

        Example:
            >>> SyncBOHB("loss", "min", max_t=81).configurations(brackets=2)
            108
        """
        if brackets is None:
            brackets = self._halvings + 1
        require_integer("brackets", brackets, at_least=1)
        return sum(self._schedule(number).size or 0 for number in range(brackets))

    def _schedule(self, number: int) -> HalvingSchedule:
        halvings = self._halvings - number % (self._halvings + 1)
        size = (self._halvings + 1) // (halvings + 1) * self._factor**halvings
        rungs = tuple(self._max_t / self._factor**left for left in range(halvings, -1, -1))
        return HalvingSchedule(rungs, math.floor(size + ROUNDING))

    def _on_action(self, controller: Any, trial: Trial, result: dict[str, Any], action: str) -> None:
        result["hyperband_info"] = {}  # TuneBOHB warns without this entry, and learns from it if it holds a budget.
        if action == TrialScheduler.PAUSE:
            self._tell_searcher(controller, "on_pause", trial)

    def _before_halving(self, controller: Any, trials: list[Trial], rung: float) -> None:
        for trial in trials:
            result = {**flatten_dict(trial.last_result), "hyperband_info": {"budget": rung}}
            self._tell_searcher(controller, "on_trial_result", trial, result)

    def _start(self, controller: Any, trial: Trial) -> None:
        super()._start(controller, trial)
        self._tell_searcher(controller, "on_unpause", trial)

    def _tell_searcher(self, controller: Any, method: str, trial: Trial, *arguments: Any) -> None:
        searcher: Any = getattr(controller.search_alg, "searcher", None)
        while hasattr(searcher, "searcher"):
            searcher = searcher.searcher
        if hasattr(searcher, "on_pause"):  # TuneBOHB, or a searcher with its interface.
            getattr(searcher, method)(trial.trial_id, *arguments)
