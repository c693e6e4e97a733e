"""The engine's extension points: what a policy may do, and when. The core names no policy.

A policy is a feature beside the core: it is told of trials and of events, may keep devices from trials, may propose
changes to running trials, and acts at the phases of an instant. It gets the core, and calls no other policy, but where
devices that retire are drained: what two need is in the core. :mod:`fluid.policies.engine` has all of Fluid's own in
order. A point that no policy overrides costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from fluid.engine.commands import Report
from fluid.engine.events import Event, Failure, IterationDone, TrialStarted
from fluid.engine.placing.lanes import Company
from fluid.engine.placing.queue import PlannedTrials
from fluid.engine.records import GroupRecord, LaneRecord, TrialRecord

#: Refuses a request before anything changes; ``None`` for an event of the backend. Gets the event and the claims.
Check = Callable[[Any, Any], None]
Handler = Callable[[Any], None]
#: Returns the rows to be offered first, in order. Gets a width, and the lines of trials that are alike to placement:
#: row -> ticket, by ascending ticket.
Choice = Callable[[float, Sequence[Mapping[int, int]]], Sequence[int]]


class Preempt(NamedTuple):
    """Pause a running trial after its iteration.

    Attributes:
        trial: which.
        successor: the waiting trial that its devices are for; ``None`` for none in particular.
        why: for people; ``None`` where the successor says enough.
    """

    trial: TrialRecord
    successor: TrialRecord | None = None
    why: str | None = None


class Reallocate(NamedTuple):
    """Give a running trial another width, or another device.

    Attributes:
        trial: which.
        width: its new width.
        device: the idle device that it is to go to; ``None`` for any devices of that width.
    """

    trial: TrialRecord
    width: float
    device: int | None = None


Proposal = Preempt | Reallocate


class Policy:
    """A feature of the engine. A policy overrides the points that it needs; each does nothing by itself."""

    # -- events and deadlines --------------------------------------------------------------------------------

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """The events that it takes, each with its check; the core's own parts handle them first."""
        return {}

    def deadlines(self) -> Mapping[type, Handler]:
        """What handles a deadline that has come, by the type of its key."""
        return {}

    def woke_late(self) -> None:
        """An Alarm came so late that the driver was suspended: what lanes reported meanwhile was not read."""

    # -- what becomes of trials ------------------------------------------------------------------------------

    def opened(self, group: GroupRecord) -> None:
        """The session has a new group, without trials yet."""

    def submitted(self, trial: TrialRecord) -> None:
        """The session has a new trial."""

    def extended(self, trial: TrialRecord) -> None:
        """A trial that was done goes on."""

    def wanted_again(self, trial: TrialRecord) -> None:
        """A submitter waits again for a trial that was restored only to be called."""

    def started(self, trial: TrialRecord, event: TrialStarted) -> None:
        """A lane has set a trial up; one that was told to stop meanwhile is STOPPING."""

    def resumed(self, trial: TrialRecord) -> None:
        """A trial runs again in the lane that kept its state."""

    def resized(self, trial: TrialRecord) -> None:
        """A trial runs on other devices."""

    def observes(self, trial: TrialRecord, event: IterationDone) -> bool:
        """Whether it learns from an iteration of a trial in its own way; then the core does not."""
        return False

    def iterated(self, trial: TrialRecord, event: IterationDone, observed: int) -> None:
        """A trial has done an iteration, or a run of several, of which so many told its pace."""

    def left(self, trial: TrialRecord) -> None:
        """A trial has left its devices and lanes."""

    def forgotten(self, trial: TrialRecord) -> None:
        """The record of a trial that has ended is dropped."""

    def estimates_changed(self, keys: Set[str]) -> None:
        """More is known of the trials of these profile keys."""

    def reported(self, trial: TrialRecord, report: Report) -> None:
        """A trial's submitter is told of an iteration, or of a run of several."""

    # -- the queue -------------------------------------------------------------------------------------------

    def waits_for(self, trial: TrialRecord) -> str:
        """Why a trial may not be queued yet; empty if it may. The policy that gives a reason queues it later."""
        return ""

    def stateless(self, trial: TrialRecord, why: str) -> bool:
        """The state from which a trial was to start will not come; returns whether it goes on all the same."""
        return False

    @property
    def wants_planning(self) -> bool:
        """Whether :meth:`plan_anew` is to be asked."""
        return False

    def plan_anew(self) -> bool:
        """Brings up to date what it expects of trials; returns whether trials that were alike may differ now."""
        return False

    def reorder(self, plan: PlannedTrials, trials: Sequence[TrialRecord]) -> PlannedTrials:
        """The widths that the planner gives to trials, in the order in which they are to start."""
        return plan

    def begin_round(self) -> None:
        """Queued trials are about to be offered devices, in order."""

    @property
    def choice(self) -> Choice | None:
        """Chooses which rows are offered devices first; ``None`` if the order of the queue is right."""
        return None

    def end_round(self, refused: Sequence[TrialRecord]) -> None:
        """All that fits was placed in the order of a :attr:`choice`.

        Args:
            refused: trials that did not fit, one of those that are alike to placement.
        """

    def dispatched(self) -> None:
        """All that fits was placed; the lanes are told next."""

    # -- where a trial goes ----------------------------------------------------------------------------------

    @property
    def keeps_devices(self) -> bool:
        """Whether it keeps devices from some trials now."""
        return False

    @property
    def kept_devices(self) -> Set[int]:
        """All devices that it keeps from some trials."""
        return frozenset()

    def forbidden_to(self, trial: TrialRecord) -> Set[int]:
        """The devices that it keeps from a trial; asked only while it keeps any."""
        return frozenset()

    def kept_before(self, trial: TrialRecord) -> Set[int]:
        """The devices that it keeps for trials that do not start after this one."""
        return frozenset()

    def target_of(self, trial: TrialRecord) -> int | None:
        """The device that it has chosen for a trial without a state; ``None`` for none."""
        return None

    def rather(self, trial: TrialRecord, chosen: Sequence[int], allowed: Iterable[int]) -> Set[int] | None:
        """The devices that a trial of several should get instead of those that it just got; ``None`` for none."""
        return None

    def awaits(self, trial: TrialRecord) -> bool:
        """Whether a trial waits for the devices that :meth:`rather` has named, as they are busy."""
        return False

    def passed_over(self, trial: TrialRecord, allowed: Iterable[int]) -> None:
        """A trial of a fixed width does not fit now on the devices that it may get."""

    def company(self, trial: TrialRecord, devices: Sequence[int]) -> Company | None:
        """With which trials a trial may share a lane of the devices that it was given; ``None`` for none."""
        return None

    def placed(self, trial: TrialRecord) -> None:
        """A trial has its lanes."""

    def make_room(self) -> bool:
        """Clears devices for waiting trials; returns whether others may fit now."""
        return False

    @property
    def room_for(self) -> Mapping[int, int]:
        """Row of a waiting trial -> device, where kept states are to leave for it first."""
        return {}

    def give_up(self, is_emptying: Callable[[int], bool]) -> bool:
        """Keeps devices no longer for trials that do not start there; returns whether there were any.

        Args:
            is_emptying: whether states are about to leave a device.
        """
        return False

    @property
    def wait_until(self) -> float | None:
        """By when the queue is to be looked at again, seconds; ``None`` for no such time."""
        return None

    # -- states and lanes ------------------------------------------------------------------------------------

    def odds(self, trial: TrialRecord) -> float | None:
        """Probability that a trial goes on from its state; ``None`` if it does not know."""
        return None

    def excuses(self, trial: TrialRecord, failure: Failure, devices: tuple[int, ...]) -> bool:
        """Whether a failure that left a lane's devices unusable is blamed on them, and so does not count.

        Args:
            trial: a trial that raised there.
            failure: what it raised.
            devices: the lane's.
        """
        return False

    def takes_lost(self, lane: LaneRecord, *, blameless: bool) -> bool:
        """Whether a lane that was lost was its own, so that nothing else follows.

        Args:
            lane: the lane.
            blameless: whether what lanes depend on had failed, so that the next one may start.
        """
        return False

    def memory_short(self, device: int) -> None:
        """A trial, or a lane, found too little memory on a device."""

    # -- at every instant, in this order ---------------------------------------------------------------------

    def after_events(self) -> None:
        """All events of the instant have changed the records; nothing has started yet."""

    def propose(self) -> Iterable[Proposal]:
        """On a tick: the changes that it wants to running trials. What fits is started once all are made.

        The engine makes each before it takes the next one, and drops one for a trial that does not run any more.
        """
        return ()

    def exchange(self) -> Iterable[Proposal]:
        """On a tick, after that: which running trials make room for waiting ones."""
        return ()

    def after_settling(self) -> None:
        """All that fits has started, at an instant at which anything could."""

    def after_starts(self) -> None:
        """All that fits has started, or nothing could."""

    @property
    def wants_tick(self) -> bool:
        """Whether it wants a Tick soon, at which it may propose something."""
        return False

    def at_end(self) -> None:
        """The instant is over: the time to tell lanes and stores what they need to know."""

    # -- for tests (fluid.testing.policies) --------------------------------------------------------------------

    def problems(self) -> Iterator[str]:
        """What is broken of its invariants, which hold between any two events."""
        return iter(())


