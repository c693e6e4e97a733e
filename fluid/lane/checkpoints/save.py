"""Saves and restores the residents of a lane."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec import structs

from fluid._clock import Clock
from fluid.engine.commands import Fork, StartTrial
from fluid.engine.events import Checkpoint, Restoring, TrialForked, TrialNotKept, TrialSaved, TrialSetBack
from fluid.errors import FluidError
from fluid.keeping import FACTS, QUOTA_USED_UP, Kept
from fluid.lane.checkpoints.behind import WritesBehind
from fluid.lane.checkpoints.files import entries_of
from fluid.lane.checkpoints.restore import CheckpointLocator, restore_best
from fluid.lane.checkpoints.seal import LANE_STATE, is_of_the_process, sealed_bytes
from fluid.lane.checkpoints.store import CheckpointStore, Stored, set_own_store
from fluid.lane.checkpoints.trial_files import copy_trial_files
from fluid.lane.device.device import MemoryMeter
from fluid.lane.errors import causes, is_for_want_of_space, is_out_of_memory, one_line, print_exception
from fluid.lane.output import LaneStreams
from fluid.lane.protocol import KeepBar, LaneOptions
from fluid.lane.resident import ResidentTrial
from fluid.random_state import read_random_state, restore_random_state, write_random_state
from fluid.trainables.resident import STATE_FOLDER, NotSavableError

#: What a save that failed counts for at least, seconds.
_FAILED_SAVE_S = 0.05
#: Share of the disk, and most bytes, that checkpoints which outlive the run leave free.
_RESERVE, _RESERVE_BYTES = 0.05, 1 << 30


class StartStateGoneError(FluidError):
    """No checkpoint can be read of a trial that starts from another trial's state: it cannot begin afresh instead."""


def gone(iteration: int, reason: str) -> str:
    """The message of that error: for want of which state, if that is known, and why."""
    state = f"its state of {iteration} iterations" if iteration else "its state"
    return f"the trial starts from another trial's state and cannot begin afresh; {state} cannot be restored: {reason}"


