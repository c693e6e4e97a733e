"""The suite for policies of one's own: random sessions in which much goes wrong, and what must hold after each event.

A test module derives a class from :class:`PolicyConformance`, which pytest then runs like any other; a program calls
:meth:`PolicyConformance.check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from fluid.engine.core import SessionState
from fluid.engine.events import TrialForgotten
from fluid.engine.policy import Policy, Preempt, Proposal, Reallocate
from fluid.engine.records import TrialRecord
from fluid.testing.random_sessions import RandomSession, random_session
from fluid.testing.suite import Suite

#: The first row of a trial: so high that it is taken for neither a device nor a count.
_FIRST_ROW = 1_000_000


class PolicyConformance(Suite):
    """What holds for every policy beside Fluid's own. A class of one's own makes the policy.

    The sessions are those that Fluid's own policies are tested with. A failure names the seed of the session, and the
    event; :func:`fluid.testing.random_sessions.random_session` plays one session again.

    Attributes:
        seeds: of the sessions.
        steps: random steps of each, before it is brought to its end.
        options: of the engine (:class:`fluid.policies.engine.EngineState`).

    Example:
        >>> from fluid.engine.policy import Policy
        >>> from fluid.testing.policies import PolicyConformance
        >>> class TestNothing(PolicyConformance):
        ...     seeds = range(1)
        ...
        ...     def make_policy(self, core):
        ...         return Policy()
        >>> TestNothing.check()
        []
    """

    seeds: Sequence[int] = range(20)
    steps = 200
    options: Mapping[str, Any] = {}

    def make_policy(self, core: SessionState) -> Policy:
        """Returns a new policy for a session.

        Args:
            core: of the session's engine.
        """
        raise NotImplementedError("a suite of one's own makes its policy")

    def play(self, seed: int) -> tuple[RandomSession, Policy]:
        """Plays a session with the policy, to its end; returns both.

        Raises:
            AssertionError: something is wrong; it names the seed, and the event.
        """
        made: list[Policy] = []

        def make(core: SessionState) -> Policy:
            core.trials._rows = _FIRST_ROW
            made.append(self.make_policy(core))
            _watch(made[0], core)
            return made[0]

        return random_session(seed, self.steps, further=[make], **self.options), made[0]

    # -- tests -----------------------------------------------------------------------------------------------

    def test_every_invariant_holds_after_each_event_and_every_trial_ends(self) -> None:
        for seed in self.seeds:
            self.play(seed)

    def test_the_same_session_is_decided_in_the_same_way(self) -> None:
        """A policy asks neither the time of day nor chance: what happened is decided again after a crash."""
        for seed in self.seeds:
            first, second = (self.play(seed)[0].told for _ in range(2))
            for number, (one, other) in enumerate(zip(first, second, strict=False), start=1):
                assert repr(one) == repr(other), (
                    f"session of seed {seed}: event {number}, {one[0]}, is decided in two ways:\n{one[1]}\n{other[1]}"
                )
            assert len(first) == len(second), f"session of seed {seed}: it is played in two ways"

    def test_nothing_is_kept_of_trials_that_are_forgotten(self) -> None:
        """Sessions last for weeks."""
        for seed in self.seeds:
            session, policy = self.play(seed)
            for trial_id, trial in [*session.state.trials.items()]:
                if trial.state.ended:
                    session.handle(TrialForgotten(session.backend.now, trial_id))
            kept = [*trials_in(policy, session.state.trials.by_row)]
            assert not kept, f"session of seed {seed}: the policy keeps trials that were forgotten: {kept[:5]}"


def _watch(policy: Policy, core: SessionState) -> None:
    """Has what a policy proposes checked."""
    for point in ("propose", "exchange"):
        if getattr(type(policy), point) is not getattr(Policy, point):
            setattr(policy, point, _Checked(policy, point, core))


class _Checked:
    """Proposals of a policy at a point, each of which is checked as the engine takes it."""

    def __init__(self, policy: Policy, point: str, core: SessionState) -> None:
        self._propose, self._core = getattr(policy, point), core
        self._name = f"{type(policy).__name__}.{point}"

    def __call__(self) -> Iterator[Proposal]:
        for proposal in self._propose():
            assert isinstance(proposal, (Preempt, Reallocate)), f"{self._name} proposes {proposal!r}"
            known = self._core.trials.by_row.get(proposal.trial.row)
            assert known is proposal.trial, f"{self._name} proposes {proposal}: the session has no such trial"
            yield proposal


def trials_in(value: object, live: Mapping[int, TrialRecord]) -> Iterator[str]:
    """What a policy holds of trials that are not there: their records, ids and rows, in containers and own objects.

    Args:
        value: the policy, after a session of a :class:`PolicyConformance`.
        live: the records that there are, by row.
    """
    return _trials_in(value, live, set())


def _trials_in(value: object, live: Mapping[int, TrialRecord], seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    if isinstance(value, TrialRecord):
        if live.get(value.row) is not value:
            yield f"the record of {value.trial_id!r}"
    elif isinstance(value, int):
        if value > _FIRST_ROW and value not in live:
            yield f"row {value}"
    elif isinstance(value, str):
        if value[:1] == "t" and value[1:].isdigit() and value not in {trial.trial_id for trial in live.values()}:
            yield f"the id {value!r}"
    elif not isinstance(value, SessionState):
        seen.add(id(value))
        for inner in _inside(value):
            yield from _trials_in(inner, live, seen)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (Sequence, Set)) and not isinstance(value, (bytes, range)):
        return [*value]
    if type(value).__module__.startswith("fluid.") and not isinstance(value, Policy):
        return ()  # What it was given of the engine.
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
