"""HyperBand brackets that Tune leaves PAUSED for ever, and how they continue.

Tune's HyperBand processes a bracket when one of its trials reports. If the bracket's last running trial fails, or is
being saved while the bracket finishes, the other trials stay PAUSED. A faster engine meets this more often.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from ray.tune.schedulers import HyperBandScheduler

from fluid.integrations.ray_tune.private_api import Trial

logger = logging.getLogger(__name__)


class HyperBandStalls:
    """Finds stalled brackets of a scheduler and resolves them.

    Args:
        controller: Tune's.
        scheduler: the user's; any but a HyperBand has no brackets.

    Attributes:
        possible: whether the scheduler is a HyperBand.
    """

    def __init__(self, controller: Any, scheduler: Any) -> None:
        self._controller = controller
        self._scheduler = scheduler
        self.possible = isinstance(scheduler, HyperBandScheduler)

    def resolve(self) -> bool:
        """Resumes or ends the trials of a stalled bracket; to be called when no trial runs or is about to.

        Returns:
            Whether a bracket was stalled.
        """
        if not self.possible:
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
                logger.info("Processing a HyperBand bracket whose last running trial failed or was being saved")
                self._scheduler._process_bracket(self._controller._wrapped(), bracket)
                return True
        return False

    def _brackets(self) -> Iterator[Any]:
        for band in self._scheduler._hyperbands:
            yield from (bracket for bracket in band if bracket is not None)