#: The points that the core asks one policy after another, by what each is.
_CALLS = tuple(name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_"))
_PROPERTIES = tuple(name for name, value in vars(Policy).items() if isinstance(value, property))


class Policies:
    """All policies, by the points that they override.

    Attributes:
        all: in order.

    Each point that is a method is an attribute with what to call, in order: ``for told in policies.submitted:
    told(trial)``. Each that is a property is one with the policies to ask.
    """

    all: tuple[Policy, ...]
    opened: tuple[Callable[[GroupRecord], None], ...]
    submitted: tuple[Callable[[TrialRecord], None], ...]
    wanted_again: tuple[Callable[[TrialRecord], None], ...]
    resumed: tuple[Callable[[TrialRecord], None], ...]
    resized: tuple[Callable[[TrialRecord], None], ...]
    reorder: tuple[Callable[[PlannedTrials, Sequence[TrialRecord]], PlannedTrials], ...]
    dispatched: tuple[Callable[[], None], ...]
    extended: tuple[Callable[[TrialRecord], None], ...]
    started: tuple[Callable[[TrialRecord, TrialStarted], None], ...]
    observes: tuple[Callable[[TrialRecord, IterationDone], bool], ...]
    iterated: tuple[Callable[[TrialRecord, IterationDone, int], None], ...]
    reported: tuple[Callable[[TrialRecord, Report], None], ...]
    waits_for: tuple[Callable[[TrialRecord], str], ...]
    stateless: tuple[Callable[[TrialRecord, str], bool], ...]
    left: tuple[Callable[[TrialRecord], None], ...]
    forgotten: tuple[Callable[[TrialRecord], None], ...]
    estimates_changed: tuple[Callable[[Set[str]], None], ...]
    woke_late: tuple[Callable[[], None], ...]
    wants_planning: tuple[Policy, ...]
    plan_anew: tuple[Callable[[], bool], ...]
    begin_round: tuple[Callable[[], None], ...]
    choice: tuple[Policy, ...]
    end_round: tuple[Callable[[Sequence[TrialRecord]], None], ...]
    keeps_devices: tuple[Policy, ...]
    kept_before: tuple[Callable[[TrialRecord], Set[int]], ...]
    target_of: tuple[Callable[[TrialRecord], int | None], ...]
    rather: tuple[Callable[[TrialRecord, Sequence[int], Iterable[int]], Set[int] | None], ...]
    awaits: tuple[Callable[[TrialRecord], bool], ...]
    passed_over: tuple[Callable[[TrialRecord, Iterable[int]], None], ...]
    placed: tuple[Callable[[TrialRecord], None], ...]
    make_room: tuple[Callable[[], bool], ...]
    room_for: tuple[Policy, ...]
    give_up: tuple[Callable[[Callable[[int], bool]], bool], ...]
    wait_until: tuple[Policy, ...]
    odds: tuple[Callable[[TrialRecord], float | None], ...]
    company: tuple[Callable[[TrialRecord, Sequence[int]], Company | None], ...]
    excuses: tuple[Callable[[TrialRecord, Failure, tuple[int, ...]], bool], ...]
    takes_lost: tuple[Callable[..., bool], ...]
    memory_short: tuple[Callable[[int], None], ...]
    after_events: tuple[Callable[[], None], ...]
    propose: tuple[Callable[[], Iterable[Proposal]], ...]
    exchange: tuple[Callable[[], Iterable[Proposal]], ...]
    after_settling: tuple[Callable[[], None], ...]
    after_starts: tuple[Callable[[], None], ...]
    wants_tick: tuple[Policy, ...]
    at_end: tuple[Callable[[], None], ...]

    def __init__(self) -> None:
        self.register(())

    def register(self, policies: Iterable[Policy]) -> None:
        """Takes all policies of a session, in the order in which they are asked."""
        self.all = tuple(policies)
        for name in _CALLS:
            setattr(self, name, tuple([getattr(each, name) for each in self.all if _overrides(each, name)]))
        for name in _PROPERTIES:
            setattr(self, name, tuple([each for each in self.all if _overrides(each, name)]))

    def company_of(self, trial: TrialRecord, devices: Sequence[int]) -> Company | None:
        """With which trials a trial may share a lane of these devices, as the first policy says that lets it."""
        for company in self.company:
            found = company(trial, devices)
            if found is not None:
                return found
        return None

    def all_kept_devices(self) -> frozenset[int]:
        """All devices that any policy keeps from some trials."""
        return frozenset().union(*(each.kept_devices for each in self.keeps_devices))


def _overrides(policy: Policy, point: str) -> bool:
    return getattr(type(policy), point) is not getattr(Policy, point)
