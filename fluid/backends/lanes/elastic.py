"""The trials of a pool that train in several lanes. Without IO: every method returns what the pool is to do.

A trial in one lane is a resident like any other, elastic or not. It gets an
:class:`~fluid.backends.lanes.elastic_trial.ElasticTrial` when it is to grow, and loses it when it is back in one lane,
or in none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from fluid._clock import Clock
from fluid.backends.lanes.elastic_actions import Outbox, PoolAction
from fluid.backends.lanes.elastic_trial import ElasticTrial
from fluid.backends.lanes.migration import OfTrial
from fluid.elastic.messages import Left
from fluid.engine.commands import Pause, Resize, RunIteration, StartTrial, StopTrial
from fluid.engine.events import Event, IterationDone, TrialFailed, TrialPaused, TrialReleased
from fluid.lane.protocol import FromMember


class ElasticTrials:
    """Knows which commands and messages are about trials in several lanes, and hands them to those trials.

    Args:
        is_up: whether a lane runs and was not told to end.
        is_elastic: whether a trial can span several devices.
        clock: the driver's.
        process_group: what members communicate through, as of :func:`fluid.elastic.make_group.make_group`.
    """

    def __init__(
        self,
        is_up: Callable[[int], bool],
        is_elastic: Callable[[str], bool],
        clock: Clock,
        process_group: str,
    ) -> None:
        self._is_up = is_up
        self._is_elastic = is_elastic
        self._clock = clock
        self._process_group = process_group
        self._trials: dict[str, ElasticTrial] = {}
        #: Iterations still to run, of trials in one lane; those in several keep their own.
        self._left: dict[str, int] = {}
        #: (trial, lane, epoch) of members that were told to leave and whose answer the engine waits for.
        self._leaving: set[tuple[str, int, int]] = set()
        self._epochs = itertools.count(1)

    def concerns(self, command: OfTrial) -> bool:
        """Whether a command is for :meth:`execute`; otherwise its trial trains, or is to train, in one lane."""
        return command.trial_id in self._trials or (_is_wide(command) and self._is_elastic(command.trial_id))

    def execute(self, command: OfTrial) -> list[PoolAction]:
        """Carries out a command that it :meth:`concerns`."""
        trial = self._trials.get(command.trial_id)
        if trial is None:
            here = command.old_lane_ids if isinstance(command, Resize) else command.lane_ids
            if not isinstance(command, StartTrial) and not any(map(self._is_up, here)):
                return []  # It was lost when the engine gave this command; the engine will start it again.
            trial = self._trials[command.trial_id] = self._open(command)
        return self._kept(trial, trial.execute(command))

    def count(self, command: OfTrial) -> None:
        """Counts the iterations a trial in one lane was told to run: one that is about to end need not wait to grow."""
        if isinstance(command, StartTrial):
            self._left[command.trial_id] = command.iterations
        elif isinstance(command, RunIteration):
            self._left[command.trial_id] = self._left.get(command.trial_id, 0) + command.iterations
        elif isinstance(command, (Pause, StopTrial)):
            self._left.pop(command.trial_id, None)

    def forget(self, trial_id: str) -> None:
        """Forgets a trial that no command will name again."""
        self._left.pop(trial_id, None)

    def hear(self, lane_id: int, message: FromMember, at: float) -> list[PoolAction]:
        """Takes what a member says.

        Args:
            lane_id: where it is.
            message: what it says.
            at: when, seconds on the driver's clock.
        """
        if isinstance(message.message, Left):
            key = (message.trial_id, lane_id, message.epoch)
            if key not in self._leaving:
                return []
            self._leaving.discard(key)
            return [TrialReleased(at, message.trial_id, lane_id)]
        trial = self._trials.get(message.trial_id)
        if trial is None or trial.epoch != message.epoch:
            return []
        return self._kept(trial, trial.hear(lane_id, message, at))

    def follow(self, event: Event) -> list[PoolAction]:
        """Looks at what lanes report of trials in one lane, which the engine sees, too."""
        if not isinstance(event, (IterationDone, TrialPaused, TrialFailed)):
            return []
        trial = self._trials.get(event.trial_id)
        if trial is not None:
            return self._kept(trial, trial.follow(event))
        if isinstance(event, TrialFailed):
            self._left.pop(event.trial_id, None)
        elif isinstance(event, IterationDone) and event.trial_id in self._left:
            self._left[event.trial_id] = 0 if event.finished else max(0, self._left[event.trial_id] - event.count)
        return []

    def lane_lost(self, lane_id: int) -> list[PoolAction]:
        """Goes on without a lane that is gone; the pool reports the loss."""
        self._leaving -= {key for key in self._leaving if key[1] == lane_id}
        lost = [self._kept(trial, trial.lane_lost(lane_id)) for trial in list(self._trials.values())]
        return list(itertools.chain.from_iterable(lost))

    def _open(self, command: OfTrial) -> ElasticTrial:
        here = command.old_lane_ids if isinstance(command, Resize) else command.lane_ids
        epoch = next(self._epochs)
        return ElasticTrial(
            command.trial_id,
            epoch=epoch,
            lanes=here,
            alone=here[0] if not isinstance(command, StartTrial) and len(here) == 1 else None,
            left=self._left.pop(command.trial_id, 0),
            outbox=Outbox(command.trial_id, epoch, self._process_group, self._clock, self._leaving),
            clock=self._clock,
            is_up=self._is_up,
        )

    def _kept(self, trial: ElasticTrial, actions: list[PoolAction]) -> list[PoolAction]:
        """Returns the actions; a trial that is back in one lane, or in none, is kept no longer."""
        if trial.closed:
            del self._trials[trial.trial_id]
            if trial.left:
                self._left[trial.trial_id] = trial.left
        return actions


def _is_wide(command: OfTrial) -> bool:
    """Whether a command is about several lanes."""
    if isinstance(command, Resize):
        return len(command.lane_ids) > 1 or len(command.old_lane_ids) > 1
    if isinstance(command, Pause):
        return len(command.next_lane_ids) > 1 or len(command.lane_ids) > 1
    return len(command.lane_ids) > 1 and not isinstance(command, StopTrial)
