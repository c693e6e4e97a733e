"""A trial in a lane, and the queue of those that have iterations left."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fluid.lane.member import LaneMember
from fluid.lane.policy import ResidentWork, choose, joining_service
from fluid.lane.process_state import Context
from fluid.trainables.resident import Resident

#: One that runs is run on unless another one is ahead by more seconds than this: a switch costs something.
SWITCH_SLACK_S = 0.05


@dataclass(slots=True, eq=False)
class ResidentTrial:
    """A trial in this lane.

    Attributes:
        key: of its trainable.
        iteration: iterations done.
        left: iterations still to run.
        finished: it said that it has no more to do; it runs no further, whatever is asked.
        unsaved: seconds of work since it was saved.
        save_cost: seconds the last save took; before there was one, the last of a trial of the same trainable.
        held: bytes it holds on the device between iterations.
        saves_itself: whether it is saved of the lane's own accord.
        pace: seconds per iteration, as last seen; ``None`` before the first.
        member: its part in what several lanes do together; ``None`` where it trains alone.
        service: seconds it was run for, as :mod:`fluid.lane.policy` counts them.
    """

    trial_id: str
    context: Context
    body: Resident | None = None
    key: int = -1
    iteration: int = 0
    left: int = 0
    finished: bool = False
    unsaved: float = 0.0
    save_cost: float = 0.0
    held: float = 0.0
    saves_itself: bool = field(default=False)
    pace: float | None = None
    service: float = 0.0
    member: LaneMember | None = None

    def took(self, seconds: float) -> None:
        """Notes what an iteration took."""
        self.pace = seconds if self.pace is None else 0.5 * (self.pace + seconds)
        self.service += seconds

    def work(self) -> ResidentWork:
        """What it has left to do, as the policies see it."""
        return ResidentWork(self.trial_id, None if self.pace is None else self.left * self.pace, self.service)


class WorkQueue(deque[ResidentTrial]):
    """Trials with iterations left, in the order in which they came. There is usually one."""

    def join(self, hosted: ResidentTrial) -> None:
        """Puts a trial in."""
        if self:
            hosted.service = joining_service([other.work() for other in self])
        self.append(hosted)

    def next(self, policy: str, current: ResidentTrial | None) -> ResidentTrial:
        """The trial to run for one iteration.

        Args:
            policy: one of those of :mod:`fluid.lane.policy`.
            current: the one that ran last.
        """
        if len(self) == 1:
            return self[0]
        works = [hosted.work() for hosted in self]
        last = None if current is None else current.trial_id
        return self[works.index(choose(policy, works, current=last, slack=SWITCH_SLACK_S))]
