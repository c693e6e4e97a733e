"""Trials that start from the state of another one, their parent (docs/sweeps.md).

Such a trial is not queued before the state is there, in a folder of its own. The engine asks the
parent's lane for it, which saves it between two iterations while the parent runs on, or the host that has a checkpoint.
So the trial that starts does not need its parent any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from fluid.engine.commands import Fork, ForkSaved, StartTrial
from fluid.engine.core import Claims, SessionState
from fluid.engine.events import (
    Checkpoint,
    DeviceLost,
    Event,
    Failure,
    GroupSubmitted,
    StartState,
    TrialForked,
    TrialsAdded,
    TrialSpec,
)
from fluid.engine.policy import Check, Handler, Policy
from fluid.engine.records import TrialRecord
from fluid.engine.trials.calls import Calls
from fluid.errors import InvalidFieldError
from fluid.trialgroup import TrialState


@dataclass(slots=True)
class _Wish:
    """A state that a trial waits for.

    Attributes:
        asked: the lane that was told to save it, or the checkpoint of which a host was told to make a copy; ``None``
            if no lane and no host was told.
        is_past: whether the parent's lane is beyond the iteration wanted.
    """

    asked: int | Checkpoint | None = None
    is_past: bool = False


class Forks(Policy):
    """Has trials wait for the states from which they start, and asks for these.

    Args:
        core: the session.
        calls: restore a parent that is done and whose state is gone.
    """

    def __init__(self, core: SessionState, calls: Calls) -> None:
        self._core = core
        self._calls = calls
        #: By parent, and by the trial that waits; those of other sessions' trials have an empty parent.
        self._wishes: dict[str, dict[str, _Wish]] = {}

    # -- requests ------------------------------------------------------------------------------------------

    def events(self) -> Mapping[type[Event], tuple[Check | None, Handler]]:
        """Trials that are submitted, and states that are there."""
        return {
            GroupSubmitted: (self._check, _nothing),
            TrialsAdded: (self._check, _nothing),
            TrialForked: (None, self.forked),
            DeviceLost: (None, self._device_lost),
        }

    def _check(self, event: GroupSubmitted | TrialsAdded, claims: Claims) -> None:
        """Refuses a trial whose parent cannot give it the state; a parent may come with it, before it."""
        known: dict[str, TrialSpec] = {}
        for spec in event.trials:
            if spec.start is not None and spec.start.checkpoint is None:
                parent = self._core.trials.get(spec.start.parent)
                if parent is not None:
                    _require_state(spec, spec.start, parent)
                elif spec.start.parent not in known:
                    is_forgotten = spec.start.parent in self._core.forgotten
                    reason = "was forgotten, with its state" if is_forgotten else "is no trial of this session"
                    raise InvalidFieldError("start_from", spec.start.parent, reason)
                else:
                    _require_fits(spec, spec.start, known[spec.start.parent], known[spec.start.parent].budget)
            known[spec.trial_id] = spec

    def waits_for(self, trial: TrialRecord) -> str:
        """One that starts from a state waits for it, also if it was lost again."""
        residence = trial.residence
        if trial.spec.start is None or residence.lane is not None or residence.checkpoint is not None:
            return ""
        start = self._of_shared_run(trial.spec.start)
        if start is not trial.spec.start:
            trial.spec = structs.replace(trial.spec, start=start)
        key = start.parent if start.checkpoint is None else ""
        self._wishes.setdefault(key, {}).setdefault(trial.trial_id, _Wish())
        after = "" if start.at is None else f" after {start.at} iterations"
        return f"waits for the state of {start.parent!r}{after}" if start.parent else "waits for its start state"

    def _of_shared_run(self, start: StartState) -> StartState:
        """The same state as one of the run that its trial shares with others, if that has it or comes to it."""
        while not start.is_shared and start.checkpoint is None:
            parent = self._core.trials.get(start.parent)
            run = None if parent is None or not parent.awaits else parent.spec.start
            if run is None or not run.is_shared or run.checkpoint is not None or run.at is None:
                break
            if start.at is not None and start.at >= run.at:
                break
            start = structs.replace(start, parent=run.parent)
        return start

    def forgotten(self, trial: TrialRecord) -> None:
        """Waits for nothing any more; those that have just asked for its state get what there is of it."""
        self._drop(trial)
        for child_id, wish in self._wishes.get(trial.trial_id, {}).items():
            child = self._core.trials.get(child_id)
            start = None if child is None or not child.awaits else child.spec.start
            if child is None or start is None or wish.asked is not None or _needs_no_state(child, start):
                continue
            if (lane := _lane_of(trial)) is not None and start.at in (None, trial.progress.done):
                self._ask_lane(child, wish, trial, lane)
            elif (saved := _saved_state(trial, start)) is not None:
                self._copy(child, wish, saved)

    def _device_lost(self, event: DeviceLost) -> None:
        """A state may have been lost with its host: a queued trial that was to start from it waits for it again."""
        for trial in self._core.trials.values():
            if trial.state is TrialState.QUEUED and self.waits_for(trial):
                self._core.unqueue(trial)
                self._core.enqueue(trial, "the state from which it starts is lost")

    # -- asking --------------------------------------------------------------------------------------------

    def after_events(self) -> None:
        """Asks for the states that can be had now, and not before."""
        for key in list(self._wishes):
            parent = self._core.trials.get(key)
            for trial_id, wish in list(self._wishes[key].items()):
                trial = self._core.trials.get(trial_id)
                if trial is None or not trial.awaits or trial.state.is_over:
                    self._wishes[key].pop(trial_id, None)
                else:
                    self._ask(trial, wish, parent)
            if not self._wishes.get(key):
                self._wishes.pop(key, None)

    def at_end(self) -> None:
        """Asks the lanes of parents that were just told to start or to go on, before they have run an iteration."""
        for command in self._core.commands if self._wishes else ():
            wishes = self._wishes.get(getattr(command, "trial_id", ""), {})
            if isinstance(command, StartTrial):  # Perhaps in a lane that it has left, and that was told before.
                for wish in wishes.values():
                    wish.asked = None if isinstance(wish.asked, int) else wish.asked
            elif isinstance(command, Fork) and command.child in wishes:
                wishes[command.child].asked = command.lane_ids[0]
        for key, wishes in self._wishes.items():
            parent = self._core.trials.get(key)
            lane = None if parent is None else _lane_of(parent)
            if parent is None or lane is None or not parent.state.holds_devices:
                continue
            for trial_id, wish in wishes.items():
                trial = self._core.trials.get(trial_id)
                if trial is None or wish.asked is not None or not trial.awaits:
                    continue
                start = trial.spec.start
                if start is not None and not _needs_no_state(trial, start) and not _is_beyond(parent, start, wish):
                    self._ask_lane(trial, wish, parent, lane)

    def _ask(self, trial: TrialRecord, wish: _Wish, parent: TrialRecord | None) -> None:
        start = trial.spec.start
        assert start is not None
        if _needs_no_state(trial, start):
            if trial.calls or trial.restored_for_call:  # A call makes something else of its state.
                self._fail(trial, "its own state is wanted")
        elif start.checkpoint is not None:
            self._copy(trial, wish, start.checkpoint)
        elif isinstance(wish.asked, Checkpoint) or self._may_answer(start.parent, wish.asked):
            return  # The answer is on its way.
        elif parent is None:
            self._fail(trial, f"{start.parent!r}, from which it was to start, was forgotten")
        elif (lane := _lane_of(parent)) is not None and not _is_beyond(parent, start, wish):
            if wish.asked != lane:
                self._ask_lane(trial, wish, parent, lane)
        elif (saved := _saved_state(parent, start)) is not None:
            self._copy(trial, wish, saved)
        else:
            self._await(trial, wish, parent, start)

    def _may_answer(self, parent_id: str, lane_id: int | None) -> bool:
        """Whether a lane that was told to save a state is still to tell of it, as the trial is about to leave it."""
        lane = None if lane_id is None else self._core.lanes.get(lane_id)
        if lane is None:
            return False
        parent = self._core.trials.get(parent_id)
        saving = parent is not None and parent.residence.saving and parent.residence.lane == lane_id
        return saving or parent_id in lane.draining or parent_id in lane.dismissed

    def _ask_lane(self, trial: TrialRecord, wish: _Wish, parent: TrialRecord, lane: int) -> None:
        assert trial.spec.start is not None
        at, done = trial.spec.start.at, parent.progress.done
        if at is None and (not parent.state.holds_devices or done < _newest(parent)):
            at = _newest(parent)
        if at is not None and at > done and parent.state.ended:
            self._fail(trial, f"{parent.trial_id!r} has ended after {done} iterations, before the {at} wanted")
        elif parent.state.holds_devices or at == done:
            wish.asked = lane
            self._core.commands.append(Fork(parent.trial_id, (lane,), child=trial.trial_id, at=at))

    def _copy(self, trial: TrialRecord, wish: _Wish, checkpoint: Checkpoint) -> None:
        if wish.asked is None or isinstance(wish.asked, int):
            assert trial.spec.start is not None
            wish.asked = checkpoint
            self._core.commands.append(ForkSaved(trial.trial_id, trial.spec.start.parent, checkpoint))

    def _await(self, trial: TrialRecord, wish: _Wish, parent: TrialRecord, start: StartState) -> None:
        """The state is nowhere now: waits for it, or has it made again, or gives up."""
        wish.asked, name, done = None, parent.trial_id, parent.progress.done
        if _is_beyond(parent, start, wish):
            self._fail(trial, f"{name!r} is beyond iteration {start.at}, and no state of that is kept")
        elif parent.state.is_over:
            self._fail(trial, f"{name!r} is {parent.state.value} after {done} iterations, and the state is not kept")
        elif self._comes_from_elsewhere(parent):
            return  # It is done as it begins, and its state is on its way.
        elif parent.state is TrialState.DONE and not (parent.residence.saving or parent.residence.lane is not None):
            if (wanted := start.at or 1) > done:  # One that has ended by itself may have lost all that it had done.
                self._fail(trial, f"{name!r} has ended after {done} iterations, before the {wanted} wanted")
            else:
                self._calls.restore(parent, "its state is wanted", "give that to others")

    @staticmethod
    def _comes_from_elsewhere(parent: TrialRecord) -> bool:
        """Whether a parent waits itself for the state of another session's trial."""
        start = parent.spec.start
        waits = parent.awaits and start is not None and start.checkpoint is not None
        return bool(waits) and start is not None and not _needs_no_state(parent, start)

    @property
    def wants_tick(self) -> bool:
        """Soon, if trials still wait for one that has ended as others were started: they may never hear of it else."""
        return any(self._is_left_behind(key, wishes.values()) for key, wishes in self._wishes.items())

    def _is_left_behind(self, parent_id: str, wishes: Iterable[_Wish]) -> bool:
        parent = self._core.trials.get(parent_id)
        if parent is None or not parent.state.is_over:
            return False
        asked = (wish.asked for wish in wishes if not isinstance(wish.asked, Checkpoint))
        return any(not self._may_answer(parent_id, lane_id) for lane_id in asked)

    # -- answers -------------------------------------------------------------------------------------------

    def forked(self, event: TrialForked) -> None:
        """Queues a trial whose start state is there; or looks for that elsewhere, or gives up."""
        core, trial = self._core, self._core.trials.get(event.trial_id)
        parent = core.trials.get(event.parent)
        if parent is not None and (running := core.holder(event.parent, event.lane_id)) is not None:
            core.watching.answered(running, core.now)  # Saving takes no time from its next iteration.
        if trial is None or not trial.awaits or trial.spec.start is None:
            return
        start = trial.spec.start
        wish = self._wishes.get(start.parent if start.checkpoint is None else "", {}).get(trial.trial_id)
        found = event.checkpoint
        is_ahead = found is not None and parent is not None and found.iteration > parent.progress.reported
        if is_ahead and start.checkpoint is None:
            if wish is not None:  # Of a lane that the parent has left, whose last iterations do not count.
                wish.asked = None
            return
        if found is None or (start.at is not None and found.iteration != start.at):
            if wish is not None:
                self._refused(trial, wish, event)
            return
        is_used_up = start.at is None and trial.progress.budget <= found.iteration
        if is_used_up and not trial.spec.extends:
            text = f"its budget of {trial.progress.budget} is used up by the {found.iteration} iterations of"
            self._fail(trial, f"{text} {start.parent!r}, from which it starts")
            return
        self._drop(trial)
        trial.awaits = ""
        durable = None if found.in_memory else found
        trial.residence = replace(trial.residence, checkpoint=found, durable=durable, checkpoint_is_current=True)
        trial.progress.reported = max(trial.progress.reported, found.iteration)
        trial.progress.starts_at = found.iteration
        trial.spec = structs.replace(trial.spec, start=structs.replace(start, at=found.iteration))
        if is_used_up:  # It is done as it begins, and its search may extend it.
            trial.progress.restart(found.iteration)
            core.end(trial, TrialState.DONE, f"done: {start.parent!r} had come to iteration {found.iteration}")
        elif trial.state is TrialState.PAUSED and start.is_shared and trial.progress.budget <= found.iteration:
            trial.progress.restart(found.iteration)
            core.end(trial, TrialState.DONE, f"done after {found.iteration} iterations of {start.parent!r}")
        elif trial.state is TrialState.PAUSED:
            core.enqueue(trial, f"starts from the state of {start.parent!r} after {found.iteration} iterations")
        if trial.calls and trial.state is TrialState.DONE:
            self._calls.restore(trial)

    def _refused(self, trial: TrialRecord, wish: _Wish, event: TrialForked) -> None:
        if event.is_past and event.lane_id is not None:
            wish.asked, wish.is_past = None, True  # Perhaps a checkpoint of it is kept.
        elif event.lane_id is None and self._has_moved(trial, wish):
            wish.asked = None  # The parent has run on meanwhile, and has left that checkpoint behind.
        else:
            self._fail(trial, f"the state of {event.parent!r}, from which it starts, is not there: {event.problem}")

    def _has_moved(self, trial: TrialRecord, wish: _Wish) -> bool:
        """Whether the state that a trial waits for is elsewhere than where a host was to copy it."""
        start = trial.spec.start
        parent = None if start is None or start.checkpoint is not None else self._core.trials.get(start.parent)
        if start is None or parent is None:
            return False
        return parent.state.holds_devices or _saved_state(parent, start) != wish.asked

    def _fail(self, trial: TrialRecord, why: str) -> None:
        """Ends a trial that waits for a state that will not come."""
        self._drop(trial)
        for stateless in self._core.policies.stateless:
            if stateless(trial, why):
                return
        trial.awaits = ""
        trial.limits = replace(trial.limits, failure=Failure("error", why))
        self._core.end(trial, TrialState.FAILED, why)

    def _drop(self, trial: TrialRecord) -> None:
        start = trial.spec.start
        if start is not None:
            self._wishes.get(start.parent if start.checkpoint is None else "", {}).pop(trial.trial_id, None)

    # -- for tests -----------------------------------------------------------------------------------------

    def problems(self) -> Iterator[str]:
        """Each trial that waits for a state is known here."""
        wanted = {trial_id for wishes in self._wishes.values() for trial_id in wishes}
        for trial_id, trial in self._core.trials.items():
            if trial.awaits and trial.state is TrialState.PAUSED and trial_id not in wanted:
                yield f"{trial_id!r} {trial.awaits}, which no policy asks for"


