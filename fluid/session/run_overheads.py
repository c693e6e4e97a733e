"""What trials hold devices for beside their iterations: to be set up, to be told to go on, to be stopped."""

from __future__ import annotations

from dataclasses import dataclass

from fluid.engine.engine import EngineState
from fluid.session.status import GroupFacts


@dataclass(slots=True)
class _TimeHeld:
    """Of one group.

    Attributes:
        at: when it was looked at last, seconds.
        holders: trials that held devices then.
        held: trial-seconds of holding devices so far.
    """

    at: float
    holders: int
    held: float


class RunOverheads:
    """Measures overheads, from how many trials hold devices each time that a group is looked at.

    Args:
        state: the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._groups: dict[str, _TimeHeld] = {}

    def per_run(self, group_id: str, facts: GroupFacts, now: float) -> float:
        """Looks at a group; returns the seconds of overhead each time that one of its trials started or went on.

        Args:
            group_id: the group.
            facts: what its session knows of it.
            now: the time, seconds.
        """
        record = self._state.groups[group_id]
        holders, in_flight = 0, 0.0
        runs = 1 + sum(number for trial, number in record.ended.items() if trial.done > 0)
        for trial in record.live.values():
            runs += trial.progress.done > 0
            # In a lane that no trial had used it loads everything; those that come there start faster. One with a lane
            # of its own waits for the start of that, each time; but the first ones also wait for the fork server, once.
            if not trial.state.holds_devices or trial.starts_cold:
                continue
            if trial.spec.isolated or trial.placement.launched:
                holders += 1
                if trial.placement.iterates:
                    in_flight += max(0.0, now - trial.placement.since)
        group = self._groups.get(group_id)
        if group is None:
            began = now if facts.first_start is None else facts.first_start
            group = self._groups[group_id] = _TimeHeld(began, holders, 0.0)
        group.held += max(0.0, now - group.at) * 0.5 * (holders + group.holders)
        group.at, group.holders = now, holders
        runs += record.past.total()
        return max(0.0, group.held - facts.result_seconds - in_flight) / runs
