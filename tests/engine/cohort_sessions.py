"""A session on the simulated backend whose trials take times that follow from their configs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import NotePlaced, ReportEnd
from fluid.engine.events import GroupSubmitted, TrialSpec
from fluid.measure.profile import Profile
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import Device
from fluid.testing.play import Session

Config = tuple[tuple[str, str], ...]


@dataclass
class CohortSession:
    """What a session did.

    Attributes:
        state: the engine at its end.
        makespan: seconds.
        placed: each trial's first place, in order.
        ends: trial -> how it ended.
    """

    state: EngineState
    makespan: float = 0.0
    placed: list[NotePlaced] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)

    def first_placed(self) -> dict[str, NotePlaced]:
        """The first place of each trial."""
        first: dict[str, NotePlaced] = {}
        for note in self.placed:
            first.setdefault(note.trial_id, note)
        return first


def run_cohorts(
    configs: Sequence[Config],
    seconds: Callable[[dict[str, str]], float],
    *,
    devices: int = 2,
    budget: int = 4,
    alpha: float = 1.3,
    max_packing: int = 1,
    profile: Profile | None = None,
    groups: int = 1,
    fusible: bool = False,
) -> CohortSession:
    """Runs trials of one profile key to their end, in one group, or in several that are submitted at once.

    Args:
        configs: of the trials ``t0``, ``t1``, ...
        seconds: per iteration alone on a device, by config.
    """
    by_id = {f"t{number}": dict(config) for number, config in enumerate(configs)}
    backend = SimulatedBackend(
        lambda trial_id, _: Truth(seconds(by_id[trial_id]), alpha=alpha), [Device(index) for index in range(devices)]
    )
    state = EngineState(make_planner("portfolio", c=max_packing, d=1), profile or Profile(), max_packing=max_packing)
    specs = [
        TrialSpec(f"t{number}", budget, profile_key="Net", config=config, fusible=fusible)
        for number, config in enumerate(configs)
    ]
    driven = Session(state, backend)
    for number in range(groups):
        driven.tell(GroupSubmitted(0.0, f"g{number}", tuple(specs[number::groups])))
    driven.run()
    session = CohortSession(state, placed=driven.told(NotePlaced))
    session.ends = {end.trial_id: end.state for end in driven.told(ReportEnd)}
    session.makespan = backend.now()
    return session
