"""What follows from a shared folder's log: who takes part, who has which trial, and what of all that is told counts.

Pure: no IO, no clock. Every member applies the same entries in the same order, and so has the same state; what a member
does with it, such as asking for a trial, it tells by an entry of its own, which may come too late.

A trial is the member's whose :class:`~fluid.joint.entries.Claimed` or :class:`~fluid.joint.entries.Begun` came first.
The number of that entry is the trial's *lease*, a fencing token: a member that was paused, and was taken for dead
meanwhile, tells of its trials under leases that are out of date, and that does not count, whatever it wrote and when.
So an iteration counts once: under the lease that holds, and only if it follows on the last one that counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fluid.joint.entries import (
    Begun,
    Claimed,
    Ended,
    Extended,
    Founded,
    Item,
    Iterated,
    Joined,
    Left,
    Lost,
    OtherCode,
    Released,
    Started,
    StopAsked,
    Submitted,
    TrialFrame,
    Wants,
)

#: Times that a trial may take its member with it, without an iteration in between, before it counts as failed.
MOST_LOSSES = 3
#: States in which a trial is over for good; one that is DONE may be extended.
_OVER = ("STOPPED", "INFEASIBLE", "FAILED")


@dataclass(slots=True)
class Member:
    """A member, by its name of now.

    Attributes:
        name: its name.
        joined: what it said of itself.
        number: its place among all that joined, from 0.
        gone: why it takes part no more; empty while it does.
        wants: devices for which it has nothing to run.
        trials: those that it has, by id, as keys.
    """

    name: str
    joined: Joined
    number: int
    gone: str = ""
    wants: int = 0
    trials: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Tenure:
    """The time that a trial was a member's: under it, iterations counted up to ``reported``."""

    member: str
    lease: int
    reported: int


