"""A trial in a lane, and the queue of those that have iterations left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fluid.engine.commands import Fork
from fluid.engine.events import Restoring, SavabilityChanged, TrialNotKept, TrialSaved
from fluid.keeping import KeepRule
from fluid.lane.errors import is_for_want_of_space, is_out_of_memory
from fluid.lane.member import LaneMember
from fluid.lane.policy import SMOOTHING, SWITCH_SLACK_S, ResidentWork, choose, joining_service
from fluid.lane.process.state import ProcessState
from fluid.lane.requests import LaneDriverLink
from fluid.trainables.json_form import message_of
from fluid.trainables.resident import NotSavableError, Resident
from fluid.trainables.trial_code import TrialCode


@dataclass(slots=True, eq=False, kw_only=True)
class ResidentTrial:
    """A trial in this lane.

    Attributes:
        lane_id: the lane's number, which all that is told of the trial has.
        link: asks the driver on its behalf.
        code: what its threads reach by global names.
        process_state: its random generators, working directory and output.
        set_up_s: seconds that its set-up took.
        is_alone: whether no other trial runs in this process.
        body: runs its code; ``None`` before its set-up and after its clean-up.
        key: of its trainable.
        iteration: iterations done.
        left: iterations still to run.
        finished: whether it said that it is done; it then runs no more iterations.
        unsaved: seconds of work since its last checkpoint.
        save_cost: seconds that its last save took; before the first, that of another trial of its trainable.
        held: bytes that it holds on the device between iterations; ``None`` where that is not measured.
        told_held: what the driver was told last of that while it did not run; ``None`` if it was told nothing.
        limit: most bytes that it may take there until it has run all its iterations; ``None`` for no limit.
        autosaves: whether the lane checkpoints it automatically.
        pace: seconds per iteration, a moving average; ``None`` before the first.
        service: seconds it has run, as :mod:`fluid.lane.policy` counts them.
        turn: number of its latest iteration among those of all trials of the lane; 0 before the first.
        member: its part in a trial of several lanes; ``None`` where it trains alone.
        reports_states: whether only the states that it reports can be saved, not the one that it is in.
        savable: whether it had reported one when it was last asked; ``False`` unless it reports states.
        saved: iterations done by the newest state that was saved or restored.
        rule: which of its checkpoints outlive the run; ``None`` for none.
        last_value: what it has reported last of what that compares; ``None`` if that was no finite number.
        kept_at: iteration of the last one that this lane wrote; -1 before the first.
        unsent: what is to be told of the one that was written in its last iteration.
        restored: from where it was restored; ``None`` if it began afresh.
        fusion_key: digest of its fusion key after its set-up; ``None`` if it cannot be fused.
        rows: trials that took its last step together, this one included; 0 before the first.
        forks: what is to start from a state of it, and does not yet.
        schedules: those of its config, by the keys that lead to them.
    """

    trial_id: str
    lane_id: int
    link: LaneDriverLink
    code: TrialCode
    process_state: ProcessState
    set_up_s: float = 0.0
    is_alone: bool = False
    body: Resident | None = None
    key: int = -1
    iteration: int = 0
    left: int = 0
    finished: bool = False
    unsaved: float = 0.0
    save_cost: float = 0.0
    held: float | None = None
    told_held: float | None = None
    limit: float | None = None
    autosaves: bool = False
    pace: float | None = None
    service: float = 0.0
    turn: int = 0
    member: LaneMember | None = None
    reports_states: bool = False
    savable: bool = False
    saved: int = 0
    rule: KeepRule | None = None
    last_value: float | None = None
    kept_at: int = -1
    unsent: TrialSaved | TrialNotKept | None = None
    restored: Restoring | None = None
    fusion_key: str | None = None
    rows: int = 0
    forks: list[Fork] = field(default_factory=list)
    schedules: Mapping[tuple[Any, ...], Any] = field(default_factory=dict)

    def record_iteration(self, seconds: float, rows: int = 1) -> None:
        """Updates pace and service after an iteration that took so many seconds, of so many trials at once."""
        self.rows = rows
        self.pace = seconds if self.pace is None else self.pace + SMOOTHING * (seconds - self.pace)
        self.service += seconds

    def take_forks(self) -> list[Fork]:
        """Takes those whose state it has come to, or will not come to."""
        if not self.forks:
            return self.forks
        due = [fork for fork in self.forks if fork.at is None or fork.at <= self.iteration or self.finished]
        self.forks = [fork for fork in self.forks if fork not in due]
        return due

    def work(self) -> ResidentWork:
        """Its remaining work, for the policies."""
        remaining = None if self.pace is None else self.left * self.pace
        return ResidentWork(self.trial_id, remaining, self.service, self.turn)


class WorkQueue:
    """The trials with iterations left, in the order in which they came. Usually there is one."""

    def __init__(self) -> None:
        self._residents: deque[ResidentTrial] = deque()
        self._turns = 0

    def __len__(self) -> int:
        return len(self._residents)

    def __iter__(self) -> Iterator[ResidentTrial]:
        return iter(self._residents)

    def add(self, resident: ResidentTrial) -> None:
        """Adds a trial."""
        if self._residents:
            resident.service = joining_service([other.work() for other in self._residents])
        self._residents.append(resident)

    def remove(self, resident: ResidentTrial) -> None:
        """Removes a trial that is in the queue."""
        self._residents.remove(resident)

    def note_iteration(self, resident: ResidentTrial) -> None:
        """Notes that a trial has run an iteration."""
        self._turns += 1
        resident.turn = self._turns

    def next(self, policy: str, current: ResidentTrial | None) -> ResidentTrial:
        """Returns the trial to run for one iteration.

        Args:
            policy: one of those of :mod:`fluid.lane.policy`.
            current: the one that ran last.
        """
        if len(self._residents) == 1:
            return self._residents[0]
        works = [resident.work() for resident in self._residents]
        last = None if current is None else current.trial_id
        return self._residents[works.index(choose(policy, works, current=last, slack=SWITCH_SLACK_S))]


# -- savability ----------------------------------------------------------------------------------
#
# What a lane tells the driver of trials whose state cannot always be saved.


def is_not_savable(error: BaseException) -> bool:
    """Whether an exception that a save raised says that the state cannot be saved, whatever the space."""
    return isinstance(error, NotSavableError) and not is_for_want_of_space(error) and not is_out_of_memory(error)


def refusal_of(error: BaseException, resident: ResidentTrial, now: float, *, refuses: bool) -> SavabilityChanged:
    """What to tell of a trial whose save raised that: from now on it is not saved automatically."""
    resident.autosaves = False
    return SavabilityChanged(
        now, resident.trial_id, resident.lane_id, can_save=False, reason=message_of(error), refuses=refuses
    )


def has_changed(resident: ResidentTrial) -> bool:
    """Notes whether a trial that reports its states can be saved by now; returns whether that is news."""
    assert resident.body is not None
    can_save = resident.body.unsaved_iterations() is not None
    if can_save is resident.savable:
        return False
    resident.savable = resident.autosaves = can_save
    return True