def _nothing(event: Event) -> None:
    pass


def _lane_of(parent: TrialRecord) -> int | None:
    """The lane that has a trial's present state, or was told to set it up, and can save it; ``None`` if there is none.

    One that is told so together with what starts the trial saves it before another iteration.
    """
    residence, place = parent.residence, parent.placement
    if residence.lane is not None:
        return residence.lane if not residence.saving else None
    if not place.launched or parent.state is TrialState.STOPPING:
        return None
    return place.stays_in[0] if place.stays_in else None


def _needs_no_state(trial: TrialRecord, start: StartState) -> bool:
    """Whether a trial of a shared run runs no iteration of its own; others may start from one of an earlier session."""
    if not start.is_shared or start.at is None:
        return False
    budget = trial.progress.budget
    return budget < start.at or (budget == start.at and start.checkpoint is None)


def _is_beyond(parent: TrialRecord, start: StartState, wish: _Wish) -> bool:
    """Whether a trial has left the state that is wanted of it behind."""
    return start.at is not None and (
        start.at < parent.progress.done or (wish.is_past and start.at == parent.progress.done)
    )


def _saved_state(parent: TrialRecord, start: StartState) -> Checkpoint | None:
    """The checkpoint of the state that is wanted, in the records of the session; ``None`` if there is none.

    Without an iteration that is wanted, the newest one is, of a trial that does not run.
    """
    residence = parent.residence
    if start.at is None:
        rests = not parent.state.holds_devices and not residence.saving
        return residence.checkpoint if rests and (parent.state.is_over or _is_newest(parent)) else None
    found = (each for each in (residence.checkpoint, residence.durable) if each is not None)
    return next((each for each in found if each.iteration == start.at), None)


