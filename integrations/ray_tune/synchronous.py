"""Successive Halving and BOHB in lock-step, as schedulers of Ray Tune.

Trials come in cohorts. At each rung every trial of the cohort waits, paused, until all are there or have ended; then
the best go on in one step and the others are stopped. Tune's ``HyperBandScheduler`` decides over whole brackets too,
but fills and runs several at once; here one cohort after another has the devices for itself, and a searcher that
learns knows all about it before it is asked for the next.

The schedulers need no more than Tune lets a scheduler do, so they run with Fluid and without.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.result import DEFAULT_METRIC, TRAINING_ITERATION
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.utils.util import flatten_dict

from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.integrations.ray_tune.private_api import controller_of
from fluid.integrations.ray_tune.rungs import ROUNDING, Bracket, Cohort, Standing

logger = logging.getLogger(__name__)


class _Gate:
    """A searcher that gives no configuration while those it gave are being compared; else it is the one behind.

    Args:
        searcher: gives the configurations.
        is_open: whether one is wanted.
    """

    def __init__(self, searcher: Any, is_open: Callable[[], bool]) -> None:
        self.searcher = searcher
        self._is_open = is_open

    def suggest(self, trial_id: str) -> Any:
        return self.searcher.suggest(trial_id) if self._is_open() else None

    def get_state(self) -> dict[str, Any]:
        return {}  # Tune saves what is in front of a searcher by itself; all of this one's is the scheduler's.

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "searcher" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.searcher, name)


class SuccessiveHalvingScheduler(FIFOScheduler):  # type: ignore[misc]
    """Synchronous Successive Halving.

    ``num_samples`` trials, or ``cohort`` of them at a time, train up to ``grace_period``. When all are there, the best
    one in ``reduction_factor`` goes on to ``reduction_factor`` times as much and the others are stopped, and so on up
    to ``max_t``. Trials that wait, also for their cohort's turn, are PAUSED. One that ends by itself or fails takes no
    place among those that go on.

    Args:
        metric: by which trials are compared; ``None`` for that of the sweep.
        mode: ``"max"`` or ``"min"``; ``None`` for that of the sweep.
        time_attr: what ``max_t`` and ``grace_period`` are counted in: a result that never decreases.
        max_t: where trials end.
        grace_period: the first rung.
        reduction_factor: of trials from rung to rung, and of time; often called eta.
        cohort: trials that are compared with each other; one cohort runs after the other. ``None`` for all there are.

    Raises:
        InvalidFieldError: an argument cannot be used.
    """

    _supports_buffered_results = False
    #: It never looks at a checkpoint.
    waits_for_saves = False
    #: What becomes of a trial at its last rung.
    _at_the_end = TrialScheduler.STOP

    def __init__(
        self,
        metric: str | None = None,
        mode: str | None = None,
        *,
        time_attr: str = TRAINING_ITERATION,
        max_t: float = 81,
        grace_period: float = 1,
        reduction_factor: float = 3,
        cohort: int | None = None,
    ) -> None:
        super().__init__()
        self._grace_period = require_number("grace_period", grace_period, at_least=0.0)
        if self._grace_period == 0.0:
            raise InvalidFieldError("grace_period", grace_period, "must be positive")
        self._max_t = require_number("max_t", max_t, at_least=self._grace_period)
        self._factor = require_number("reduction_factor", reduction_factor, at_least=1.0)
        if self._factor == 1.0:
            raise InvalidFieldError("reduction_factor", reduction_factor, "must be above 1")
        self._size = None if cohort is None else require_integer("cohort", cohort, at_least=1)
        self._metric = metric
        self._mode = None if mode is None else require_one_of("mode", mode, ("max", "min"))
        self._time_attr = time_attr
        self._at_once = 1
        #: Trials without a cohort yet.
        self._arrived: list[Trial] = []
        #: Those with trials that have not ended, in the order of their turn.
        self._cohorts: list[Cohort] = []
        self._cohort_of: dict[Trial, Cohort] = {}
        self._begun = 0
        self._warned = False

    # -- what is asked of a scheduler ----------------------------------------------------------------------

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        if (self._metric and metric) or (self._mode and mode):
            return False
        self._metric = metric or self._metric
        self._mode = mode or self._mode
        if self._metric is None and self._mode:
            self._metric = DEFAULT_METRIC
        return True

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        for name, value in (("metric", self._metric), ("mode", self._mode)):
            if not value:
                raise InvalidFieldError(name, value, "is needed, here or in tune.TuneConfig")
        if trial in self._cohort_of:
            return  # It failed and may try again: it keeps its place.
        if not trial.is_finished():
            # The controller is just about to enter it under the status that it has.
            trial.set_status(Trial.PAUSED)
        self._arrived.append(trial)
        search = tune_controller.search_alg
        if hasattr(search, "searcher") and not isinstance(search.searcher, _Gate):
            search.searcher = _Gate(search.searcher, self._wants_more)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        action = self._action(trial, result)
        self._note(tune_controller, trial, result, action)
        return action

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        # The searcher was asked just before: a cohort that is not full by now is as full as it gets.
        self._settle()
        active = self._cohorts[: self._at_once]
        for cohort in active:
            self._advance(tune_controller, cohort)
        members = (trial for cohort in active for trial in cohort.members)
        return next((trial for trial in members if trial.status == Trial.PENDING), None)

    def debug_string(self) -> str:
        stages = [
            f"{len(cohort.live)} of {len(cohort.members)} trials on their way to {cohort.rung:g}"
            for cohort in self._cohorts[: self._at_once]
            if cohort.live
        ]
        return f"Using {type(self).__name__}: {'; '.join(stages) or 'no trials'}"

    # -- what Fluid asks -----------------------------------------------------------------------------------

    def next_rung(self, trial: Trial) -> tuple[float, bool] | None:
        """Where a trial is decided over next, and whether it is sure to be stopped there; ``None`` if never."""
        self._settle()
        cohort = self._cohort_of.get(trial)
        if cohort is None:
            return None
        return cohort.rung, cohort.at_last_rung and self._at_the_end == TrialScheduler.STOP

    def last_rung(self, trial: Trial) -> float:
        """Where the trials that a trial is compared with end; 0 if it is with none."""
        cohort = self._cohort_of.get(trial)
        return 0 if cohort is None else cohort.bracket.rungs[-1]

    def is_over(self, trial: Trial, time: float) -> bool:
        """Whether a trial is at its last rung by then, from which none goes on."""
        cohort = self._cohort_of.get(trial)
        return cohort is not None and time >= cohort.bracket.rungs[-1]

    # -- what other schedulers do differently --------------------------------------------------------------

    def _bracket(self, number: int) -> Bracket:
        """How a cohort is halved, by how many came before it."""
        rungs = [self._grace_period]
        while rungs[-1] * self._factor < self._max_t - ROUNDING:
            rungs.append(self._grace_period * self._factor ** len(rungs))
        if rungs[-1] < self._max_t:
            rungs.append(self._max_t)
        return Bracket(tuple(rungs), self._size)

    def _note(self, controller: Any, trial: Trial, result: dict[str, Any], action: str) -> None:
        """Takes note of what was decided about a trial, before the searcher is told of its result."""

    def _before_halving(self, controller: Any, trials: list[Trial], rung: float) -> None:
        """Takes note of a stage that is complete; the trials are those that are there."""

    def _start(self, controller: Any, trial: Trial) -> None:
        """Lets a trial that waits go on."""
        controller._set_trial_status(trial, Trial.PENDING)

    # -- cohorts -------------------------------------------------------------------------------------------

    def _action(self, trial: Trial, result: dict[str, Any]) -> str:
        cohort = self._cohort_of.get(trial)
        if cohort is None or not self._rank(cohort, trial, result) or not cohort.has_reached(trial):
            return str(TrialScheduler.CONTINUE)
        return str(self._at_the_end if cohort.at_last_rung else TrialScheduler.PAUSE)

    def _rank(self, cohort: Cohort, trial: Trial, result: dict[str, Any]) -> bool:
        """Notes how good a trial is; returns whether its result says so."""
        if self._time_attr not in result or self._metric not in result:
            return False
        value = float(result[self._metric])
        score = -math.inf if math.isnan(value) else value if self._mode == "max" else -value
        cohort.standings[trial] = Standing(result[self._time_attr], score)
        return True

    def _wants_more(self) -> bool:
        self._settle()
        return len(self._cohorts) < self._at_once or self._cohorts[-1].takes_more

    def _settle(self) -> None:
        """Finds a cohort for each trial that came, and forgets cohorts that have ended."""
        restored = []
        # Restored trials come in another order than they were made in.
        for trial in sorted(self._arrived, key=_number_of):
            if not self._cohorts or not self._cohorts[-1].takes_more:
                self._cohorts.append(Cohort(self._bracket(self._begun)))
                self._begun += 1
            cohort = self._cohort_of[trial] = self._cohorts[-1]
            cohort.members.append(trial)
            if self._rank(cohort, trial, flatten_dict(trial.last_result or {})):
                restored.append(cohort)
        self._arrived.clear()
        for cohort in restored:
            cohort.catch_up()
        self._cohorts = [cohort for cohort in self._cohorts if cohort.live]

    def _advance(self, controller: Any, cohort: Cohort) -> None:
        """Starts whoever has a way to go; first halves the cohort if nobody has."""
        live = cohort.live
        if live and all(trial.status == Trial.PAUSED and cohort.has_reached(trial) for trial in live):
            self._halve(controller, cohort)
        for trial in cohort.live:
            if trial.status == Trial.PAUSED and not cohort.has_reached(trial):
                self._start(controller, trial)

    def _halve(self, controller: Any, cohort: Cohort) -> None:
        if cohort.takes_more and cohort.bracket.size is not None:
            self._warn_of_fewer(controller, cohort)
        cohort.closed = True
        live, best = cohort.live, cohort.best(self._factor)
        self._before_halving(controller, live, cohort.rung)
        for trial in live:
            if trial not in best:
                controller.stop_trial(trial)
                # Tune notes this of trials that run only; of others it would not know any more when it is restored.
                controller_of(controller)._mark_trial_to_checkpoint(trial)
        cohort.stage = min(cohort.stage + 1, len(cohort.bracket.rungs) - 1)

    def _warn_of_fewer(self, controller: Any, cohort: Cohort) -> None:
        if not self._warned and not controller.search_alg.is_finished():
            self._warned = True
            logger.warning(
                "Comparing %d trials and not %d: the searcher gives no more while these are paused. A limit on"
                " concurrent trials limits the cohort as well; cohorts need none.",
                len(cohort.members),
                cohort.bracket.size,
            )


class SyncBOHB(SuccessiveHalvingScheduler):
    """BOHB with its stages in lock-step: give ``search_alg=TuneBOHB(...)`` with it.

    Brackets of Hyperband run one after another, the largest first. The model hears of a stage when it is complete, in
    the order in which trials were made, so the configurations of a bracket follow from all results of those before it
    and do not depend on which trial was faster. With any other searcher this is Hyperband in lock-step. Sizes and
    rungs are HpBandSter's.

    Args:
        metric: by which trials are compared; ``None`` for that of the sweep.
        mode: ``"max"`` or ``"min"``; ``None`` for that of the sweep.
        time_attr: what ``max_t`` and ``grace_period`` are counted in: a result that never decreases.
        max_t: where trials end; the largest budget.
        grace_period: no rung is below it; the smallest budget.
        reduction_factor: of trials from rung to rung, and of time; often called eta.
        brackets_at_once: how many brackets may be under way at a time.

    Raises:
        InvalidFieldError: an argument cannot be used.
    """

    # The controller does not tell searchers of a trial's last result, so trials wait there too until they were told.
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
        self._at_once = require_integer("brackets_at_once", brackets_at_once, at_least=1)
        self._halvings = math.floor(math.log(self._max_t / self._grace_period, self._factor) + ROUNDING)

    def configurations(self, brackets: int | None = None) -> int:
        """How many configurations so many brackets take: what ``num_samples`` should be.

        Args:
            brackets: ``None`` for one of each size.
        """
        if brackets is None:
            brackets = self._halvings + 1
        require_integer("brackets", brackets, at_least=1)
        return sum(self._bracket(number).size or 0 for number in range(brackets))

    def _bracket(self, number: int) -> Bracket:
        halvings = self._halvings - number % (self._halvings + 1)
        size = (self._halvings + 1) // (halvings + 1) * self._factor**halvings
        rungs = tuple(self._max_t / self._factor**left for left in range(halvings, -1, -1))
        return Bracket(rungs, math.floor(size + ROUNDING))

    def _note(self, controller: Any, trial: Trial, result: dict[str, Any], action: str) -> None:
        result["hyperband_info"] = {}  # TuneBOHB warns without it, and learns from it if it says more
        if action == TrialScheduler.PAUSE:
            self._tell(controller, "on_pause", trial)

    def _before_halving(self, controller: Any, trials: list[Trial], rung: float) -> None:
        for trial in trials:
            result = {**flatten_dict(trial.last_result), "hyperband_info": {"budget": rung}}
            self._tell(controller, "on_trial_result", trial, result)

    def _start(self, controller: Any, trial: Trial) -> None:
        super()._start(controller, trial)
        self._tell(controller, "on_unpause", trial)

    def _tell(self, controller: Any, what: str, trial: Trial, *arguments: Any) -> None:
        searcher: Any = getattr(controller.search_alg, "searcher", None)
        while hasattr(searcher, "searcher"):
            searcher = searcher.searcher
        if hasattr(searcher, "on_pause"):  # so it is TuneBOHB, or one that is told things in its way
            getattr(searcher, what)(trial.trial_id, *arguments)


def _number_of(trial: Trial) -> int:
    """How many trials were made before; 0 if that is not known."""
    number = str(trial.experiment_tag).partition("_")[0]
    return int(number) if number.isdigit() else 0
