"""How far a trial of Ray Tune may run ahead of Tune.

Between two decisions of Tune a trial only has to train: its lane runs ahead and hands the results over later, one by
one. Tune must then decide as it would have without this, so a trial never runs past an iteration at which Tune may do
anything else than let it continue. :func:`next_decision` returns that iteration. It is never too late; where Tune's
decisions cannot be foreseen it is the next iteration.

Most of what is needed is private to Tune's schedulers and stoppers. Only known ones are read, and any other is taken to
decide at every iteration.
"""

from __future__ import annotations

import logging
import math
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from ray.tune.search import BasicVariantGenerator
from ray.tune.utils import flatten_dict

from fluid.errors import InvalidFieldError
from fluid.integrations.ray_tune.lane.lane_trial import CheckpointSchedule
from fluid.integrations.ray_tune.private_api import Trial, saves_when_asked
from fluid.integrations.ray_tune.schedulers.horizons import (
    Horizon,
    earliest,
    lets_no_trial_run_longer,
    reader_of,
    stop_horizons,
)
from fluid.sweeping.under_way import most_fusible


@dataclass(frozen=True)
class Decision:
    """The next time that Tune may do anything else with a trial than let it continue.

    Attributes:
        at: the iteration, counted from the trial's first, whose result must be processed before the trial continues;
            always after the iteration asked about. ``None`` if the trial runs until it says that it is done.
        checkpoints: the iterations up to ``at`` after which Tune asks for a checkpoint. With schedulers that stop the
            whole group at a rung, ``at`` is in it although the last trial to get there may continue without one.
        stops: whether Tune is sure to stop the trial at ``at``.
        lock_step: whether the scheduler decides for a whole group at the same iteration, or never. If so, all of the
            group can be submitted at once; if not, the order in which results come in matters.
        follow_up_iterations: iterations that later rungs may add after ``at``, to this trial or to one that waits for
            it; 0 where that is unknown.
    """

    at: int | None
    checkpoints: CheckpointSchedule
    _: KW_ONLY
    stops: bool = False
    lock_step: bool = False
    follow_up_iterations: int = 0


def next_decision(controller: Any, scheduler: Any, trial: Any, iteration: int) -> Decision:
    """Returns when Tune will next have to decide about ``trial``.

    The answer holds until a result of the trial at that iteration is processed, or the trial is stopped, or continues
    from another checkpoint; results of other trials do not bring the decision forward.

    Args:
        controller: Tune's ``TuneController``.
        scheduler: the user's scheduler, without any wrapper of Fluid's around it.
        trial: Tune's ``Trial``; the scheduler must have been told about it.
        iteration: the iteration after which the trial continues: that of its last processed result, 0 before the
            first. If the trial continues from a checkpoint, be it an older one of its own or another trial's as with
            population based training, that of the checkpoint.

    Raises:
        InvalidFieldError: ``iteration`` is negative.
    """
    if iteration < 0:
        raise InvalidFieldError("iteration", iteration, "must be at least 0")
    reader = reader_of(scheduler)
    # Tune asks the criteria and the stopper first; if one of them stops the trial, the scheduler is not asked.
    ends = stop_horizons(controller._stopper, trial, iteration)
    verdict, lock_step = Horizon(iteration + 1), False
    if reader is not None:
        verdict = reader.horizon(controller, scheduler, trial, iteration)
        lock_step = reader.lock_step(scheduler)
    at_end = bool(trial.checkpoint_at_end)
    checkpoints = CheckpointSchedule(every=int(trial.checkpoint_freq or 0), at_end=at_end)
    at = earliest([*ends, verdict])
    if at is None:
        return Decision(None, checkpoints, lock_step=lock_step)

    ended = any(end.stops for end in ends if end.at == at)
    may_end = any(end.at == at for end in ends)
    asked = verdict.at == at and not ended
    stops = ended or (asked and verdict.stops)
    if (stops and at_end) or (asked and verdict.save and not may_end):
        checkpoints = checkpoints._replace(at=frozenset([at]))
    elif asked and (verdict.save or verdict.likely_save) and not checkpoints.due(at):
        checkpoints = checkpoints._replace(likely=frozenset([at]))
    last = min([verdict.last, *(end.at for end in ends if end.at is not None)])
    follow_up_iterations = max(0, math.ceil(last) - at) if math.isfinite(last) else 0
    return Decision(at, checkpoints, stops=stops, lock_step=lock_step, follow_up_iterations=follow_up_iterations)


