"""HyperBand's brackets, which Tune can leave waiting for ever.

A bracket is looked at when one of its trials reports. If its last running trial fails, or is being saved while the
bracket is finished, trials are left PAUSED that nobody will ever wake. A faster engine meets this more often.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from ray.tune.schedulers import HyperBandScheduler

from fluid.integrations.ray_tune.private_api import Trial

logger = logging.getLogger(__name__)


class Brackets:
    """The brackets of a scheduler; none if it is no HyperBand.

    Args:
        controller: Tune's.
        scheduler: the user's.
    """

    def __init__(self, controller: Any, scheduler: Any) -> None:
        self._controller = controller
        self._scheduler = scheduler
        self.there_are = isinstance(scheduler, HyperBandScheduler)

    def unblock(self) -> bool:
        """Wakes or ends trials that wait in vain; to be called when nothing runs and nothing is about to.

        Returns:
            Whether there were any.
        """
        if not self.there_are:
            return False
        for bracket in self._brackets():
            paused = [trial for trial in bracket.current_trials() if trial.status == Trial.PAUSED]
            if not paused or any(trial in bracket.trials_to_unpause for trial in paused):
                continue
            if any(trial.status in (Trial.PENDING, Trial.RUNNING) for trial in bracket.current_trials()):
                continue
            if bracket.finished():
                logger.info("Ending %d trials of a finished HyperBand bracket that were left paused", len(paused))
                for trial in paused:
                    self._controller.stop_trial(trial)
                return True
            if bracket.cur_iter_done():
                logger.info("Going on with a HyperBand bracket whose last trial ended outside of it")
                self._scheduler._process_bracket(self._controller._wrapped(), bracket)
                return True
        return False

    def _brackets(self) -> Iterator[Any]:
        for band in self._scheduler._hyperbands:
            yield from (bracket for bracket in band if bracket is not None)
