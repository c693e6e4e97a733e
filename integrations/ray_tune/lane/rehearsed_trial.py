"""A trial of Ray Tune that is rehearsed: what Tune's Trainable would report and save, from a replay of its metrics.

No trainable is made. The results have the fields that Tune's Trainable adds, with times of the session's clock; a
checkpoint is a folder with a small file.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import platform
import posixpath
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import ray.util

from fluid._clock import local_time
from fluid.backends.simulated.steps import PlayedIteration
from fluid.errors import InvalidFieldError
from fluid.integrations.ray_tune.lane.lane_trial import RESULT, SAVED, CheckpointSchedule, FailedSave, LaneTrialSpec
from fluid.integrations.ray_tune.private_api import (
    DONE,
    SHOULD_CHECKPOINT,
    STDERR_FILE,
    STDOUT_FILE,
    TIME_THIS_ITER_S,
    TRAINING_ITERATION,
    TRIAL_INFO,
    Checkpoint,
    FunctionTrainable,
    TrainingResult,
)
from fluid.rehearsal.backend import replayable_of
from fluid.rehearsal.course import ReplayedCourse
from fluid.rehearsal.replayable import Replayable, ReplayedFusion
from fluid.trainables.encoded_metrics import NO_METRICS, encode_metrics
from fluid.trainables.import_scan import elastic_class_of
from fluid.trainables.pickling import dump_result

#: The file of a checkpoint.
STATE_FILE = "rehearsed.json"
#: How many functions deep a function may be wrapped, by ``tune.with_parameters`` and others, that can be replayed.
_DEEPEST = 4
_DATE = "%Y-%m-%d_%H-%M-%S"


class Counters(NamedTuple):
    """What Tune's Trainable counts.

    Attributes:
        time_total: seconds of all iterations.
        time_since_restore, iterations_since_restore, timesteps_since_restore: since it was restored.
        timesteps_total, episodes_total: as far as its results tell them.
    """

    time_total: float = 0.0
    time_since_restore: float = 0.0
    iterations_since_restore: int = 0
    timesteps_total: Any = None
    timesteps_since_restore: Any = 0
    episodes_total: Any = None

    def resumed(self) -> Counters:
        """As they are once the trial was restored."""
        return self._replace(time_since_restore=0.0, iterations_since_restore=0, timesteps_since_restore=0)

    def after(self, seconds: float, result: Mapping[str, Any]) -> Counters:
        """As they are after an iteration of so many seconds with a result."""
        steps, episodes = result.get("timesteps_this_iter"), result.get("episodes_this_iter")
        return Counters(
            self.time_total + seconds,
            self.time_since_restore + seconds,
            self.iterations_since_restore + 1,
            self.timesteps_total if steps is None else (self.timesteps_total or 0) + steps,
            self.timesteps_since_restore if steps is None else self.timesteps_since_restore + steps,
            self.episodes_total if episodes is None else (self.episodes_total or 0) + episodes,
        )


class RehearsedTrial:
    """The course of a trial of Tune; see :class:`fluid.backends.simulated.steps.Course`.

    A function is taken to make a checkpoint wherever Tune asks for one, as a class does: how often it reports one by
    itself is not known.

    Args:
        replayable: says what the trial does.
        spec: as a lane would be sent it.
        is_function: whether the trainable is a function.
    """

    def __init__(self, replayable: Replayable, spec: LaneTrialSpec, *, is_function: bool) -> None:
        config = dict(spec.arguments["config"])
        self._trial_id = getattr(config.pop(TRIAL_INFO, None), "trial_id", "default")
        for key in (STDOUT_FILE, STDERR_FILE):
            config.pop(key, None)
        self._replayed = ReplayedCourse(replayable, config)
        self._storage = spec.arguments["storage"]
        self._epoch: float = spec.epoch or 0.0
        self._checkpoints: CheckpointSchedule = spec.checkpoints
        self._is_function = is_function
        restored = spec.restore_from
        metrics: Mapping[str, Any] = {} if restored is None else restored.metrics
        #: Training iteration from which the trial goes on.
        self._start = int(metrics.get(TRAINING_ITERATION, 0))
        #: By the number of iterations done here, as the trial may have to repeat some.
        self._counters = {
            0: Counters(
                time_total=metrics.get("time_total_s", 0.0),
                timesteps_total=metrics.get("timesteps_total"),
                episodes_total=metrics.get("episodes_total"),
            )
        }
        self._last: dict[str, Any] = dict(metrics)
        self._done = 0

    # -- the interface of a course -------------------------------------------------------------------------

    @property
    def fusion(self) -> ReplayedFusion | None:
        """With which trials it can train in one step; ``None`` if that is not known."""
        return self._replayed.fusion

    def prepare(self, iterations: range) -> None:
        """Asks for iterations that are about to be played, and one more: the last one says that it is the last."""
        self._replayed.prepare(range(self._start + iterations.start, self._start + iterations.stop + 1))

    def play(self, iteration: int) -> PlayedIteration | None:
        """One iteration; ``None`` if the trial has none left."""
        played = self._replayed.play(self._start + iteration)
        if played is None:
            return None
        metrics = dict(played.metrics.decode())
        if played.finished and not self._is_function:
            metrics[DONE] = True
        finished = bool(metrics.get(DONE))  # A function is found to have returned after its last report.
        report = functools.partial(self._report, iteration, metrics)
        return played._replace(metrics=NO_METRICS, finished=finished, report=report)

    def call(self, method: str, payload: bytes) -> bytes | None:
        """Answers a call as a lane does: see :class:`fluid.integrations.ray_tune.lane.lane_trial.LaneTrial`."""
        args, named = pickle.loads(payload)
        if method == "save":
            return dump_result(self._save())
        if method in ("set_checkpoints", "resume"):
            self._checkpoints = next(iter((*args, *named.values())))
            if method == "resume":
                self._counters[self._done] = self._counters[self._done].resumed()
        return dump_result(None)

    # -- results -------------------------------------------------------------------------------------------

    def _report(self, iteration: int, metrics: dict[str, Any], seconds: float, now: float) -> Any:
        """What a lane would report at the end of an iteration that took so many seconds."""
        took = metrics.get(TIME_THIS_ITER_S)
        took = seconds if took is None else took
        counters = self._counters[iteration] = self._counters[iteration - 1].after(took, metrics)
        self._done = iteration
        result = self._filled(metrics, counters, took, self._epoch + now)
        done = bool(result[DONE])
        number = result[TRAINING_ITERATION]
        self._last = result
        saved: Any = None
        if result.get(SHOULD_CHECKPOINT) or number in self._checkpoints.likely or self._checkpoints.due(number, done):
            saved = self._save_or_failure()
        return encode_metrics({RESULT: result, SAVED: saved, DONE: done})

    def _filled(self, metrics: dict[str, Any], counters: Counters, took: float, at: float) -> dict[str, Any]:
        """A result with the fields that Tune's Trainable adds, in its order, without the config."""
        result = dict(metrics)
        timestamp = int(at)
        if self._is_function:
            result["timestamp"], result["checkpoint_dir_name"] = timestamp, None
        else:
            timestamp = result.get("timestamp") or timestamp
        result.setdefault(DONE, False)
        if counters.timesteps_total is not None:
            result.setdefault("timesteps_total", counters.timesteps_total)
        if counters.episodes_total is not None:
            result.setdefault("episodes_total", counters.episodes_total)
        result.setdefault(TRAINING_ITERATION, self._start + self._done)
        result |= {
            "trial_id": self._trial_id,
            "date": local_time(at, _DATE),
            "timestamp": timestamp,
            TIME_THIS_ITER_S: took,
            "time_total_s": counters.time_total,
            "pid": os.getpid(),
            "hostname": platform.node(),
            "node_ip": _node_ip(),
            "config": None,
            "time_since_restore": counters.time_since_restore,
            "iterations_since_restore": counters.iterations_since_restore,
        }
        if counters.timesteps_since_restore:
            result["timesteps_since_restore"] = counters.timesteps_since_restore
        return result

    # -- checkpoints ---------------------------------------------------------------------------------------

    def _save_or_failure(self) -> Any:
        try:
            return self._save()
        except Exception as error:
            return FailedSave(traceback.format_exc(), RuntimeError(f"{type(error).__name__}: {error}"))

    def _save(self) -> Any:
        """Makes a checkpoint where Tune keeps them: a folder with a file that says the iteration."""
        storage, metrics = self._storage, dict(self._last)
        storage._update_checkpoint_index(metrics)
        files, path = storage.storage_filesystem, storage.checkpoint_fs_path
        files.create_dir(path)
        state = {TRAINING_ITERATION: self._start + self._done, "time_total_s": self._counters[self._done].time_total}
        with files.open_output_stream(posixpath.join(path, STATE_FILE)) as file:
            file.write(json.dumps(state).encode())
        return TrainingResult(checkpoint=Checkpoint(path, filesystem=files), metrics=metrics)