def had_run_its_course(controller: Any, scheduler: Any, trial: Any, iteration: int) -> bool:
    """Whether a trial that ended after an iteration had run as long as any trial may; else it was stopped early.

    Args:
        controller, scheduler, trial: as for :func:`next_decision`.
        iteration: that of its last processed result.
    """
    last = flatten_dict(trial.last_result or {})
    # Not Trial.should_stop: Tune marks the last result of every trial as done.
    if any(name in last and last[name] >= bound for name, bound in trial.stopping_criterion.items()):
        return True
    reader = reader_of(scheduler)
    if lets_no_trial_run_longer(controller._stopper, trial):
        return True
    return reader is not None and reader.is_last(scheduler, trial, iteration)


def all_known_at_once(controller: Any) -> bool:
    """Whether Tune can hand out the configurations of all trials before any result.

    It can with grid and random search, unless the user limits the number of concurrent trials. Then
    ``controller.update_max_pending_trials`` may be raised to get them all.
    """
    search = controller.search_alg
    if not isinstance(search, BasicVariantGenerator) or search.max_concurrent > 0:
        return False
    return bool(type(search).next_trial is BasicVariantGenerator.next_trial)


# -- result watchers -----------------------------------------------------------------------------
#
# Callbacks of a sweep that may ask for a checkpoint when they are given a result.
#
# A callback is given each result itself, and Tune then looks whether ``should_checkpoint`` is set in it. A trial that
# has run ahead has no such checkpoint any more.


#: Packages whose callbacks only read results, and those in them that are examples of users' code.
_READERS, _EXAMPLES = ("ray.", "fluid."), (".examples.", ".tests.")

#: What callbacks are told of a checkpoint with, and where methods of these names do not read it. Those of
#: ``ray.air.integrations`` upload it.
_GIVEN_CHECKPOINTS = ("on_checkpoint", "on_trial_save", "log_trial_save")
_SILENT = ("ray.tune.", "fluid.")


def may_ask_for_checkpoints(controller: Any) -> bool:
    """Whether a callback of the sweep may do more with a result than to read it.

    Tune's own callbacks and the loggers, which are the users' subclasses of ``LoggerCallback`` that do not replace its
    ``on_trial_result``, only read.
    """
    return not all(map(_only_reads, controller._callbacks._callbacks))


def _only_reads(callback: Any) -> bool:
    # Through the object and not its class: the method may have been replaced on the object alone.
    module = str(getattr(callback.on_trial_result, "__module__", ""))
    return module.startswith(_READERS) and not any(part in module for part in _EXAMPLES)


def may_read_checkpoints(controller: Any) -> bool:
    """Whether a callback of the sweep may read the files of each checkpoint when Tune is given it."""
    return any(
        not str(getattr(getattr(callback, method, None), "__module__", None) or "ray.tune.").startswith(_SILENT)
        for callback in controller._callbacks._callbacks
        for method in _GIVEN_CHECKPOINTS
    )


# -- budgets -------------------------------------------------------------------------------------
#
# Iterations that a lane is granted at a time, and the checkpoints that it makes on the way.


_log = logging.getLogger(__name__)
#: Iterations granted to a trial of unknown length, before any trial of its trainable has ended.
_FIRST_GUESS = 100
#: Most iterations granted at a time: the driver holds the results of a lane that runs ahead in memory.
_MOST = 10_000


class Grant(NamedTuple):
    """What a trial may do next.

    Attributes:
        iterations: how many to run.
        checkpoints: the iterations after which its lane makes a checkpoint without being asked.
        open_ended: whether the trial may continue beyond ``iterations`` without a decision of Tune.
        follow_up_iterations: iterations that later rungs may add after those, to this trial or to one that waits for
            it.
    """

    iterations: int
    checkpoints: CheckpointSchedule
    open_ended: bool
    follow_up_iterations: int = 0

    def first(self) -> Grant:
        """Returns the first of its iterations alone, with the others to follow."""
        following = self.iterations - 1 + self.follow_up_iterations
        return self._replace(iterations=1, open_ended=False, follow_up_iterations=following)


