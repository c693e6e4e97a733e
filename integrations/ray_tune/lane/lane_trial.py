"""A trial of Ray Tune in a lane: Tune's own Trainable, which saves before the controller asks.

The controller asks for a checkpoint after it has processed a result. Where it is known beforehand that it will, or
the result itself asks for one, the lane saves right after that iteration and sends the checkpoint with the result, so
that the trial need not wait.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple

from fluid._clock import MonotonicClock
from fluid.engine import tuning
from fluid.integrations.ray_tune.lane.memory_saves import restore, save_in_memory
from fluid.integrations.ray_tune.private_api import (
    DONE,
    RESULT_DUPLICATE,
    SHOULD_CHECKPOINT,
    STDERR_FILE,
    STDOUT_FILE,
    TRAINING_ITERATION,
    TRIAL_INFO,
    Checkpoint,
    FunctionTrainable,
    TrainingResult,
    give_session_path,
    make_quietly,
    trial_folder_of,
)
from fluid.integrations.ray_tune.serialization import PickledArguments, ShippedTrainable
from fluid.integrations.ray_tune.train.inner_training import InnerTraining, install
from fluid.trainables.driver_link import RequestRefusedError, driver_link
from fluid.trainables.exception_pickle import dump_exception, load_any_exception
from fluid.trainables.ray import ReportedCheckpoint, SessionSlot
from fluid.trainables.resident import NoIterationLeftError, stray_stop_iteration
from fluid.user_values import is_same_value

# -- checkpoint schedule -------------------------------------------------------------------------
#
# When Tune asks a trial for a checkpoint, as far as that is known before the trial gets there.


class CheckpointSchedule(NamedTuple):
    """The training iterations after which Tune asks a trial for a checkpoint.

    Attributes:
        every: after each multiple of this many; 0 for none.
        at: after these.
        likely: after these Tune may ask for one or not; none of them is in ``at``.
        at_end: when the trainable says that it is done.
    """

    every: int = 0
    at: frozenset[int] = frozenset()
    likely: frozenset[int] = frozenset()
    at_end: bool = False

    @property
    def may_be_asked(self) -> bool:
        """Whether Tune may ask for any."""
        return bool(self.every or self.at or self.likely or self.at_end)

    def due(self, iteration: int, done: bool = False) -> bool:
        """Whether Tune is sure to ask for a checkpoint after an iteration, at which the trial may be done."""
        return iteration in self.at or (done and self.at_end) or bool(self.every and iteration % self.every == 0)


# -- lane trial ----------------------------------------------------------------------------------


#: Keys of what :meth:`LaneTrial.step` reports.
RESULT, SAVED = "result", "saved"
#: The entry of a config that holds the pickled :class:`LaneTrialSpec`.
SPEC = "spec"
_STATE = "tune.pkl"
_FILES = "state"
#: What the trainable resets when it is restored, as it does for the controller.
_LAST = "_last_result"
#: What the driver puts into a config, and Tune's Trainable takes out before ``setup``.
_OF_TUNE = (TRIAL_INFO, STDOUT_FILE, STDERR_FILE)
_COUNTERS = ("_iterations_since_restore", "_time_since_restore", "_restored", _LAST)


class RestoreError(Exception):
    """The trainable could not be restored.

    Attributes:
        traceback: of the trainable's own error, as text.
        error: that error.
    """

    def __init__(self, traceback: str, error: Exception) -> None:
        super().__init__(traceback, error)
        self.traceback = traceback
        self.error = error


class FailedSave(NamedTuple):
    """In place of a checkpoint that the trainable could not make; the result that it came with stands.

    Attributes:
        traceback: of the error, as text.
        error: the error.
        checkpoint: none.
        metrics: none.
    """

    traceback: str
    error: BaseException
    checkpoint: None = None
    metrics: Mapping[str, Any] = {}

    def __reduce__(self) -> Any:
        return _failed_save, (self.traceback, dump_exception(self.error))


class IterationWanted(NamedTuple):
    """A trial's request to its driver to run an iteration, which waits until Tune has decided about the one before.

    The answer is whether it may. Trials ask if they count ``training_iteration`` in a way of their own, such as in
    epochs of ten steps each: how many calls of ``train`` there are until Tune's next decision is not known.

    Attributes:
        iteration: its number, of those done in Fluid.
    """

    iteration: int


class LaneTrialSpec(NamedTuple):
    """A trial as it is sent to a lane.

    Attributes:
        arguments: those of the trainable, by name.
        checkpoints: the iterations after which the lane makes a checkpoint.
        session_path: where Ray keeps this sweep's files on a machine; ``None`` in releases that do not need it.
        restore_from: the result of ``save`` from which it is restored, or a :class:`SavedInMemory`; ``None`` for a
            fresh start.
        devices: how many the trial holds.
        epoch: when the session's clock showed 0, seconds since 1970, in a rehearsal; ``None`` in others.
        in_memory: whether the lane may write checkpoints to host memory, from which the driver copies them.
        ends_at: training iteration at which, or after which, Tune is sure to stop the trial; ``None`` for none.
    """

    arguments: Mapping[str, Any]
    checkpoints: CheckpointSchedule
    session_path: str | None = None
    restore_from: Any = None
    devices: int = 1
    epoch: float | None = None
    in_memory: bool = False
    ends_at: float | None = None


class LaneTrial:
    """A trainable of Fluid that runs a trainable of Tune; :func:`lane_trial_for` makes a subclass for each."""

    shipped_trainable: ClassVar[ShippedTrainable]
    #: Why the trial is not in the state from which Tune began it, if it has to go on from another one.
    _restore_error: RestoreError | None = None

    def setup_to_load(self, config: dict[str, PickledArguments]) -> None:
        """Sets up a trial that is to go on from a checkpoint of Fluid.

        Tune may have deleted the one that it began from. That only counts if Fluid's cannot be loaded either.
        """
        try:
            self.setup(config)
        except RestoreError as error:
            self._restore_error = error

    def setup(self, config: dict[str, PickledArguments]) -> None:
        spec = self._unpickle(config)
        self._make(spec, spec.arguments)
        if spec.restore_from is not None:
            try:
                with self._in_place():
                    restore(self._trainable.restore, spec.restore_from)
            except Exception as error:
                raise RestoreError(traceback.format_exc(), error) from error

    def _await_decision(self) -> None:
        """Waits until Tune has processed all results.

        Raises:
            NoIterationLeftError: it has stopped or paused the trial.
        """
        try:
            may_run = driver_link().ask(IterationWanted(self.iteration + 1))
        except RequestRefusedError:
            may_run = False
        if not may_run:
            raise NoIterationLeftError

    def _require_restored(self) -> None:
        if self._restore_error is not None:
            raise self._restore_error

    def _unpickle(self, config: Mapping[str, PickledArguments]) -> LaneTrialSpec:
        spec: LaneTrialSpec = config[SPEC].unpickle()
        return spec

    def _make(self, spec: LaneTrialSpec, arguments: Mapping[str, Any]) -> None:
        install()
        self._inner_training = InnerTraining(spec.devices)
        #: Iterations done here; the trainable's own count may start from a checkpoint's.
        self.iteration = 0
        #: Whether its results have a ``training_iteration`` of its own, and not the next number.
        self._counts_itself = False
        self._inner_training.attach()
        self._session = SessionSlot()
        self._streams = (sys.stdout, sys.stderr)
        self._redirected = False
        self._clock = MonotonicClock()
        #: Seconds of training since the last checkpoint.
        self._work = 0.0
        #: Seconds that the last checkpoint took.
        self._save_cost: float | None = None
        self._checkpoints = spec.checkpoints
        self._in_memory = spec.in_memory
        if spec.session_path is not None:
            give_session_path(spec.arguments["storage"], spec.session_path)
        driver_link().folder = trial_folder_of(spec.arguments["storage"])
        #: The config as the driver has it, its containers copied, as the trainable may change them; and its own.
        self._own_config: Any = None
        self._config = _containers_copied(
            {name: value for name, value in spec.arguments["config"].items() if name not in _OF_TUNE}
        )
        with self._in_place():
            self._trainable: Any = make_quietly(self.shipped_trainable.trainable, arguments)

    def step(self) -> dict[str, Any]:
        self._require_restored()
        if self._counts_itself:
            self._await_decision()
        begun = self._clock.now()
        with self._in_place():
            try:
                result = self._trainable.train()
            except StopIteration as error:
                raise stray_stop_iteration("step") from error
            except BaseException:
                if self._inner_training.wants_devices:
                    raise NoIterationLeftError from None
                raise
            if RESULT_DUPLICATE in result:
                raise NoIterationLeftError
            done = bool(result.get(DONE))
            self.iteration += 1
            self._counts_itself |= result[TRAINING_ITERATION] != self._trainable._iteration
            self._work += self._clock.now() - begun
            saved = self._save_or_failure() if self._should_save(result) else None
        return {RESULT: self._without_config(result), SAVED: saved, DONE: done}

    def cleanup(self) -> None:
        self._inner_training.end()
        # A trainable that has failed raises its error again when it is stopped; it has been reported.
        self._session.refuse_reports()
        with self._in_place(), suppress(Exception):
            self._trainable.stop()
        self._session.await_function()

    # -- called by name, between two iterations ------------------------------------------------------------

    def save(self) -> Any:
        """Makes a checkpoint where Tune keeps them."""
        self._require_restored()
        with self._in_place():
            return self._save()

    def set_checkpoints(self, checkpoints: CheckpointSchedule) -> None:
        """Sets the iterations after which to make a checkpoint."""
        self._checkpoints = checkpoints

    def resume(self, checkpoints: CheckpointSchedule) -> None:
        """Resumes a paused trial that stayed resident; it then looks as if it had been restored from its checkpoint."""
        self._checkpoints = checkpoints
        trainable = self._trainable
        trainable._time_since_restore = 0.0
        trainable._iterations_since_restore = 0
        trainable._restored = True

    def run_method(self, name: str, arguments: PickledArguments) -> Any:
        """Calls a method of the trainable."""
        positional, named = arguments.unpickle()
        with self._in_place():
            return getattr(self._trainable, name)(*positional, **named)

    # -- saving --------------------------------------------------------------------------------------------

    def _should_save(self, result: Mapping[str, Any]) -> bool:
        if isinstance(self._trainable, FunctionTrainable):
            # A function reports its own checkpoints; nothing can be saved between them.
            return self._trainable._last_training_result.checkpoint is not None
        if self._counts_itself and self._checkpoints.may_be_asked:
            return True  # Tune may ask for one now, and its lane waits for Tune's decision from here on.
        is_likely = result[TRAINING_ITERATION] in self._checkpoints.likely
        return self._is_due(result) or (is_likely and (self._save_cost or 0.0) <= tuning.CHEAP_SAVE * self._work)

    def _is_due(self, result: Mapping[str, Any]) -> bool:
        """Whether Tune is sure to ask for a checkpoint when it has processed a result."""
        asks = bool(result.get(SHOULD_CHECKPOINT))
        return asks or self._checkpoints.due(result[TRAINING_ITERATION], bool(result.get(DONE)))

    def _save_or_failure(self) -> Any:
        """Makes a checkpoint that the controller will ask for once it has the result of this iteration."""
        try:
            return self._save()
        except Exception as error:
            return FailedSave(traceback.format_exc(), error)

    def _save(self) -> Any:
        begun = self._clock.now()
        trainable = self._trainable
        in_memory = save_in_memory(trainable, trainable.trial_id) if self._in_memory else None
        saved = trainable.save() if in_memory is None else in_memory.result
        self._save_cost, self._work = self._clock.now() - begun, 0.0
        result = TrainingResult(checkpoint=saved.checkpoint, metrics=self._without_config(saved.metrics))
        return result if in_memory is None else in_memory._replace(result=result)

    def _without_config(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Replaces the config, which may be large, by ``None``, unless the trainable has made it another."""
        config = result.get("config")
        if config is None or not is_same_value(config, self._config):
            return dict(result)
        if config is not self._own_config:  # Usually a copy, whose values are compared by identity from now on.
            self._own_config, self._config = config, _containers_copied(config)
        return {**result, "config": None}

    # -- the state of the process that belongs to this trial -----------------------------------------------

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Switches the process to this trial's Tune session and to its streams redirected by ``log_to_file``."""
        streams = sys.stdout, sys.stderr
        if self._redirected:
            sys.stdout, sys.stderr = self._streams
        try:
            with self._session.in_force():
                yield
        finally:
            if (sys.stdout, sys.stderr) != streams:
                self._streams = sys.stdout, sys.stderr
                self._redirected = True
            sys.stdout, sys.stderr = streams