def _is_newest(parent: TrialRecord) -> bool:
    """Whether the newest checkpoint has all that a trial has done."""
    return parent.residence.restart_at == parent.progress.done >= _newest(parent)


def _newest(parent: TrialRecord) -> int:
    """Iterations of a trial's newest state: also while it repeats some that were lost. There is no state of none."""
    progress = parent.progress
    return max(1, progress.done, min(progress.reported, progress.budget))


def _require_state(spec: TrialSpec, start: StartState, parent: TrialRecord) -> None:
    """Refuses a trial that is to start from a state that its parent does not have and will not have.

    Raises:
        InvalidFieldError: it is to.
    """
    _require_fits(spec, start, parent.spec, parent.progress.budget)
    done, residence = parent.progress.done, parent.residence
    kept = sorted({each.iteration for each in (residence.checkpoint, residence.durable) if each is not None})
    if start.at is not None and start.at < done and start.at not in kept:
        there = ", ".join(map(str, dict.fromkeys([*kept, *([] if parent.state.is_over else [done])])))
        reason = f"trial {parent.trial_id!r} is beyond it, and has no state of it any more"
        raise InvalidFieldError("at", start.at, f"{reason}; it has one of {there}" if there else reason)
    if parent.state.is_over and not kept:
        reason = f"is {parent.state.value}, and no state of it is kept"
        raise InvalidFieldError("start_from", parent.trial_id, reason)
    if start.at is None and parent.state.ended and spec.budget <= done and not spec.extends:
        reason = f"is used up by the {done} iterations of trial {parent.trial_id!r}, from which the trial starts"
        raise InvalidFieldError("budget", spec.budget, f"{reason}: give it more")
    if parent.progress.finished_early and start.at is not None and start.at > done:
        raise InvalidFieldError(
            "at", start.at, f"trial {parent.trial_id!r} has ended by itself after {done} iterations"
        )


def _require_fits(spec: TrialSpec, start: StartState, parent: TrialSpec, budget: int) -> None:
    if not parent.can_save:
        reason = "cannot be saved, so that no other trial can start from its state: have its function yield"
        reason += " (metrics, state), or give its class save_checkpoint() and load_checkpoint()"
        raise InvalidFieldError("start_from", parent.trial_id, reason)
    if start.at is not None and start.at > budget and not start.is_shared:
        reason = f"is beyond the budget of trial {parent.trial_id!r}, {budget} iterations: extend that first"
        raise InvalidFieldError("at", start.at, reason)
