"""How far a trial of Ray Tune may run ahead of Tune.

Between two decisions of Tune a trial only has to train: its lane runs ahead and hands the results over later, one by
one. Tune must then decide as it would have without this, so a trial never runs past an iteration at which Tune may do
anything else than let it continue. :func:`next_decision` returns that iteration. It is never too late; where Tune's
decisions cannot be foreseen it is the next iteration.

Most of what is needed is private to Tune's schedulers and stoppers. Only known ones are read, and any other is taken to
decide at every iteration.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ray.tune.search import BasicVariantGenerator
from ray.tune.utils import flatten_dict

from fluid.errors import InvalidFieldError
from fluid.integrations.ray_tune.checkpoint_schedule import CheckpointSchedule
from fluid.integrations.ray_tune.horizon import Horizon, earliest
from fluid.integrations.ray_tune.scheduler_horizons import reader_of
from fluid.integrations.ray_tune.stop_horizons import lets_no_trial_run_longer, stop_horizons


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
