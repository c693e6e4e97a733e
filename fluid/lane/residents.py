"""The trials in a lane: set up, entered, measured, saved and let go. One of them has the process at a time."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fluid._clock import Clock
from fluid.lane.checkpoint_store import CheckpointStore
from fluid.lane.culprit_note import RunningTrialNote
from fluid.lane.device import Meter
from fluid.lane.messages import LaneOptions, ResidentSaved, ShipTrainable, StartResident, trial_folder
from fluid.lane.process_state import Context, Output, read_random_state, restore_random_state, write_random_state
from fluid.lane.work_queue import ResidentTrial, WorkQueue
from fluid.trainables.trainable import can_save, make_resident, set_up

#: The file, within a checkpoint, with what belongs to the lane and not to the trainable.
_LANE_STATE = "lane.pkl"


class Residents:
    """The trials in a lane, by id.

    Attributes:
        queue: those with iterations left.
        current: whose state the process is in.
    """

    def __init__(
        self, options: LaneOptions, clock: Clock, output: Output, note: RunningTrialNote, meter: Meter
    ) -> None:
        self.queue = WorkQueue()
        self.current: ResidentTrial | None = None
        self._options = options
        self._clock = clock
        self._output = output
        self._note = note
        self._meter = meter
        self._home = os.getcwd()
        self._store = CheckpointStore(options.lane_id, options.run_folder, options.memory_folder, options.memory_bytes)
        self._payloads: dict[int, bytes] = {}
        self._trainables: dict[int, Any] = {}
        self._hosted: dict[str, ResidentTrial] = {}
        #: What saving took last, seconds, by trainable.
        self._save_costs: dict[int, float] = {}
        #: Whether the lane may hold device memory that nobody uses.
        self._hoards = False

    def __iter__(self) -> Iterator[ResidentTrial]:
        return iter(list(self._hosted.values()))

    def get(self, trial_id: str) -> ResidentTrial | None:
        """The trial of that id, if it is here."""
        return self._hosted.get(trial_id)

    def learn(self, message: ShipTrainable) -> None:
        """Takes in a trainable that trials are going to be of."""
        self._payloads[message.key] = message.payload
        sys.path += [path for path in message.sys_path if path not in sys.path]

    # -- they come and go ----------------------------------------------------------------------------------

    def admit(self, trial_id: str) -> ResidentTrial:
        """Takes in a trial, of which there is nothing yet; one of that id that is here leaves first."""
        before = self._hosted.get(trial_id)
        if before is not None:
            self.release(before)
        log = os.path.join(trial_folder(self._options.run_folder, trial_id), "output.log")
        hosted = self._hosted[trial_id] = ResidentTrial(trial_id, Context(log, self._home))
        return hosted

    def set_up(self, hosted: ResidentTrial, message: StartResident) -> None:
        """Makes a trial what it is to be, from its checkpoint if it has one.

        Raises:
            BaseException: what the trial's code raised.
        """
        self.enter(hosted)
        trainable = self._trainable(message.key)
        hosted.key, hosted.save_cost = message.key, self._save_costs.get(message.key, 0.0)
        self._meter.begin()  # Modules that were just loaded are the lane's, whoever came first.
        hosted.saves_itself = can_save(trainable)
        folder = trial_folder(self._options.run_folder, message.trial_id)
        hosted.body = make_resident(trainable, trial_id=message.trial_id, folder=folder)
        joins = message.membership is not None and message.membership.takes_over
        set_up(hosted.body, pickle.loads(message.config), joins=joins)
        if message.checkpoint is not None:
            self._restore(hosted, message.checkpoint)
            hosted.iteration = message.iteration
        self.measure(hosted)

    def enter(self, hosted: ResidentTrial) -> None:
        """Puts the process into a resident's state, if it is not in it."""
        self._note.write(hosted.trial_id)
        if self.current is not hosted:
            if self.current is not None:
                self.current.context.leave()
                self._meter.give_back()  # What the one before left over is not this one's.
            hosted.context.enter(self._output)
            self.current = hosted

    def release(self, hosted: ResidentTrial) -> None:
        """Lets a resident go; what its clean-up raises is in its log."""
        self.enter(hosted)
        try:
            if hosted.member is not None:
                hosted.member.leave_generation()
            if hosted.body is not None:
                hosted.body.cleanup()
        except BaseException:
            traceback.print_exc()
        hosted.body = None
        self.halt(hosted)
        del self._hosted[hosted.trial_id]
        self._store.released(hosted.trial_id)
        self._output.switch(None)
        self.current = None
        self._meter.give_back(collect=True)

    def _trainable(self, key: int) -> Any:
        if key not in self._trainables:
            self._trainables[key] = pickle.loads(self._payloads[key])
        return self._trainables[key]

    # -- what they have to do ------------------------------------------------------------------------------

    def add(self, hosted: ResidentTrial, iterations: int) -> None:
        """Has a trial run so many iterations more."""
        if iterations > 0 and hosted.left == 0:
            self.queue.join(hosted)
        hosted.left += iterations

    def ask(self, hosted: ResidentTrial, iterations: int) -> None:
        """Has a trial run so many iterations, whatever it was asked for before."""
        self.halt(hosted)
        self.add(hosted, iterations)

    def halt(self, hosted: ResidentTrial) -> None:
        """Has a trial run no more iterations."""
        if hosted.left:
            hosted.left = 0
            self.queue.remove(hosted)

    # -- memory --------------------------------------------------------------------------------------------

    @property
    def hoards(self) -> bool:
        """Whether the lane may hold device memory that nobody uses."""
        return self._hoards

    def give_back(self) -> None:
        """Gives device memory back that nobody uses."""
        self._hoards = False
        self._meter.give_back()

    def measure(self, hosted: ResidentTrial) -> tuple[float, float] | None:
        """Returns the bytes that a trial holds, and what it took on top of that; ``None`` where that cannot be told."""
        measured = self._meter.end()
        if measured is None:
            return None
        self._hoards = True
        hosted.held += measured[0]
        return max(0.0, hosted.held), max(0.0, measured[1])

    # -- checkpoints ---------------------------------------------------------------------------------------

    def is_due(self, hosted: ResidentTrial) -> bool:
        """Whether saving a trial costs little against the work it protects.

        Or, where it has come to rest, against an iteration: of another trial, for which a lane may have to wait that
        is to go on with this one.
        """
        options, pace = self._options, hosted.pace
        cost = options.save_ratio * hosted.save_cost
        if hosted.unsaved >= max(options.save_after, cost):
            return True
        rests = not hosted.left and not hosted.finished and hosted.unsaved > 0.0
        return rests and pace is not None and pace >= max(options.rest_after, cost)

    def save(self, hosted: ResidentTrial) -> ResidentSaved:
        """Saves a trial.

        Raises:
            BaseException: what the trial's code raised, or writing to disk.
        """
        assert hosted.body is not None
        body = hosted.body
        self.enter(hosted)
        begun = self._clock.now()

        def fill(folder: str) -> None:
            random_state = read_random_state()
            body.save(folder)
            # What saving drew is no part of the training, which must not depend on when it was saved.
            write_random_state(random_state)
            with open(os.path.join(folder, _LANE_STATE), "wb") as file:
                pickle.dump({"finished": hosted.finished, "random": random_state}, file)

        stored = self._store.save(hosted.trial_id, hosted.iteration, fill)
        now = self._clock.now()
        hosted.save_cost, hosted.unsaved = now - begun, 0.0
        self._save_costs[hosted.key] = hosted.save_cost
        return ResidentSaved(now, hosted.trial_id, hosted.iteration, *stored, dropped=False, seconds=now - begun)

    def forget(self, trial_id: str) -> None:
        """Deletes every checkpoint of a trial."""
        self._store.delete(trial_id)

    def _restore(self, hosted: ResidentTrial, path: str) -> None:
        assert hosted.body is not None
        with self._store.reading(path) as folder:
            hosted.body.restore(folder)
            self._store.restored(hosted.trial_id, folder)
            with suppress(FileNotFoundError), open(os.path.join(folder, _LANE_STATE), "rb") as file:
                state = pickle.load(file)
                hosted.finished = state["finished"]
                restore_random_state(state["random"])
