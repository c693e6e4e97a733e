"""A trial that waits for its turn leaves its lane only for a further one that it then gets."""

from __future__ import annotations

from fluid import Device
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Pause
from fluid.engine.events import GroupSubmitted, TrialSpec
from fluid.measure.profile import Profile
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.resources import MemoryNeed
from fluid.testing.play import Session


def profile(**beside: float) -> Profile:
    """A profile that knows how many seconds iterations of these keys take beside another trial, and 10 alone."""
    made = Profile()
    for key, seconds in beside.items():
        for _ in range(8):
            made.observe(key, 10.0)
            made.observe(key, seconds, co_residents=2)
    return made


def pauses(
    known: Profile, keys: tuple[str, ...], budgets: dict[str, int], memory: float | None, need: MemoryNeed | None
) -> int:
    """Runs trials of these keys in turns on one device; returns how often any of them paused.

    Without the bound on steps, trials that leave and come back for ever would hang the test.
    """
    device = Device(0, memory_bytes=memory)
    backend = SimulatedBackend(lambda trial_id, config: Truth(10.0, 1.05), [device], record=False)
    engine = EngineState(make_planner("portfolio", c=2, d=1), known, turns=4, max_packing=2)
    trials = tuple(
        TrialSpec(f"{key}{number}", budgets[key], profile_key=key, memory=need) for number, key in enumerate(keys)
    )
    session = Session(engine, backend)
    session.tell(GroupSubmitted(0.0, "group", trials))
    for _ in range(100):
        if session.is_over:
            return len(session.told(Pause))
        session.step()
    raise AssertionError(f"at {backend.now():g} s, trials have not ended; they paused {len(session.told(Pause))} times")


def test_only_a_trial_whose_own_key_pays_leaves_for_a_further_lane() -> None:
    known, keys = profile(pays=10.5, hurts=30.0), ("pays", "pays", "hurts")
    assert pauses(known, keys, {"pays": 4, "hurts": 4}, None, None) == 1


def test_a_trial_stays_where_a_further_lane_does_not_fit() -> None:
    known, keys = profile(known=10.5), ("new", "new", "known")
    assert pauses(known, keys, {"new": 9, "known": 4}, 8.0, MemoryNeed(1.0, 3.0)) == 0