class Budgets:
    """Grants iterations up to Tune's next decision.

    Args:
        controller: Tune's.
        scheduler: the user's.
    """

    def __init__(self, controller: Any, scheduler: Any) -> None:
        self._controller = controller
        self._scheduler = scheduler
        #: Iterations of the longest trial so far of each trainable, of those that said they were done.
        self._lengths: dict[str, int] = {}
        #: Whether Tune saves a trial when it is asked to, by the name of its trainable.
        self._savable: dict[str, bool] = {}
        self._runs_ahead = True

    def grant(self, trial: Trial, iteration: float) -> Grant:
        """Returns how far a trial may run from an iteration, of which a trainable may count fractions."""
        grant = self._up_to_decision(trial, math.floor(iteration))
        return grant.first() if self._may_be_saved_any_time(trial) else grant

    def awaits_each_result(self, trial: Trial) -> bool:
        """Whether a trial that has not begun must wait for Tune after each iteration."""
        decision = next_decision(self._controller, self._scheduler, trial, 0)
        return (decision.at == 1 and not decision.stops) or self._may_be_saved_any_time(trial)

    def note_late_save(self, trial: Trial) -> None:
        """Grants one iteration at a time from now on, as Tune saved a trial that had run ahead."""
        if self._runs_ahead:
            self._runs_ahead = False
            _log.warning(
                "Trial %s had run ahead of Tune when it was told to save itself: this checkpoint is of a later"
                " iteration than the result. From now on trials run one iteration at a time. They do so from the"
                " beginning if what asks for checkpoints is a tune.Callback with on_trial_result.",
                trial,
            )

    def _up_to_decision(self, trial: Trial, iteration: int) -> Grant:
        decision = next_decision(self._controller, self._scheduler, trial, iteration)
        at = decision.at
        if at is None or at - iteration > _MOST:
            ahead = _MOST if at is not None else self._guess(trial, iteration)
            return Grant(ahead, decision.checkpoints, open_ended=True)
        return Grant(
            iterations=at - iteration,
            checkpoints=decision.checkpoints,
            open_ended=False,
            follow_up_iterations=decision.follow_up_iterations,
        )

    def _may_be_saved_any_time(self, trial: Trial) -> bool:
        if not self._runs_ahead:
            return True
        if not self._callbacks_may_ask:
            return False
        name = trial.trainable_name
        if name not in self._savable:
            self._savable[name] = saves_when_asked(trial.get_trainable_cls())
        return self._savable[name]

    @cached_property
    def _callbacks_may_ask(self) -> bool:
        return may_ask_for_checkpoints(self._controller)

    def record_length(self, trial: Trial, iterations: int) -> None:
        """Records how many iterations a trial had run when it said that it was done."""
        name = trial.trainable_name
        self._lengths[name] = max(iterations, self._lengths.get(name, 0))

    def _guess(self, trial: Trial, iteration: int) -> int:
        # One more than the longest trial ran: one further step is needed to find out that the trial is done.
        left = self._lengths.get(trial.trainable_name, 0) + 1 - iteration
        return min(left, _MOST) if left > 1 else _FIRST_GUESS


# -- concurrency ---------------------------------------------------------------------------------
#
# How many trials of a sweep of Ray Tune are under way at once.


@dataclass(slots=True)
class Concurrency:
    """A bound on the trials under way.

    Attributes:
        most: that bound; ``None`` for none.
        is_given: whether the user has set it, so that it holds for trials that can be fused, too.
        rows: of the largest fused pack so far.
    """

    most: int | None = None
    is_given: bool = False
    rows: int = 1

    def note(self, rows: int) -> None:
        """Takes note of a step of so many trials."""
        self.rows = max(self.rows, rows)

    def limit(self, devices: int, *, fusible: bool) -> int | None:
        """The bound for trials of which many may be fused on so many devices, or which cannot be fused."""
        if self.most is None or self.is_given or not fusible:
            return self.most
        return max(self.most, most_fusible(devices, self.rows))