def rehearsed_trial(trainable: type, spec: LaneTrialSpec, source: Replayable | None) -> RehearsedTrial:
    """Makes the course of a trial.

    Args:
        trainable: Tune's class.
        spec: as a lane would be sent it.
        source: in place of the trainable; ``None`` for the trainable itself.

    Raises:
        InvalidFieldError: it cannot be replayed.
    """
    replayable = tune_replayable(trainable, source)
    return RehearsedTrial(replayable, spec, is_function=issubclass(trainable, FunctionTrainable))


def tune_replayable(trainable: Any, source: Replayable | None = None) -> Replayable:
    """Returns what replays the trials of a trainable of Tune: a class, a function, or the class that Tune makes of it.

    Args:
        trainable: that.
        source: in place of it; ``None`` for the trainable itself.

    Raises:
        InvalidFieldError: it cannot be replayed.
    """
    if source is not None:
        return source
    for candidate in (trainable, elastic_class_of(trainable), *_functions_of(trainable)):
        if callable(getattr(candidate, "replay", None)):
            found: Replayable = candidate
            return found
    try:
        return replayable_of(trainable, None)
    except InvalidFieldError as error:
        name = getattr(trainable, "_name", None) or getattr(trainable, "__name__", trainable)
        raise InvalidFieldError("trainable", name, error.reason) from None


def _functions_of(trainable: Any) -> list[Any]:
    """The functions behind one, or behind the class that Tune makes of it, from the outside in."""
    if isinstance(trainable, type):
        trainable = getattr(trainable, "_trainable_func", None)
    found, level = [], [trainable]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for function in level:
            if isinstance(function, functools.partial):
                inner.append(function.func)
            inner += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_set(cell)]
            inner.append(getattr(function, "__wrapped__", None))
        level = [one for one in inner if callable(one) and not isinstance(one, type)]
        found += level
    return found


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # An empty cell.
        return False


@functools.cache
def _node_ip() -> str:
    return str(ray.util.get_node_ip_address())
