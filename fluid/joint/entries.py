"""What members of a shared folder tell each other: the frames of the log's entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluid.trainables.trainable_code import TrainableCode
from fluid.trainables.usage import NO_USAGE, Usage
from fluid.wire import Frame, decoder, encode


class Wrote(Frame, frozen=True):
    """Begins an entry: who wrote it.

    Attributes:
        member: the member's name.
        number: of the member's entries, so that no two are alike.
    """

    member: str
    number: int


class Joined(Frame, frozen=True, kw_only=True):
    """The member takes part from now on. One that was taken for dead takes part again by another name.

    Attributes:
        folder: its folder's name, in ``members/``.
        host, pid: where it runs, for people.
        process: names the process for others on its machine: see :func:`fluid.processes.identity.own_process`.
        devices: the kinds of its devices, by their numbers.
        version: of its Fluid.
    """

    folder: str
    host: str
    pid: int
    process: str
    devices: Mapping[int, str]
    version: str


class Left(Frame, frozen=True):
    """The member takes part no more: others may go on with its trials."""


class Lost(Frame, frozen=True):
    """A member gives no sign of life: others may go on with its trials, and what it still tells does not count.

    Attributes:
        member: its name.
        reason: how that was seen, for people.
    """

    member: str
    reason: str = ""


class Founded(Frame, frozen=True):
    """What all members of a group must agree on. The first one counts; a member that was given something else ends.

    Attributes:
        group: its name.
        arguments: those of a sweep's call, as texts, by name.
        seeds: what the seeds of a sweep's trials follow from: see :class:`fluid.random_state.SeedOrigin`.
        codes: of what the trials run, and of functions in the sweep's space, by what they are for.
    """

    group: str
    arguments: Mapping[str, str]
    seeds: tuple[str, ...] = ()
    codes: Mapping[str, TrainableCode] = {}


class Submitted(Frame, frozen=True):
    """A member's program has submitted trials; all programs must submit the same ones.

    Attributes:
        group: of a name that is no sweep's.
        trials: texts of what they are, by id; of each trial the first one counts.
    """

    group: str
    trials: Mapping[str, str]


class OtherCode(Frame, frozen=True):
    """The member's trials run other code than those of the group's first member.

    Attributes:
        group: its name.
        names: some of the functions, classes and values that differ.
    """

    group: str
    names: tuple[str, ...]


class Begun(Frame, frozen=True):
    """The sweep's next trial begins: it has the number of those that began before it.

    Attributes:
        group: the sweep's name.
        config: its hyperparameters, where they do not follow from what all members agree on.
        most: trials that the sweep has at most; ``None`` for no limit.
        is_free: whether any member may claim it, as of those that begin with the sweep; else it is the one's that tells
            this.
        under_way: most trials of the sweep that have begun and not ended; ``None`` for no limit.
    """

    group: str
    config: Any = None
    most: int | None = None
    is_free: bool = False
    under_way: int | None = None


class Claimed(Frame, frozen=True):
    """The member is to run a trial that no other one has. The number of the entry is that of its lease."""

    group: str
    trial_id: str


class TrialFrame(Frame, frozen=True):
    """What a member tells of a trial that it has.

    Attributes:
        trial_id: the trial.
        lease: the number of the member's lease. What is told under one that is out of date does not count.
    """

    trial_id: str
    lease: int


class Started(TrialFrame, frozen=True):
    """The trial runs: what becomes of the member now may be its doing."""


class Iterated(TrialFrame, frozen=True, kw_only=True):
    """The trial has finished iterations, the last of which is named; each has an item in the lists.

    Attributes:
        metrics: what it reported, JSON as ``results.jsonl`` has it.
        seconds: how long each took.
        at: when the last one ended, seconds on the member's own clock, which tells how far apart its iterations are.
        ages: how many seconds before that each ended.
        width, device_ids, rows, usage: see :class:`fluid.engine.commands.Report`; the devices are the member's.
    """

    iteration: int
    metrics: tuple[str, ...]
    seconds: tuple[float, ...]
    at: float
    ages: tuple[float, ...]
    width: float
    device_ids: tuple[int, ...]
    rows: int = 1
    usage: Usage = NO_USAGE


class Ended(TrialFrame, frozen=True, kw_only=True):
    """The trial has ended; one that is DONE stays the member's, and may be extended.

    Attributes:
        state: ``DONE``, ``STOPPED`` or ``FAILED``.
        iteration: iterations done.
        by_itself: whether it said that it has no more to do.
        kind, message, traceback: of its failure.
    """

    state: str
    iteration: int
    by_itself: bool = False
    kind: str = ""
    message: str = ""
    traceback: str = ""


class Released(TrialFrame, frozen=True):
    """The member gives the trial up for others to run, from the checkpoint that it wrote for them."""


class Wants(Frame, frozen=True):
    """The member has idle devices, and nothing to run there; ``0`` once it has.

    Attributes:
        devices: how many.
    """

    devices: int


class Extended(Frame, frozen=True):
    """A submitter has let a trial run so many iterations in all."""

    trial_id: str
    budget: int


class StopAsked(Frame, frozen=True):
    """A submitter wants a trial to run no further; ``outcome`` is what reports are to show, empty for how it ends."""

    trial_id: str
    outcome: str = ""


Item = (
    Joined
    | Left
    | Lost
    | Founded
    | Submitted
    | OtherCode
    | Begun
    | Claimed
    | Started
    | Iterated
    | Ended
    | Released
    | Wants
    | Extended
    | StopAsked
)
_decode = decoder(Wrote | Item)


def entry_of(member: str, number: int, items: Sequence[Item]) -> bytes:
    """Returns the content of an entry of the log."""
    return encode([Wrote(member, number), *items])


def read_entry(content: bytes) -> tuple[str, list[Any]]:
    """Returns who wrote an entry, and its items.

    Raises:
        ValueError: it is none of this version.
    """
    wrote, *items = _decode(content)
    if not isinstance(wrote, Wrote):
        raise ValueError("does not say who wrote it")
    return wrote.member, items
