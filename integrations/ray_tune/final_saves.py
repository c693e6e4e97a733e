"""The last checkpoints of a sweep that is about to be preempted: one of Tune's for each live trial."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from fluid._clock import MonotonicClock
from fluid.errors import FluidError
from fluid.integrations.ray_tune.private_api import TRAINING_ITERATION
from fluid.integrations.ray_tune.tune_trial import ActorStage, TuneTrial

#: Times that the controller has its turn after the last checkpoint was handed to it.
_LAST_TURNS = 2


class FinalSaves:
    """Makes live trials save, and gives the controller each checkpoint after the result of its iteration.

    Results of later iterations, which a restored sweep will make again, are dropped.

    Args:
        controller: Tune's.
        trials: the live ones.
        deadline_s: seconds after which no checkpoint is waited for.
        post: runs a callback in the controller's thread.
    """

    def __init__(
        self,
        controller: Any,
        trials: Iterable[TuneTrial],
        deadline_s: float,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._controller = controller
        self._clock = MonotonicClock()
        self._deadline = self._clock.now() + deadline_s
        #: The checkpoint of each trial, ``None`` until its lane has made it.
        self._open: dict[TuneTrial, Any] = {}
        self._turns_left = _LAST_TURNS
        for tune_trial in trials:
            try:
                future = tune_trial.handle.call(tune_trial.trial_id, "save")
            except FluidError:
                continue  # It has failed, or was stopped.
            self._open[tune_trial] = None
            future.add_done_callback(lambda done, trial=tune_trial: post(partial(self._saved, trial, done)))

    def advance(self) -> bool:
        """Hands checkpoints to the controller; returns whether all are, or the deadline has come."""
        for tune_trial, saved in list(self._open.items()):
            if tune_trial.stage is not ActorStage.LIVE:
                del self._open[tune_trial]
            elif saved is not None and not tune_trial.results:
                del self._open[tune_trial]
                tune_trial.discard_unclaimed_save()
                tune_trial.unclaimed_save = saved
                self._controller._schedule_trial_save(tune_trial.trial)
        if not self._open:
            self._turns_left -= 1
        return self._turns_left < 0 or self._clock.now() >= self._deadline

    def _saved(self, tune_trial: TuneTrial, done: Future[Any]) -> None:
        if done.exception() is not None or tune_trial not in self._open:
            self._open.pop(tune_trial, None)  # A function, which saves when it reports; or it has ended.
            return
        saved = tune_trial.completed(done.result())
        if saved.checkpoint is None:
            del self._open[tune_trial]
            return
        self._open[tune_trial] = saved
        tune_trial.cut_at = int(saved.metrics.get(TRAINING_ITERATION, 0))