@dataclass(slots=True)
class JointTrial:
    """A trial of which the log tells.

    Attributes:
        trial_id, group: its id, and its group's name.
        lease, holder: the number of the lease that holds, and its member; ``None`` if no member has the trial.
        reported: iterations that count.
        pace_s: seconds that the last of them took; 0 before.
        ended: ``DONE``, ``STOPPED`` or ``FAILED``; empty while it has not ended. DONE also once it was extended.
        by_itself: whether it has no more to do.
        runs: whether its holder has it running.
        losses: how often it took its holder with it since its last iteration.
        tenures: whose it was so far, in order.
    """

    trial_id: str
    group: str
    lease: int | None = None
    holder: str | None = None
    reported: int = 0
    pace_s: float = 0.0
    ended: str = ""
    by_itself: bool = False
    runs: bool = False
    losses: int = 0
    tenures: list[Tenure] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether it cannot go on."""
        return self.ended in _OVER


@dataclass(slots=True)
class Gone:
    """A member takes part no more, and other members may claim its trials.

    Attributes:
        member: its name.
        trials: ids of those that it had.
        is_lost: whether it did not say so itself.
        reason: for people.
    """

    member: str
    trials: tuple[str, ...]
    is_lost: bool
    reason: str = ""


@dataclass(slots=True)
class BegunTrial:
    """A trial of a sweep has begun; it is its member's.

    Attributes:
        trial: the trial.
        writer: the member that told of it.
        begun: what it told.
    """

    trial: JointTrial
    writer: str
    begun: Begun


#: What came of an item that counts.
Fact = Item | Gone | BegunTrial


class JointState:
    """The state that a log leads to.

    Attributes:
        members: by name, also those that are gone.
        trials: by id.
        founded: what the members of each group agree on, by its name.
        submitted: texts of what trials are that programs have submitted by themselves, by id.
        other_code: what differs in the code of a member from that of a group's first one, by the names of both.
        begun: how many trials of each sweep have begun, by its name.
        budgets: iterations that submitters have let trials run in all, by id.
        stops: ids of trials that are to run no further, with the outcome.
        pace_s: seconds that an iteration took in the mean, so far; 0 before the first.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.trials: dict[str, JointTrial] = {}
        self.founded: dict[str, Founded] = {}
        self.submitted: dict[str, str] = {}
        self.other_code: dict[tuple[str, str], tuple[str, ...]] = {}
        self.begun: dict[str, int] = {}
        self.budgets: dict[str, int] = {}
        self.stops: dict[str, str] = {}
        self.pace_s = 0.0
        self._paces = 0
        #: Who has founded each group.
        self._founders: dict[str, str] = {}
        #: How many trials have not ended, by group.
        self._open = Counter[str]()

    @property
    def present(self) -> list[Member]:
        """The members that take part."""
        return [member for member in self.members.values() if not member.gone]

    @property
    def notes(self) -> list[str]:
        """What readers of the results must know."""
        return [
            f"{group}: driver {member} ran other code than the first one: {', '.join(names)}."
            for (group, member), names in list(self.other_code.items())
        ]

    def apply(self, number: int, writer: str, item: Item) -> Iterator[Fact]:
        """Applies an item of an entry; gives what came of it, nothing if it does not count.

        Args:
            number: of the entry.
            writer: the member that wrote it.
            item: the item.
        """
        member = self.members.get(writer)
        if isinstance(item, Joined):
            if member is None:
                self.members[writer] = Member(writer, item, len(self.members))
                yield item
            return
        if member is None or member.gone:
            return  # It was taken for dead, or has said that it is gone.
        if isinstance(item, TrialFrame):
            trial = self.trials.get(item.trial_id)
            if trial is not None and trial.lease == item.lease and trial.holder == writer and not trial.is_over:
                yield from self._of_trial(trial, item)
        elif isinstance(item, Lost):
            lost = self.members.get(item.member)
            if lost is not None and not lost.gone:
                yield from self._gone(lost, item.reason or "it gave no sign of life", is_lost=True)
        elif isinstance(item, Left):
            yield from self._gone(member, "it has left", is_lost=False)
        elif isinstance(item, Founded):
            if item.group not in self.founded:
                self.founded[item.group] = item
                self._founders[item.group] = writer
                yield item
        elif isinstance(item, Submitted):
            for trial_id, text in item.trials.items():
                self.submitted.setdefault(trial_id, text)
            yield item
        elif isinstance(item, OtherCode):
            self.other_code[item.group, writer] = item.names
            yield item
        elif isinstance(item, Begun):
            yield from self._begun(number, member, item)
        elif isinstance(item, Claimed):
            trial = self.trials.get(item.trial_id)
            if trial is None:
                trial = self.trials[item.trial_id] = JointTrial(item.trial_id, item.group)
            if trial.lease is None and not trial.is_over:
                self._lend(trial, number, member)
                yield item
        elif isinstance(item, Wants):
            member.wants = item.devices
            yield item
        elif isinstance(item, Extended):
            if item.budget > self.budgets.get(item.trial_id, 0):
                self.budgets[item.trial_id] = item.budget
                yield item
        elif isinstance(item, StopAsked) and item.trial_id not in self.stops:
            self.stops[item.trial_id] = item.outcome
            yield item

    def _begun(self, number: int, member: Member, item: Begun) -> Iterator[Fact]:
        place = self.begun.get(item.group, 0)
        if item.group not in self.founded or (item.most is not None and place >= item.most):
            return
        if item.is_free and self._founders[item.group] != member.name:
            return  # They came with what another member has founded first, perhaps otherwise.
        if item.under_way is not None and self._open[item.group] >= item.under_way:
            return  # Another member has begun one at the same time.
        self.begun[item.group] = place + 1
        trial = JointTrial(f"{item.group}-{place:05d}", item.group)
        if trial.trial_id in self.trials:
            return
        self.trials[trial.trial_id] = trial
        self._open[item.group] += 1
        # Several begin in one entry: each has the lease of its own trial, which the entry's number is enough for.
        if not item.is_free:
            self._lend(trial, number, member)
        yield BegunTrial(trial, member.name, item)

    def _lend(self, trial: JointTrial, lease: int, member: Member) -> None:
        trial.lease, trial.holder, trial.runs = lease, member.name, False
        trial.tenures.append(Tenure(member.name, lease, trial.reported))
        member.trials[trial.trial_id] = None

    def _of_trial(self, trial: JointTrial, item: TrialFrame) -> Iterator[Fact]:
        if isinstance(item, Started):
            trial.runs = True
            yield item
        elif isinstance(item, Iterated):
            if item.iteration - len(item.metrics) == trial.reported and item.metrics:
                trial.reported = trial.tenures[-1].reported = item.iteration
                self._open[trial.group] += bool(trial.ended)
                trial.ended, trial.losses, trial.runs, trial.pace_s = "", 0, True, item.seconds[-1]
                self._paces += 1
                self.pace_s += (trial.pace_s - self.pace_s) / self._paces
                yield item
        elif isinstance(item, Ended):
            self._open[trial.group] -= not trial.ended
            trial.ended, trial.by_itself, trial.runs = item.state, item.by_itself, False
            if trial.is_over:
                self._take_back(trial)
            yield item
        elif isinstance(item, Released):
            self._take_back(trial)
            yield item

    def _take_back(self, trial: JointTrial) -> None:
        if trial.holder is not None:
            self.members[trial.holder].trials.pop(trial.trial_id, None)
        trial.lease = trial.holder = None
        trial.runs = False

    def _gone(self, member: Member, reason: str, *, is_lost: bool) -> Iterator[Fact]:
        member.gone, member.wants = reason, 0
        taken = [self.trials[trial_id] for trial_id in member.trials]
        failed = []
        for trial in taken:
            if is_lost and trial.runs:
                trial.losses += 1
                if trial.losses >= MOST_LOSSES:
                    failed.append(trial)
            self._take_back(trial)
        yield Gone(member.name, tuple(trial.trial_id for trial in taken), is_lost, reason)
        for trial in failed:
            self._open[trial.group] -= not trial.ended
            trial.ended = "FAILED"
            text = f"{MOST_LOSSES} drivers in a row were lost while they ran it, without an iteration in between"
            yield Ended(trial.trial_id, -1, state="FAILED", iteration=trial.reported, kind="lane_lost", message=text)