class SavableLaneTrial(LaneTrial):
    """One that Fluid can move. Fluid's own checkpoints are kept apart from Tune's and leave no trace in the sweep."""

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
            state = (saved.metrics, counters, index, self._checkpoints, self.iteration)
            file.write(pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL))

    def load_checkpoint(self, folder: str) -> None:
        with open(os.path.join(folder, _STATE), "rb") as file:
            metrics, counters, index, self._checkpoints, self.iteration = pickle.load(file)
        self._restore_error = None
        trainable = self._trainable
        checkpoint = Checkpoint.from_directory(os.path.join(folder, _FILES))
        with self._in_place():
            trainable.restore(TrainingResult(checkpoint=checkpoint, metrics=metrics))
        for name, value in counters.items():
            setattr(trainable, name, value)
        if index is not None:
            trainable._storage.current_checkpoint_index = index


class FunctionLaneTrial(LaneTrial):
    """A function, which Fluid can move in the states that it reports as checkpoints, from copies of these."""

    fluid_reports_states = True

    def _make(self, spec: LaneTrialSpec, arguments: Mapping[str, Any]) -> None:
        super()._make(spec, arguments)
        self._ends_at, self._ended = spec.ends_at, False
        self._reported = ReportedCheckpoint()
        with self._session.in_force() as session:
            self._reported.watch(session)
        #: The counters, the number of the checkpoint and the iteration at the newest report of a checkpoint.
        self._at_report: tuple[dict[str, Any], int | None, int] = {}, None, 0

    def step(self) -> dict[str, Any]:
        reported = super().step()
        self._reported.note(self._trainable)
        if self._reported.unsaved_iterations == 0:
            counters = {name: getattr(self._trainable, name) for name in _COUNTERS}
            counters[_LAST] = self._without_config(counters[_LAST])
            index = getattr(self._trainable._storage, "current_checkpoint_index", None)
            self._at_report = counters, index, self.iteration
        if self._ends_at is not None and reported[RESULT][TRAINING_ITERATION] >= self._ends_at:
            # Nothing more is asked of it, and the trial that comes next may need the lock or the port that it holds.
            self._end()
        return reported

    def unsaved_iterations(self) -> int | None:
        """Iterations since the newest checkpoint; ``None`` without one from which the function would go on."""
        return self._reported.unsaved_iterations

    def save_checkpoint(self, folder: str) -> None:
        saved = self._reported.result
        saved.checkpoint.to_directory(os.path.join(folder, _FILES))
        with open(os.path.join(folder, _STATE), "wb") as file:
            state = (saved.metrics, *self._at_report, self._checkpoints)
            file.write(pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL))

    def load_checkpoint(self, folder: str) -> None:
        with open(os.path.join(folder, _STATE), "rb") as file:
            metrics, counters, index, self.iteration, self._checkpoints = pickle.load(file)
        self._restore_error = None
        self._at_report = dict(counters), index, self.iteration
        trainable = self._trainable
        checkpoint = Checkpoint.from_directory(os.path.join(folder, _FILES))
        self._reported.restored(TrainingResult(checkpoint=checkpoint, metrics=metrics), os.path.dirname(folder))
        with self._in_place():
            trainable.restore(self._reported.result)
        counters[_LAST]["config"] = trainable.config
        for name, value in counters.items():
            setattr(trainable, name, value)
        if index is not None:
            trainable._storage.current_checkpoint_index = index

    def cleanup(self) -> None:
        self._reported.forget()
        self._end()

    def _end(self) -> None:
        """Stops the function, once."""
        if not self._ended:
            self._ended = True
            super().cleanup()


def _failed_save(text: str, pickled: bytes) -> FailedSave:
    return FailedSave(text, load_any_exception(pickled))


def _containers_copied(value: Any) -> Any:
    """A value with its dicts, lists and tuples copied, and nothing in them."""
    if type(value) is dict:
        return {name: _containers_copied(one) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_containers_copied, value))
    return value
