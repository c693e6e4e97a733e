"""The suite for policies of one's own finds those that are broken, and names the seed and the event."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fluid.engine.core import SessionState
from fluid.engine.events import GroupSubmitted, TrialForgotten, TrialSpec
from fluid.engine.policy import Policy, Preempt, Proposal
from fluid.engine.records import TrialRecord
from fluid.planners.portfolio import make_planner
from fluid.policies.engine import EngineState
from fluid.testing.policies import PolicyConformance, trials_in

#: Sessions in which trials come and go.
SEEDS = range(3)


def suite_of(make: Callable[[SessionState], Policy]) -> PolicyConformance:
    class Case(PolicyConformance):
        seeds = SEEDS

        def make_policy(self, core: SessionState) -> Policy:
            return make(core)

    return Case()


class Broken(Policy):
    """One that has the core, and does nothing yet."""

    def __init__(self, core: SessionState) -> None:
        self.core = core


class KeepsAll(Broken):
    """Keeps all devices for ever."""

    keeps_devices = True

    @property
    def kept_devices(self) -> set[int]:
        return set(self.core.occupancy.residents)

    def forbidden_to(self, trial: TrialRecord) -> set[int]:
        return self.kept_devices


class Raises(Broken):
    """Raises once trials have done a few iterations."""

    def iterated(self, trial: TrialRecord, *more: Any) -> None:
        if trial.progress.done > 2:
            raise KeyError("no such trial")


class Foreign(Broken):
    """Proposes something for a trial of another session."""

    def __init__(self, core: SessionState) -> None:
        super().__init__(core)
        other = EngineState(make_planner("fifo"))
        other.handle(GroupSubmitted(0.0, "g", (TrialSpec("t1", 1),)))
        self.trial = other.trials["t1"]

    def propose(self) -> list[Proposal]:
        return [Preempt(self.trial)]


class BreaksItsRules(Broken):
    """Says itself that it is broken."""

    def problems(self) -> Iterator[str]:
        if self.core.trials:
            yield "there are trials"


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (KeepsAll, r"waits|stuck|DONE|QUEUED"),
        (Raises, "no such trial"),
        (Foreign, r"Foreign\.propose proposes .*the session has no such trial"),
        (BreaksItsRules, "there are trials"),
    ],
)
def test_a_policy_that_breaks_a_session_is_found(broken: Callable[[SessionState], Policy], what: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)session of seed \d+: .*{what}") as found:
        suite_of(broken).test_every_invariant_holds_after_each_event_and_every_trial_ends()
    assert broken is KeepsAll or "event " in str(found.value)


class ByChance(Broken):
    """Pauses trials by chance."""

    def propose(self) -> list[Proposal]:
        running = [trial for trial in self.core.trials.values() if trial.state.holds_devices]
        return [Preempt(trial) for trial in running if random.random() < 0.5]


class ByTheClock(Broken):
    """Pauses trials depending on the time of day."""

    def propose(self) -> list[Proposal]:
        running = [trial for trial in self.core.trials.values() if trial.state.holds_devices]
        return [Preempt(trial) for trial in running if time.perf_counter_ns() // 1000 % 2]


@pytest.mark.parametrize("moody", [ByChance, ByTheClock])
def test_a_policy_whose_decisions_cannot_be_repeated_is_found(moody: Callable[[SessionState], Policy]) -> None:
    with pytest.raises(AssertionError, match=r"session of seed \d+: event \d+, .* is decided in two ways"):
        suite_of(moody).test_the_same_session_is_decided_in_the_same_way()


class Hoards(Broken):
    """Keeps something of each trial, whatever becomes of it."""

    def __init__(self, core: SessionState, what: str) -> None:
        super().__init__(core)
        self.what, self.seen = what, dict[object, list[object]]()

    def submitted(self, trial: TrialRecord) -> None:
        self.seen[len(self.seen)] = [trial if self.what == "record" else getattr(trial, self.what)]


class Forgets(Hoards):
    """Keeps it while the session knows the trial."""

    def submitted(self, trial: TrialRecord) -> None:
        self.seen[trial.row] = [trial, trial.trial_id]

    def forgotten(self, trial: TrialRecord) -> None:
        del self.seen[trial.row]


@pytest.mark.parametrize("what", ["record", "trial_id", "row"])
def test_a_policy_that_keeps_what_was_forgotten_is_found(what: str) -> None:
    suite = suite_of(lambda core: Hoards(core, what))
    with pytest.raises(AssertionError, match=r"session of seed \d+: the policy keeps trials that were forgotten"):
        suite.test_nothing_is_kept_of_trials_that_are_forgotten()


def test_a_sound_policy_passes() -> None:
    assert type(suite_of(lambda core: Forgets(core, ""))).check() == []


@pytest.mark.parametrize("seed", range(4))
def test_fluids_own_policies_keep_nothing_of_forgotten_trials(seed: int) -> None:
    session, _ = suite_of(Broken).play(seed)
    for trial_id, trial in [*session.state.trials.items()]:
        if trial.state.ended:
            session.handle(TrialForgotten(session.backend.now, trial_id))
    assert not [*trials_in([vars(policy) for policy in session.state.policies], session.state.trials.by_row)]
