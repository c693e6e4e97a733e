"""What Tune's controller is called back with, in order, as long as its turn may wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from fluid._clock import Clock, MonotonicClock
from fluid.integrations.ray_tune.private_api import watches_every_result
from fluid.integrations.ray_tune.tune_trial import TuneTrial

#: Longest that callbacks are made before the controller has its turn, in seconds.
_TURN_S = 0.05

Callback = Callable[[], None]


class ControllerOutbox:
    """Callbacks and results for one controller.

    Args:
        controller: Tune's.
        clock: by which the controller's turn comes.

    Attributes:
        holds_results: whether results wait; callbacks do not.
    """

    def __init__(self, controller: Any, clock: Clock | None = None) -> None:
        self._controller = controller
        self._clock = clock or MonotonicClock()
        self._callbacks: deque[Callback] = deque()
        #: Trials with a result that the controller has requested, in the order in which the results came.
        self._with_result: deque[TuneTrial] = deque()
        self.holds_results = False

    def call_back(self, callback: Callback) -> None:
        """Calls the controller back at its next turn."""
        self._callbacks.append(callback)

    def answer(self, tune_trial: TuneTrial, callback: Callback) -> None:
        """Calls the controller back at its next turn, unless it has forgotten its requests to the trial by then."""
        generation = tune_trial.task_generation
        self.call_back(lambda: callback() if tune_trial.task_generation == generation else None)

    def offer_result(self, tune_trial: TuneTrial) -> None:
        """Gives the controller a trial's oldest result at one of its next turns."""
        self._with_result.append(tune_trial)

    def hand_over(self) -> bool:
        """Calls the controller back, in order, until it should have its turn; returns whether there was anything."""
        begun = self._clock.now()
        handed = False
        one_by_one = watches_every_result(self._controller)
        while True:
            if self._callbacks:
                self._callbacks.popleft()()
            elif self._with_result and not self.holds_results:
                tune_trial = self._with_result.popleft()
                if tune_trial.train_task is None or not tune_trial.results:
                    continue
                tune_trial.answer_train(tune_trial.next_result())
                if one_by_one or (self._controller._fail_fast and self._controller._has_errored):
                    return True
            else:
                return handed
            handed = True
            if self._clock.now() - begun > _TURN_S:
                return True
