"""Synchronous Successive Halving as a scheduler of Ray Tune.

At each rung the trials of a bracket wait, paused, until all of them are there or have ended; then the best are promoted
in one step and the others are stopped. Tune's ``HyperBandScheduler`` decides over whole brackets too, but fills and
runs several at once. Here one bracket after another has the devices for itself, and a searcher that learns from
results has all of a bracket's before it is asked for the next configurations.

The scheduler uses only what Tune lets a scheduler do, so it runs with Fluid and without.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray.tune.experiment import Trial
from ray.tune.result import DEFAULT_METRIC, TRAINING_ITERATION
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator
from ray.tune.utils.util import flatten_dict

from fluid.errors import InvalidFieldError, require_integer, require_number, require_one_of
from fluid.integrations.ray_tune.private_api import controller_of, is_endless

# -- rungs ---------------------------------------------------------------------------------------
#
# Brackets of Successive Halving: sets of trials that are compared with each other rung by rung.


#: Powers of a factor that is no whole number come out slightly off.
ROUNDING = 1e-9


class HalvingSchedule(NamedTuple):
    """How a bracket is halved.

    Attributes:
        rungs: where trials are compared, ascending, in units of the time attribute; they end at the last.
        size: number of trials that begin; ``None`` for as many as there are.
    """

    rungs: tuple[float, ...]
    size: int | None


class LatestScore(NamedTuple):
    """The last result of a trial: its time attribute, and its score, higher being better."""

    time: float
    score: float


@dataclass(eq=False)
class HalvingBracket:
    """Trials that are compared with each other.

    Attributes:
        schedule: their rungs.
        members: the trials in the order in which they were made.
        scores: of the trials that have reported.
        stage: index of the next rung.
        is_closed: whether no further trial may join.
    """

    schedule: HalvingSchedule
    members: list[Trial] = field(default_factory=list)
    scores: dict[Trial, LatestScore] = field(default_factory=dict)
    stage: int = 0
    is_closed: bool = False

    @property
    def takes_more(self) -> bool:
        """Whether another trial may join."""
        return not self.is_closed and (self.schedule.size is None or len(self.members) < self.schedule.size)

    @property
    def live(self) -> list[Trial]:
        """Members that have not ended."""
        return [trial for trial in self.members if not trial.is_finished()]

    @property
    def rung(self) -> float:
        """Where they are compared next."""
        return self.schedule.rungs[self.stage]

    @property
    def at_last_rung(self) -> bool:
        """Whether they end there."""
        return self.stage == len(self.schedule.rungs) - 1

    def has_reached(self, trial: Trial) -> bool:
        """Whether a trial has reached the next rung."""
        latest = self.scores.get(trial)
        return latest is not None and latest.time >= self.rung

    def places(self, factor: float) -> int:
        """How many trials go on: 1 in ``factor`` of the starters per rung, however many of them failed."""
        if self.at_last_rung:
            return 0
        return max(1, math.floor(len(self.members) / factor ** (self.stage + 1) + ROUNDING))

    def best(self, factor: float) -> list[Trial]:
        """Returns the trials to promote."""
        return sorted(self.live, key=lambda trial: -self.scores[trial].score)[: self.places(factor)]

    def catch_up(self) -> None:
        """Moves to the stage that its trials, which were restored, have reached."""
        for latest in self.scores.values():
            reached = min(bisect_left(self.schedule.rungs, latest.time), len(self.schedule.rungs) - 1)
            self.stage = max(self.stage, reached)
        self.is_closed |= self.stage > 0


# -- successive halving --------------------------------------------------------------------------


logger = logging.getLogger(__name__)


class _GatedSearcher:
    """A searcher that suggests nothing while a full bracket runs; everything else is passed on.

    Args:
        searcher: the searcher to ask.
        is_open: whether a configuration is wanted.
    """

    def __init__(self, searcher: Any, is_open: Callable[[], bool]) -> None:
        self.searcher = searcher
        self._is_open = is_open

    def suggest(self, trial_id: str) -> Any:
        return self.searcher.suggest(trial_id) if self._is_open() else None

    def get_state(self) -> dict[str, Any]:
        return {}  # Tune saves the searcher behind it separately; the rest is state of the scheduler.

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "searcher" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.searcher, name)


class SuccessiveHalvingScheduler(FIFOScheduler):  # type: ignore[misc]
    """Synchronous Successive Halving.

    All ``num_samples`` trials, or ``bracket_size`` of them at a time, train up to ``grace_period``. When all are there,
    the best 1 in ``reduction_factor`` continue to ``reduction_factor`` times as much and the others are stopped, and
    so on up to ``max_t``. Trials that wait, also for their bracket's turn, are PAUSED. A trial that ends by itself or
    fails takes no place among those that are promoted.

    Args:
        metric: by which trials are compared; ``None`` for that of the sweep.
        mode: ``"max"`` or ``"min"``; ``None`` for that of the sweep.
        time_attr: what ``max_t`` and ``grace_period`` are counted in: an entry of the results that never decreases.
        max_t: where trials end.
        grace_period: the first rung.
        reduction_factor: of trials from rung to rung, and of time; often called eta.
        bracket_size: number of trials that are compared with each other; one bracket runs after the other. ``None``
            for one bracket of all trials, which cannot be with ``num_samples=-1``.

    Raises:
        InvalidFieldError: an argument cannot be used.

    Example:
        >>> from fluid import tune
        >>> scheduler = tune.SuccessiveHalvingScheduler("loss", "min", max_t=9, bracket_size=9)
        >>> config = tune.TuneConfig(scheduler=scheduler, num_samples=9)
        >>> scheduler.debug_string()
        'Using SuccessiveHalvingScheduler: no trials'

        ``tune.Tuner(trainable, tune_config=config, executor=FluidExecutor()).fit()`` then runs 9 trials to iteration 1,
        the best 3 of them to iteration 3, and the best one to iteration 9.
    """

    _supports_buffered_results = False
    #: It never looks at a checkpoint.
    waits_for_saves = False
    #: The decision about a trial at its last rung.
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
        bracket_size: int | None = None,
    ) -> None:
        super().__init__()
        self._grace_period = require_number("grace_period", grace_period, at_least=0.0)
        if self._grace_period == 0.0:
            raise InvalidFieldError("grace_period", grace_period, "must be positive")
        self._max_t = require_number("max_t", max_t, at_least=self._grace_period)
        self._factor = require_number("reduction_factor", reduction_factor, at_least=1.0)
        if self._factor == 1.0:
            raise InvalidFieldError("reduction_factor", reduction_factor, "must be above 1")
        self._size = None if bracket_size is None else require_integer("bracket_size", bracket_size, at_least=1)
        self._metric = metric
        self._mode = None if mode is None else require_one_of("mode", mode, ("max", "min"))
        self._time_attr = time_attr
        self._brackets_at_once = 1
        #: Trials without a bracket yet.
        self._arrived: list[Trial] = []
        #: Brackets with trials that have not ended, in the order of their turn.
        self._brackets: list[HalvingBracket] = []
        self._bracket_of: dict[Trial, HalvingBracket] = {}
        self._number_begun = 0
        self._has_warned = False

    # -- the interface of a scheduler ----------------------------------------------------------------------

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
        if trial in self._bracket_of:
            return  # A failed trial that is tried again keeps its place.
        if not trial.is_finished():
            # The controller is about to register the trial under its status.
            trial.set_status(Trial.PAUSED)
        self._arrived.append(trial)
        search = tune_controller.search_alg
        if is_endless(search):
            self._limit(search)
        if hasattr(search, "searcher") and not isinstance(search.searcher, _GatedSearcher):
            search.searcher = _GatedSearcher(search.searcher, self._wants_more)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        action = self._action(trial, result)
        self._on_action(tune_controller, trial, result, action)
        return action

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        # The controller has just asked the searcher: a bracket that is not full now will not get more trials.
        self._assign_brackets()
        active = self._brackets[: self._brackets_at_once]
        for bracket in active:
            self._advance(tune_controller, bracket)
        members = (trial for bracket in active for trial in bracket.members)
        return next((trial for trial in members if trial.status == Trial.PENDING), None)

    def debug_string(self) -> str:
        stages = [
            f"{len(bracket.live)} of {len(bracket.members)} trials on their way to {bracket.rung:g}"
            for bracket in self._brackets[: self._brackets_at_once]
            if bracket.live
        ]
        return f"Using {type(self).__name__}: {'; '.join(stages) or 'no trials'}"

    # -- what Fluid asks -----------------------------------------------------------------------------------

    def next_rung(self, trial: Trial) -> tuple[float, bool] | None:
        """Returns a trial's next rung, and whether the trial is sure to be stopped there; ``None`` if it has none."""
        self._assign_brackets()
        bracket = self._bracket_of.get(trial)
        if bracket is None:
            return None
        return bracket.rung, bracket.at_last_rung and self._at_the_end == TrialScheduler.STOP

    def last_rung(self, trial: Trial) -> float:
        """Returns the last rung of a trial's bracket; 0 if it has none."""
        bracket = self._bracket_of.get(trial)
        return 0 if bracket is None else bracket.schedule.rungs[-1]

    def is_over(self, trial: Trial, time: float) -> bool:
        """Whether a trial has reached the last rung of its bracket by a time."""
        bracket = self._bracket_of.get(trial)
        return bracket is not None and time >= bracket.schedule.rungs[-1]

    def bracket_schedule(self, number: int) -> HalvingSchedule:
        """Returns the schedule of a bracket, by the number of brackets before it."""
        return self._schedule(number)

    @property
    def brackets_at_once(self) -> int:
        """How many brackets may be under way at a time."""
        return self._brackets_at_once

    # -- what subclasses change ----------------------------------------------------------------------------

    def _schedule(self, number: int) -> HalvingSchedule:
        """Returns the schedule of a bracket, by the number of brackets before it."""
        rungs = [self._grace_period]
        while rungs[-1] * self._factor < self._max_t - ROUNDING:
            rungs.append(self._grace_period * self._factor ** len(rungs))
        if rungs[-1] < self._max_t:
            rungs.append(self._max_t)
        return HalvingSchedule(tuple(rungs), self._size)

    def _on_action(self, controller: Any, trial: Trial, result: dict[str, Any], action: str) -> None:
        """Called after the decision about a trial, before the searcher is told of its result."""

    def _before_halving(self, controller: Any, trials: list[Trial], rung: float) -> None:
        """Called when a stage is complete, with the trials that have reached the rung."""

    def _start(self, controller: Any, trial: Trial) -> None:
        """Starts a trial that waits."""
        controller._set_trial_status(trial, Trial.PENDING)

    # -- brackets ------------------------------------------------------------------------------------------

    def _action(self, trial: Trial, result: dict[str, Any]) -> str:
        bracket = self._bracket_of.get(trial)
        if bracket is None or not self._record_score(bracket, trial, result) or not bracket.has_reached(trial):
            return str(TrialScheduler.CONTINUE)
        return str(self._at_the_end if bracket.at_last_rung else TrialScheduler.PAUSE)

    def _record_score(self, bracket: HalvingBracket, trial: Trial, result: dict[str, Any]) -> bool:
        """Records a trial's score; returns whether its result has one."""
        if self._time_attr not in result or self._metric not in result:
            return False
        value = float(result[self._metric])
        score = -math.inf if math.isnan(value) else value if self._mode == "max" else -value
        bracket.scores[trial] = LatestScore(result[self._time_attr], score)
        return True

    def _limit(self, search: Any) -> None:
        """Limits a search without end to a bracket at a time; trials that wait are no limit, as they are PAUSED."""
        size = self._schedule(0).size
        if size is None:
            raise InvalidFieldError("bracket_size", None, "is needed where num_samples is -1")
        if isinstance(search, BasicVariantGenerator) and search.max_concurrent == 0:
            search.max_concurrent = size

    def _wants_more(self) -> bool:
        self._assign_brackets()
        return len(self._brackets) < self._brackets_at_once or self._brackets[-1].takes_more

    def _assign_brackets(self) -> None:
        """Assigns each new trial to a bracket, and drops brackets that have ended."""
        restored = []
        # Restored trials come in another order than they were made in.
        for trial in sorted(self._arrived, key=_number_of):
            if not self._brackets or not self._brackets[-1].takes_more:
                self._brackets.append(HalvingBracket(self._schedule(self._number_begun)))
                self._number_begun += 1
            bracket = self._bracket_of[trial] = self._brackets[-1]
            bracket.members.append(trial)
            if self._record_score(bracket, trial, flatten_dict(trial.last_result or {})):
                restored.append(bracket)
        self._arrived.clear()
        for bracket in restored:
            bracket.catch_up()
        self._brackets = [bracket for bracket in self._brackets if bracket.live]

    def _advance(self, controller: Any, bracket: HalvingBracket) -> None:
        """Halves a bracket if all of it waits at the rung, then starts the trials that have not reached the next."""
        live = bracket.live
        if live and all(trial.status == Trial.PAUSED and bracket.has_reached(trial) for trial in live):
            self._halve(controller, bracket)
        for trial in bracket.live:
            if trial.status == Trial.PAUSED and not bracket.has_reached(trial):
                self._start(controller, trial)

    def _halve(self, controller: Any, bracket: HalvingBracket) -> None:
        if bracket.takes_more and bracket.schedule.size is not None:
            self._warn_of_fewer(controller, bracket)
        bracket.is_closed = True
        live, best = bracket.live, bracket.best(self._factor)
        self._before_halving(controller, live, bracket.rung)
        for trial in live:
            if trial not in best:
                controller.stop_trial(trial)
                # Tune saves the state of a stopped trial only if it was running; a restored sweep needs it here too.
                controller_of(controller)._mark_trial_to_checkpoint(trial)
        bracket.stage = min(bracket.stage + 1, len(bracket.schedule.rungs) - 1)

    def _warn_of_fewer(self, controller: Any, bracket: HalvingBracket) -> None:
        if not self._has_warned and not controller.search_alg.is_finished():
            self._has_warned = True
            logger.warning(
                "Comparing %d trials and not %d: the searcher suggests no more while these are paused. A limit on"
                " concurrent trials also limits the bracket; brackets need none.",
                len(bracket.members),
                bracket.schedule.size,
            )


def _number_of(trial: Trial) -> int:
    """Returns the number of trials made before this one; 0 if that is unknown."""
    number = str(trial.experiment_tag).partition("_")[0]
    return int(number) if number.isdigit() else 0