class ResidentCheckpoints:
    """Saves trials of a lane to its store, and restores them. Methods that run a trial's code raise what that raises.

    Args:
        options: the lane's.
        clock: the lane's.
        output: has the log of the trial whose code runs.
        meter: of the device's memory.
        enter: puts a resident's process state in force.
    """

    def __init__(
        self,
        options: LaneOptions,
        clock: Clock,
        output: LaneStreams,
        meter: MemoryMeter,
        enter: Callable[[ResidentTrial], None],
    ) -> None:
        self._options = options
        self._clock = clock
        self._output = output
        self._meter = meter
        self._enter = enter
        self._store = CheckpointStore(options.lane_id, options.run_folder, options.memory_folder)
        set_own_store(self._store, options)
        self._locator = CheckpointLocator(options)
        #: Seconds of the last save, by trainable.
        self._costs: dict[int, float] = {}
        #: Bytes of the last checkpoint that outlives the run, by trainable.
        self._sizes: dict[int, int] = {}
        #: By group.
        self._bars: dict[str, KeepBar] = {}
        #: Of each resident, the last save that another one may refer to.
        self._newest: dict[str, TrialSaved] = {}
        #: Checkpoints that are written while their trials train on, and those trials.
        self._behind = WritesBehind()
        self._written_behind: set[str] = set()

    def usual_cost(self, key: int) -> float:
        """Seconds that the last save of a trial of this trainable took; 0 before the first."""
        return self._costs.get(key, 0.0)

    def drop_trainable(self, key: int) -> None:
        """Drops what is known of a trainable's trials."""
        self._costs.pop(key, None)
        self._sizes.pop(key, None)

    def forget_resident(self, trial_id: str) -> None:
        """Drops the records that matter only while the trial is resident; its checkpoints stay."""
        self._behind.wait()
        self._store.forget_resident(trial_id)
        self._newest.pop(trial_id, None)

    def is_due(self, resident: ResidentTrial) -> bool:
        """Whether saving a trial costs little against the work that the checkpoint protects.

        For an idle trial it is enough that saving costs little against one of its iterations: another lane that is to
        continue it may be waiting for the checkpoint. An iteration of several trials at once counts for each with its
        share of the seconds: else saving all of them would cost as many times as much.
        """
        if resident.trial_id in self._written_behind:
            if resident.left:
                return False
            self._behind.wait()
        if resident.reports_states and resident.iteration - _behind(resident) <= resident.saved:
            return False
        options, pace = self._options, None if resident.pace is None else resident.pace / max(1, resident.rows)
        cost = options.save_ratio * resident.save_cost
        if resident.unsaved >= max(options.save_after, cost):
            return True
        is_idle = not resident.left and not resident.finished and resident.unsaved > 0.0
        return is_idle and pace is not None and pace >= max(options.idle_save_after, cost)

    def save(self, resident: ResidentTrial, *, durable: bool = False) -> TrialSaved:
        """Saves a trial, to disk at once if ``durable``; also raises the errors of writing to disk.

        A state that was just saved, as after an iteration, is not saved twice.
        """
        newest = self._just_saved(resident)
        if newest is not None and not (durable and newest.checkpoint.in_memory):
            return structs.replace(newest, at=self._clock.now(), seconds=0.0)
        (path, in_memory, _), seconds = self._save(resident, durable=durable)
        saved = self._newest[resident.trial_id] = self._saved(resident, resident.saved, path, in_memory, seconds)
        return saved

    def _just_saved(self, resident: ResidentTrial) -> TrialSaved | None:
        """The last save of a trial, if it is of its present state, and still where it was."""
        self._behind.wait()
        newest = self._newest.get(resident.trial_id)
        if newest is None or resident.unsaved > 0.0 or newest.checkpoint.iteration != resident.iteration:
            return None
        return newest if os.path.exists(newest.checkpoint.path) else None

    def fork(self, resident: ResidentTrial, forks: Sequence[Fork]) -> list[TrialSaved | TrialForked]:
        """Saves the state of a trial, and its own folder, for others to start from; the state once for all of them.

        Errors end no trial: the answers tell them. If there is a new checkpoint of the trial itself, that is told, too.
        """
        self._enter(resident)
        told: list[TrialSaved | TrialForked] = []
        try:
            at = resident.iteration - _behind(resident)
            saved = self._just_saved(resident)
            if saved is None and sum(fork.at in (None, at) for fork in forks) > 1:
                saved = self.save(resident)
                told.append(saved)
        except BaseException as error:
            return [self._not_forked(resident, fork, error) for fork in forks]
        path = None if saved is None else saved.checkpoint.path
        return [*told, *(self._forked(resident, fork, at, path) for fork in forks)]

    def _forked(self, resident: ResidentTrial, fork: Fork, at: int, saved: str | None) -> TrialForked:
        """Carries one out: by a copy of what was just saved, if there is that."""
        wanted = at if fork.at is None else fork.at
        if wanted != at:
            ended = " has ended, and" * resident.finished
            problem = f"{resident.trial_id!r}{ended} has a state of {at} iterations, not of {wanted}"
            return self._not_forked(resident, fork, problem, is_past=wanted < at)
        begun = self._clock.now()
        try:
            if saved is None:
                path, in_memory, _ = self._save(resident, child=fork.child)[0]
            else:
                path, in_memory, _ = self._store.fork(fork.child, saved)
            copy_trial_files(self._options.run_folder, resident.trial_id, fork.child)
        except BaseException as error:
            self._store.delete(fork.child)
            return self._not_forked(resident, fork, error)
        now, checkpoint = self._clock.now(), Checkpoint(at, path, in_memory=in_memory)
        parent, lane_id = resident.trial_id, resident.lane_id
        return TrialForked(now, fork.child, parent=parent, lane_id=lane_id, checkpoint=checkpoint, seconds=now - begun)

    def _not_forked(
        self, resident: ResidentTrial, fork: Fork, problem: str | BaseException, *, is_past: bool = False
    ) -> TrialForked:
        cannot = False
        if isinstance(problem, BaseException):
            print_exception()
            # A function without a state raises the general one.
            lacks_room = is_for_want_of_space(problem) or is_out_of_memory(problem)
            cannot = isinstance(problem, FluidError) and not lacks_room
            problem = one_line(problem)
        return TrialForked(
            self._clock.now(),
            fork.child,
            parent=resident.trial_id,
            lane_id=resident.lane_id,
            problem=problem,
            is_past=is_past,
            cannot=cannot,
        )

    def save_behind(self, resident: ResidentTrial, tell: Callable[[TrialSaved | BaseException], None]) -> bool:
        """Saves a trial, whose state is taken now, in a thread, while it trains on.

        Args:
            resident: the trial.
            tell: called in that thread when it was saved, or with the error of writing it.

        Returns:
            Whether that is done; if not, the trial has to be saved at once.
        """
        begin = getattr(resident.body, "begin_save", None)
        if begin is None:
            return False
        self._enter(resident)
        iteration, finished, random_state = resident.iteration, resident.finished, read_random_state()
        begun = self._clock.now()
        write_state = None
        # Such as for want of memory, or of a value that can be written and not copied.
        with suppress(Exception):
            write_state = begin()
        write_random_state(random_state)
        if write_state is None:
            return False
        taken = self._clock.now() - begun
        before, resident.unsaved = resident.unsaved, 0.0

        def write() -> None:
            begun = self._clock.now() - taken
            try:
                parts = partial(_write, write_state, finished, random_state, b"")
                stored = self._store.save(resident.trial_id, iteration, parts)
                self._note_saved(resident, iteration, begun)
                saved = self._saved(resident, iteration, stored.path, stored.in_memory, resident.save_cost)
                self._newest[resident.trial_id] = saved
                tell(saved)
            except BaseException as error:
                self._note_failed(resident, begun)
                resident.unsaved = max(resident.unsaved, before)
                tell(error)
            finally:
                self._written_behind.discard(resident.trial_id)

        self._written_behind.add(resident.trial_id)
        self._behind.add(write)
        return True

    def _save(
        self, resident: ResidentTrial, *, durable: bool = False, facts: bytes = b"", child: str = ""
    ) -> tuple[Stored, float]:
        """Saves a trial; with ``facts``, what is to be known of a checkpoint that outlives the run, as such a one.

        With ``child``, the checkpoint is that trial's, which is to start from it.

        Returns:
            Where, and the seconds that it took.
        """
        assert resident.body is not None
        self._behind.wait()
        body, behind = resident.body, _behind(resident)
        iteration, finished = resident.iteration - behind, resident.finished and not behind
        self._enter(resident)
        begun = self._clock.now()

        def write_state(folder: str) -> None:
            body.save(folder)
            # Random numbers drawn while saving must not change the training.
            write_random_state(random_state)

        random_state = read_random_state()
        write = partial(_write, write_state, finished, random_state, facts)
        if child:
            return self._store.save_start(child, resident.trial_id, iteration, write), self._clock.now() - begun
        try:
            stored = self._store.save(resident.trial_id, iteration, write, durable=durable, keep=bool(facts))
        except BaseException:
            self._note_failed(resident, begun)
            raise
        self._note_saved(resident, iteration, begun)
        resident.unsaved = 0.0
        return stored, resident.save_cost

    def _note_saved(self, resident: ResidentTrial, iteration: int, begun: float) -> None:
        resident.saved, resident.save_cost = iteration, self._clock.now() - begun
        self._costs[resident.key] = resident.save_cost

    def _note_failed(self, resident: ResidentTrial, begun: float) -> None:
        # The next try comes later and later.
        resident.save_cost = 2.0 * max(resident.save_cost, self._clock.now() - begun, _FAILED_SAVE_S)

    # -- checkpoints that outlive the run --------------------------------------------------------------------

    def set_bar(self, message: KeepBar) -> None:
        """Takes what a checkpoint of a group's trials must beat to outlive the run."""
        self._bars[message.group] = message

    def keep_if_better(self, resident: ResidentTrial, numbers: Mapping[str, float]) -> None:
        """Saves a trial for good if its iteration is its best so far, and one of the best of its group's trials.

        Errors end no trial: they are told in ``resident.unsent``, as the checkpoint is.
        """
        rule = resident.rule
        if rule is None or rule.how != "best":
            return
        value = resident.last_value = rule.value(numbers, resident.last_value)
        if value is None or not rule.is_better(value, rule.best) or _state_at(resident) != resident.iteration:
            return
        bar = self._bars.get(rule.group)
        if bar is not None and not rule.passes(value, bar.bar):
            return
        resident.rule = rule._replace(best=value)
        resident.unsent = self.keep(resident, value)

    @staticmethod
    def is_to_be_kept(resident: ResidentTrial) -> bool:
        """Whether a trial that ends here has a state to save for good, which was not yet."""
        saves = resident.autosaves and (resident.member is None or resident.member.is_rank_zero)
        return saves and (_state_at(resident) or 0) > max(0, resident.kept_at)

    def keep(self, resident: ResidentTrial, value: float | None = None) -> TrialSaved | TrialNotKept:
        """Saves a trial so that the checkpoint outlives the run; says why if it cannot be.

        Args:
            resident: the trial.
            value: its metric, if trials are compared.
        """
        rule, iteration = resident.rule, _state_at(resident) or resident.iteration
        group, metric, mode = ("", "", "") if rule is None else (rule.group, rule.metric, rule.mode)
        facts = json.dumps({"group": group, "metric": metric, "mode": mode, "value": value}).encode()
        try:
            reason = self._why_no_room(resident)
            if reason:
                return self._not_kept(resident, iteration, reason)
            (path, in_memory, size), seconds = self._save(resident, facts=facts)
            self._newest.pop(resident.trial_id, None)  # A call may have changed the trial since.
        except BaseException as error:
            print_exception()
            if not is_for_want_of_space(error):
                resident.rule = None  # Its own code raises, and will again.
                return TrialNotKept(self._clock.now(), resident.trial_id, iteration=iteration, reason=one_line(error))
            return self._not_kept(resident, iteration, one_line(error))
        resident.kept_at, self._sizes[resident.key] = iteration, size
        return self._saved(resident, iteration, path, in_memory, seconds, Kept(size, value))

    def _saved(
        self,
        resident: ResidentTrial,
        iteration: int,
        path: str,
        in_memory: bool,
        seconds: float,
        kept: Kept | None = None,
    ) -> TrialSaved:
        checkpoint = Checkpoint(iteration, path, in_memory=in_memory)
        return TrialSaved(
            self._clock.now(), resident.trial_id, resident.lane_id, checkpoint, seconds=seconds, kept=kept
        )

    def _not_kept(self, resident: ResidentTrial, iteration: int, reason: str) -> TrialNotKept:
        """Says why a trial is not saved for good; its last state, which may be its result, goes to host memory instead.

        From there it comes to the run folder once there is room.
        """
        is_last = resident.rule is None or resident.rule.how == "last"
        with suppress(Exception):
            if reason != QUOTA_USED_UP and is_last and self._save(resident)[0].in_memory:
                reason += "; it stays in host memory until there is room"
        return TrialNotKept(self._clock.now(), resident.trial_id, iteration=iteration, reason=reason)

    def _why_no_room(self, resident: ResidentTrial) -> str:
        """Why there is no room for a further checkpoint like those of its trainable; empty if there is."""
        size, folder = self._sizes.get(resident.key, 0), self._options.run_folder
        bar = None if resident.rule is None else self._bars.get(resident.rule.group)
        if bar is not None and bar.room is not None and resident.kept_at < 0 and size > bar.room:
            return QUOTA_USED_UP
        disk = shutil.disk_usage(folder)
        if disk.free - size < min(_RESERVE_BYTES, _RESERVE * disk.total):
            return f"the disk of {folder} is almost full: {disk.free:,} bytes are free"
        return ""

    def restore(
        self,
        resident: ResidentTrial,
        command: StartTrial,
        source: tuple[str, int] | None,
        renew: Callable[[], None],
    ) -> tuple[TrialSetBack | None, Restoring | None]:
        """Restores a trial; says so in its log if that is not from the checkpoint named.

        Args:
            resident: a trial that was set up.
            command: names the checkpoint wanted.
            source: where the server of the machine that has it listens; ``None`` for this machine.
            renew: sets the trial up anew.

        Returns:
            Why it has an earlier state, ``None`` if it has the one wanted; and from where it was restored, ``None`` if
            it begins afresh.

        Raises:
            StartStateGoneError: it must not begin afresh.
        """
        assert command.checkpoint is not None
        checkpoint, wanted = command.checkpoint.path, command.checkpoint.iteration
        renewing, is_unsharing = 0.0, False

        def renew_and_count() -> None:
            nonlocal renewing
            renewed = self._clock.now()
            renew()
            renewing += self._clock.now() - renewed

        def load(folder: str) -> None:
            nonlocal is_unsharing
            assert resident.body is not None
            if getattr(resident.body, "hands_out_folder", True) and entries_of(os.path.join(folder, STATE_FOLDER)):
                is_unsharing = True  # Its code may write to the files.
                folder = self._store.own(resident.trial_id, folder)
                is_unsharing = False
            resident.body.restore(folder)
            with open(os.path.join(folder, LANE_STATE), "rb") as file:
                state = pickle.load(file)
            restore_random_state(state["random"])
            resident.finished = state["finished"]

        self._behind.wait()
        begun = self._clock.now()
        located = self._locator.locate(resident.trial_id, checkpoint, source)
        places = self._store.places(resident.trial_id, located.path)
        path, iteration, reason, cannot_load = restore_best(
            places,
            wanted,
            load,
            renew_and_count,
            lambda error: is_unsharing or self._is_innocent(error),
            located.problem,
            self._store.is_in_memory,
        )
        if path is None and command.must_restore:
            raise StartStateGoneError(gone(wanted, reason))
        seconds = self._clock.now() - begun - renewing
        resident.iteration = resident.saved = iteration
        restored = None
        if path is not None:
            self._store.protect(resident.trial_id, path)
            restored = self._measured(path, seconds, fetched=located.fetched)
        if not reason:
            return None, restored
        begins = f"goes on from iteration {iteration}" if path is not None else "begins afresh"
        told = f"Fluid: this trial {begins} instead of going on from iteration {wanted}: {reason}\n"
        self._output.log.write(told)  # The driver's log has it, too.
        back = TrialSetBack(
            self._clock.now(),
            resident.trial_id,
            resident.lane_id,
            checkpoint=None if path is None else Checkpoint(iteration, path, in_memory=self._store.is_in_memory(path)),
            reason=reason,
            cannot_load=cannot_load,
        )
        return back, restored

    def _measured(self, path: str, seconds: float, *, fetched: bool) -> Restoring:
        """Returns from where a trial was restored, which its host is told, too."""
        size = sealed_bytes(path) or 0
        if fetched:
            return Restoring("host", seconds, size)
        self._store.note_restore(path, size, seconds)
        return Restoring("memory" if self._store.is_in_memory(path) else "disk", seconds, size)

    def _is_innocent(self, error: BaseException) -> bool:
        """Whether an error that restoring a checkpoint raised says nothing about the checkpoint."""
        lacks = is_out_of_memory(error) or any(map(is_of_the_process, causes(error)))
        return lacks or not self._meter.is_usable()


def _write(write_state: Callable[[str], None], finished: bool, random_state: object, facts: bytes, folder: str) -> None:
    write_state(folder)
    with open(os.path.join(folder, LANE_STATE), "wb") as file:
        pickle.dump({"finished": finished, "random": random_state}, file)
    if facts:
        with open(os.path.join(folder, FACTS), "wb") as file:
            file.write(facts)


def _state_at(resident: ResidentTrial) -> int | None:
    """Iterations done by the state that a save writes; ``None`` if there is none yet."""
    try:
        return resident.iteration - _behind(resident)
    except NotSavableError:
        return None


def _behind(resident: ResidentTrial) -> int:
    """Iterations done since the state that a save writes.

    Raises:
        NotSavableError: the trial has reported no state yet.
    """
    if not resident.reports_states or resident.body is None:
        return 0
    behind = resident.body.unsaved_iterations()
    if behind is None:
        raise NotSavableError("it has reported no checkpoint from which it could go on")
    return behind
