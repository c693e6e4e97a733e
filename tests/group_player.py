"""A player of group policies: whole trials on devices of several kinds, one at a time on each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from fluid.policies.owners.shares import Job, plan_groups


@dataclass(frozen=True)
class PlayedGroup:
    """A group of alike trials of an owner of its own.

    Attributes:
        eligible: the kinds of devices that will do, as a bit mask.
        trials: how many.
        seconds: how long each takes.
        arrived: when it comes, seconds.
    """

    eligible: int
    trials: int
    seconds: float
    arrived: float = 0.0


@dataclass(frozen=True)
class Played:
    """What came of it, by group.

    Attributes:
        took: seconds from arrival to the last trial's end.
        fair: M x alone: seconds that the group would take alone, times the mean number of groups that were open
            while it was.
    """

    took: list[float]
    fair: list[float]

    @property
    def mean(self) -> float:
        """Mean seconds from arrival to end."""
        return sum(self.took) / len(self.took)

    @property
    def within_fair(self) -> float:
        """Share of the groups that took at most M x alone."""
        return sum(took <= fair * (1 + 1e-9) for took, fair in zip(self.took, self.fair, strict=True)) / len(self.took)

    @property
    def worst(self) -> float:
        """Largest ratio of the time a group took to M x alone."""
        return max(took / fair for took, fair in zip(self.took, self.fair, strict=True))


def alone(group: PlayedGroup, devices: Sequence[int]) -> float:
    """Seconds a group takes where there is no other one."""
    count = sum(number for kind, number in enumerate(devices) if group.eligible >> kind & 1)
    return -(-group.trials // count) * group.seconds


def play(policy: str, groups: Sequence[PlayedGroup], devices: Sequence[int], fairness: float = 0.0) -> Played:
    """Plays groups; plans anew at every arrival and at every end of a trial."""
    queued = [0] * len(groups)
    running = [0] * len(groups)
    ends_at = [0.0] * len(groups)
    free = list(devices)
    events = [(group.arrived, 0, number, -1) for number, group in enumerate(groups)]  # time, end?, group, kind
    heapq.heapify(events)
    solo = [alone(group, devices) for group in groups]
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, is_end, number, kind = heapq.heappop(events)
            if is_end:
                free[kind] += 1
                running[number] -= 1
                ends_at[number] = now
            else:
                queued[number] = groups[number].trials
        jobs = [
            Job(
                owner=number,
                eligible=group.eligible,
                demand=(queued[number] + running[number]) * group.seconds,
                waiting=queued[number],
                arrived=group.arrived,
                age=now - group.arrived,
                alone=solo[number],
            )
            for number, group in enumerate(groups)
            if queued[number] or running[number]
        ]
        if not any(job.waiting for job in jobs) or not any(free):
            continue
        plan = plan_groups(policy, jobs, devices, fairness)
        order = sorted((job.owner for job in jobs), key=lambda owner: plan.ranks[owner])
        for in_shares in (True, False):
            for number in order:
                group = groups[number]
                kinds = plan.shares[group.eligible] if in_shares else group.eligible
                for kind, count in enumerate(free):
                    started = min(count, queued[number]) if kinds >> kind & 1 else 0
                    free[kind] -= started
                    queued[number] -= started
                    running[number] += started
                    for _ in range(started):
                        heapq.heappush(events, (now + group.seconds, 1, number, kind))
    took = [end - group.arrived for end, group in zip(ends_at, groups, strict=True)]
    return Played(took, [_mean_open(number, groups, ends_at) * seconds for number, seconds in enumerate(solo)])


def _mean_open(number: int, groups: Sequence[PlayedGroup], ends_at: Sequence[float]) -> float:
    begin, end = groups[number].arrived, ends_at[number]
    together = sum(
        max(0.0, min(end, other_end) - max(begin, other.arrived))
        for other, other_end in zip(groups, ends_at, strict=True)
    )
    return together / (end - begin)
