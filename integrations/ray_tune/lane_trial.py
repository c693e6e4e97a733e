"""What runs in a lane for a trial of Ray Tune: Tune's own Trainable, with the controller's next wishes granted early.

The controller asks for a checkpoint after it has seen a result. Where it is known beforehand that it will, the lane
saves right after that iteration and sends the checkpoint along, so that it may run on without waiting to be asked.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

from ray.tune import Checkpoint

from fluid._clock import MonotonicClock
from fluid.engine import tuning
from fluid.integrations.ray_tune.private_api import (
    DONE,
    RESULT_DUPLICATE,
    FunctionTrainable,
    TrainingResult,
    give_session_path,
    make_quietly,
    session_module,
)
from fluid.integrations.ray_tune.serialization import PickledArguments, ShippedTrainable

#: Keys of what :meth:`LaneTrial.step` reports.
RESULT, SAVED = "result", "saved"
#: The entry of a config with all that a trial is made of.
JOB = "job"
_STATE = "tune.pkl"
_FILES = "state"
#: What a trainable in this process would take for a fresh start after it was restored for the controller.
_COUNTERS = ("_iterations_since_restore", "_time_since_restore", "_restored", "_last_result")


class RestoreError(Exception):
    """The trainable could not be restored; the cause says why."""


class Saves(NamedTuple):
    """At which training iterations checkpoints will be asked for.

    Attributes:
        every: at each multiple; 0 for none.
        at: at these.
        likely: at these they may be asked for, or not.
        at_end: when the trainable says that it is done.
    """

    every: int = 0
    at: frozenset[int] = frozenset()
    likely: frozenset[int] = frozenset()
    at_end: bool = False

    def due(self, iteration: int, done: bool) -> bool:
        """Whether one will be asked for after this iteration."""
        return iteration in self.at or (done and self.at_end) or bool(self.every and iteration % self.every == 0)


class Job(NamedTuple):
    """A trial as it is sent to a lane.

    Attributes:
        arguments: of the trainable, by name.
        saves: see there.
        session_path: where Ray keeps this sweep's files on a machine; ``None`` in releases that do not need to know.
        restore: from which result of ``save`` it goes on; ``None`` for a fresh start.
    """

    arguments: Mapping[str, Any]
    saves: Saves
    session_path: str | None = None
    restore: Any = None


class LaneTrial:
    """A trial of Tune's in the form of a trainable of Fluid's; made for each class by :func:`lane_trial_for`."""

    shipped: ClassVar[ShippedTrainable]

    def setup(self, config: dict[str, PickledArguments]) -> None:
        job = self._open(config)
        self._make(job, job.arguments)
        if job.restore is not None:
            try:
                with self._in_place():
                    self._trainable.restore(job.restore)
            except Exception as error:
                raise RestoreError(f"{type(error).__name__}: {error}") from error

    def _open(self, config: Mapping[str, PickledArguments]) -> Job:
        job: Job = self.shipped.open(config[JOB])
        return job

    def _make(self, job: Job, arguments: Mapping[str, Any]) -> None:
        #: Iterations done here, which Tune may count from another one.
        self.iteration = 0
        self._session: Any = None
        self._streams = (sys.stdout, sys.stderr)
        self._clock = MonotonicClock()
        self._work = 0.0
        self._save_cost: float | None = None
        self._saves = job.saves
        if job.session_path is not None:
            give_session_path(job.arguments["storage"], job.session_path)
        with self._in_place():
            self._trainable: Any = make_quietly(self.shipped.trainable, arguments)

    def step(self) -> dict[str, Any]:
        begun = self._clock.now()
        with self._in_place():
            result = self._trainable.train()
            if RESULT_DUPLICATE in result:
                raise StopIteration
            done = bool(result.get(DONE))
            self.iteration += 1
            self._work += self._clock.now() - begun
            saved = self._save() if self._wants_save(done, result) else None
        return {RESULT: self._without_config(result), SAVED: saved, "done": done}

    def cleanup(self) -> None:
        # Stopping one that failed raises again what has been reported.
        with self._in_place(), suppress(Exception):
            self._trainable.stop()

    # -- called by name, between two iterations ------------------------------------------------------------

    def save(self) -> Any:
        """Makes a checkpoint where Tune keeps them."""
        with self._in_place():
            return self._save()

    def plan(self, saves: Saves) -> None:
        """Says at which iterations of those to come checkpoints will be asked for."""
        self._saves = saves

    def go_on(self, saves: Saves) -> None:
        """Makes a trial that was paused where it is look like one that was restored from what it saved."""
        self._saves = saves
        trainable = self._trainable
        trainable._time_since_restore = 0.0
        trainable._iterations_since_restore = 0
        trainable._restored = True

    def run_method(self, name: str, arguments: PickledArguments) -> Any:
        """Calls a method of the trainable."""
        positional, named = self.shipped.open(arguments)
        with self._in_place():
            return getattr(self._trainable, name)(*positional, **named)

    # -- saving --------------------------------------------------------------------------------------------

    def _wants_save(self, done: bool, result: Mapping[str, Any]) -> bool:
        if isinstance(self._trainable, FunctionTrainable):
            # A function reports its checkpoints when it has them; there is nothing to make.
            return self._trainable._last_training_result.checkpoint is not None
        iteration = self._trainable._iteration
        if self._saves.due(iteration, done):
            return True
        return iteration in self._saves.likely and (self._save_cost or 0.0) <= tuning.CHEAP_SAVE * self._work

    def _save(self) -> Any:
        begun = self._clock.now()
        saved = self._trainable.save()
        self._save_cost, self._work = self._clock.now() - begun, 0.0
        return TrainingResult(checkpoint=saved.checkpoint, metrics=self._without_config(saved.metrics))

    def _without_config(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The driver has the config, which may be large; its place is kept."""
        config = self._trainable.config
        return {name: None if value is config else value for name, value in result.items()}

    # -- the process, as this trial wants it ---------------------------------------------------------------

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Puts the session of functions, and streams redirected by ``log_to_file``, in place."""
        module: Any = session_module
        session, module._session = module._session, self._session
        streams = sys.stdout, sys.stderr
        if self._redirected:
            sys.stdout, sys.stderr = self._streams
        try:
            yield
        finally:
            if (sys.stdout, sys.stderr) != streams:
                self._streams = sys.stdout, sys.stderr
                self._redirected = True
            sys.stdout, sys.stderr = streams
            self._session, module._session = module._session, session

    _redirected = False


class SavableLaneTrial(LaneTrial):
    """One that Fluid can move: a checkpoint of Fluid's own is no concern of Tune's and leaves no trace there."""

    def save_checkpoint(self, folder: str) -> None:
        trainable = self._trainable
        storage, trainable._storage = trainable._storage, None
        try:
            with self._in_place():
                saved = trainable.save(os.path.join(folder, _FILES))
        finally:
            trainable._storage = storage
        counters = {name: getattr(trainable, name) for name in _COUNTERS}
        index = getattr(storage, "current_checkpoint_index", None)
        with open(os.path.join(folder, _STATE), "wb") as file:
            state = (saved.metrics, counters, index, self._saves, self.iteration)
            file.write(pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL))

    def load_checkpoint(self, folder: str) -> None:
        with open(os.path.join(folder, _STATE), "rb") as file:
            metrics, counters, index, self._saves, self.iteration = pickle.load(file)
        trainable = self._trainable
        checkpoint = Checkpoint.from_directory(os.path.join(folder, _FILES))
        with self._in_place():
            trainable.restore(TrainingResult(checkpoint=checkpoint, metrics=metrics))
        for name, value in counters.items():
            setattr(trainable, name, value)
        if index is not None:
            trainable._storage.current_checkpoint_index = index
