"""Which trials of a fake lane take their next step together, and in how many seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluid.engine.commands import Fork
from fluid.engine.events import TrialSpec


@dataclass
class Hosted:
    """A trial in a lane."""

    lanes: tuple[int, ...]
    done: int = 0
    left: int = 0
    finished: bool = False
    #: Whether its code never returns: nothing but a kill ends it.
    hung: bool = False
    called: list[int] = field(default_factory=list)
    #: The request whose answer its code waits for.
    asking: int | None = None
    #: Trials of one key can take their steps together; ``None`` for one that cannot.
    fusion_key: str | None = None
    #: The lane's step in which it took part last.
    turn: int = 0
    #: What is to start from a state of it, and does not yet.
    forks: list[Fork] = field(default_factory=list)


@dataclass
class Rows:
    """What a lane knows of the trials that it trains together.

    Attributes:
        limit: most trials in one step, as the engine has set it.
        found: the same by fusion key, as the lane has found it.
        steps: so far.
        members: those that took the latest step.
    """

    limit: int = 1_000_000
    found: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    members: tuple[str, ...] = ()

    def next_step(self, lane_id: int, hosted: dict[str, Hosted]) -> list[str]:
        """The trials that take the next step: those that wait longest, as many as fit of one fusion key."""
        ready = [name for name, trial in hosted.items() if trial.left and trial.lanes[0] == lane_id]
        if len(ready) < 2:
            return ready
        ready.sort(key=lambda name: hosted[name].turn)
        first = hosted[ready[0]]
        if first.fusion_key is None or first.lanes != (lane_id,):
            return ready[:1]
        alike = [name for name in ready if hosted[name].fusion_key == first.fusion_key]
        alike = [name for name in alike if hosted[name].lanes == (lane_id,) and not hosted[name].finished]
        return alike[: self.most(first.fusion_key)] if ready[0] in alike else ready[:1]

    def most(self, key: str) -> int:
        """Most trials of a key in one step."""
        return max(1, min(self.limit, self.found.get(key, self.limit)))

    def count_step(self, names: list[str], hosted: dict[str, Hosted]) -> bool:
        """Counts a step; returns whether its seconds say something, as none has come or gone since the last one."""
        self.steps += 1
        for name in names:
            if name in hosted:
                hosted[name].turn = self.steps
        before, self.members = self.members, tuple(sorted(names))
        return before == self.members or (len(names) == 1 and len(before) < 2)


def shape_of(spec: TrialSpec) -> str | None:
    """The fusion key that a lane finds for a trial: its profile key, and its ``width``."""
    return f"{spec.profile_key}, width {dict(spec.config).get('width')}" if spec.fusible else None
