"""What users get of a session: its iterations and trials. :mod:`fluid.results.sweep` holds sweeps, with their best."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from fluid.engine.events import Failure
from fluid.errors import FluidError
from fluid.joint.folders import beside
from fluid.keeping import value_of
from fluid.lane.checkpoints.paths import own_folder, trial_folder
from fluid.random_state import Seeds
from fluid.results.checkpoints import (
    KeptCheckpoint,
    TrainableSource,
    kept_checkpoints,
    load_checkpoint,
    stored_trainable,
)
from fluid.trainables.encoded_metrics import EncodedMetrics, numbers_in
from fluid.trainables.json_form import json_form
from fluid.trainables.usage import NO_USAGE, Usage
from fluid.trial_fields import StartFrom, own_config
from fluid.trialgroup import Trial, TrialState

#: Types whose values nothing can change.
_ATOMS = frozenset({float, int, str, bool, type(None)})


class Shared(NamedTuple):
    """A value of several readers, which none of them changes: each gets a copy of its own at its first read."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One finished iteration of a trial. It is its holder's own: no other reader has the same metrics or config.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> with FluidExecutor(backend="local", devices=1, verbose=0) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, trial_id="a")])
        ...     (result,) = executor.submit_trialgroup(group).results()
        >>> result.trial_id, result.iteration, result.metrics, result.width, result.device_ids, result.config
        ('a', 1, {'loss': 0.25}, 1.0, (0,), {'lr': 0.5})

    Attributes:
        trial_id: the trial.
        iteration: its number, from 1.
        metrics: what the trial reported, as it was then; decoded at the first read, in the reader's thread.
        seconds: wall time of the iteration.
        width: width at which it ran: ``1/p`` as one of p trials on a device, 1, or a number of devices. A trial that
            takes turns with others in a lane has the lane's part of the device to itself while it iterates.
        device_ids: devices on which it ran.
        config: the trial's hyperparameters.
        rows: trials that took this iteration together in one fused step, itself included; 1 if it was not fused.
        usage: what else the iteration used, such as the bytes that it read.
        source: the trial that ran the iteration, where that was done once for several whose configs agree until then;
            empty for the trial itself. Seconds, width and devices are those of that trial.
    """

    trial_id: str
    iteration: int
    metrics: Any
    seconds: float
    width: float
    device_ids: tuple[int, ...]
    config: Mapping[str, Any]
    rows: int = 1
    usage: Usage = NO_USAGE
    source: str = ""

    def number(self, name: str) -> float | None:
        """The number that a metric has, NaN and infinities included; ``None`` if it was not reported or is no number.

        Args:
            name: of the metric; nested names are joined by ``/``.
        """
        held = _METRICS.held(self)
        if isinstance(held, EncodedMetrics):
            return held.numbers.get(name)
        held = held.value if isinstance(held, Shared) else held
        found = value_of(held, name)  # Most are at hand; of others, names and values count as JSON has them.
        return found if type(found) is float else numbers_in(json_form(held)).get(name)

    def plain(self) -> Any:
        """The JSON form of the metrics, as files and reports hold it; runs no code of the metrics' classes."""
        held = _METRICS.held(self)
        return held.plain() if isinstance(held, EncodedMetrics) else json_form(self.metrics)

    def copy(self) -> Result:
        """A result that shares nothing with this one that its holder could change."""
        metrics, config = _METRICS.held(self), _CONFIG.held(self)
        own: Any = metrics if isinstance(metrics, (EncodedMetrics, Shared)) else copy.deepcopy(metrics)
        given: Any = config if isinstance(config, (Trial, Shared)) else own_config(config)
        return replace(self, metrics=own, config=given)

    def lent(self) -> Result:
        """The same, for a result that stays as it is: what it holds is copied when the copy is first read."""
        metrics, config = _METRICS.held(self), _CONFIG.held(self)
        own: Any = metrics if isinstance(metrics, (EncodedMetrics, Shared)) else Shared(metrics)
        given: Any = config if isinstance(config, (Trial, Shared)) else Shared(config)
        return replace(self, metrics=own, config=given)

    @property
    def device_seconds(self) -> float:
        """Seconds of devices that it used: of a device that trials shared, the trial's part; 0 if it has a source."""
        return 0.0 if self.source else device_seconds(self.seconds, self.width, len(self.device_ids), self.rows)


class _AtFirstRead:
    """A slot of which what it holds is made into what the reader gets when it is first read.

    Args:
        slot: the slot.
        make: by the type of what it may hold until then, makes the value of that.
    """

    def __init__(self, slot: Any, make: Mapping[type, Callable[[Any], Any]]) -> None:
        self._slot = slot
        self._make = make
        self._kinds = tuple(make)

    def held(self, record: object) -> Any:
        """What the slot holds."""
        return self._slot.__get__(record, type(record))

    def __get__(self, record: object | None, owner: type | None = None) -> Any:
        if record is None:
            return self
        value = self._slot.__get__(record, owner)
        if isinstance(value, self._kinds):
            value = next(make for kind, make in self._make.items() if isinstance(value, kind))(value)
            self._slot.__set__(record, value)
        return value

    def __set__(self, record: object, value: Any) -> None:
        self._slot.__set__(record, value)


def _copy_metrics(shared: Shared) -> Any:
    metrics = shared.value
    is_flat = type(metrics) is dict and all(type(value) in _ATOMS for value in metrics.values())
    return dict(metrics) if is_flat else copy.deepcopy(metrics)


def _copy_config(shared: Shared) -> dict[str, Any]:
    return own_config(shared.value)


#: ``Result.metrics`` holds EncodedMetrics at first, and ``Result.config`` the Trial: most are never read.
_METRICS = _AtFirstRead(vars(Result)["metrics"], {EncodedMetrics: EncodedMetrics.decode, Shared: _copy_metrics})
_CONFIG = _AtFirstRead(vars(Result)["config"], {Trial: lambda trial: own_config(trial.config), Shared: _copy_config})
for _name, _slot in (("metrics", _METRICS), ("config", _CONFIG)):
    setattr(Result, _name, _slot)


def device_seconds(seconds: float, width: float, devices: int, rows: int = 1) -> float:
    """Seconds of devices that an iteration used; several trials on a device each used a part of it.

    Args:
        seconds: wall time of the iteration.
        width: as of a :class:`Result`.
        devices: number of devices.
        rows: trials that took the iteration in one fused step, whose device is theirs alone.
    """
    return seconds * devices / rows if rows > 1 else seconds * devices * min(1.0, width)


def short_text(value: object, longest: int = 200) -> str:
    """A value as text, shortened in the middle if it is long."""
    text = value if isinstance(value, str) else repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


@dataclass(frozen=True, slots=True)
class TrialFiles:
    """Where the files of a trial are.

    Attributes:
        run_dir: the run folder.
        submitted: ids of the submitted trials that are shown as this one, each with the iterations done before it.
        source: gives the trainable and the config; ``None`` to unpickle them from the run folder.
    """

    run_dir: Path
    submitted: tuple[tuple[str, int], ...]
    source: TrainableSource | None = None

    @property
    def log(self) -> Path | None:
        """The file with what the trial printed; ``None`` if there is none."""
        return next((path for path in self._places(trial_folder, "output.log") if path.is_file()), None)

    @property
    def folder(self) -> Path | None:
        """The trial's own folder, of :func:`fluid.trial_dir`; ``None`` if there is none."""
        return next((path for path in self._places(own_folder) if path.is_dir()), None)

    @property
    def checkpoints(self) -> tuple[KeptCheckpoint, ...]:
        """The checkpoints on disk, the newest last; numbered as the trial's iterations."""
        return tuple(
            KeptCheckpoint(before + found.iteration, found.path)
            for trial_id, before in self.submitted
            for found in sorted(
                (one for folder in beside(self.run_dir) for one in kept_checkpoints(folder, trial_id)),
                key=attrgetter("iteration"),
            )
        )

    def load(self, checkpoint: Path) -> Any:
        """Loads one of the checkpoints."""
        folder, trial_id = next(
            (folder, trial_id)
            for trial_id, _ in self.submitted
            for folder in beside(self.run_dir)
            if any(found.path == checkpoint for found in kept_checkpoints(folder, trial_id))
        )
        source = self.source or partial(stored_trainable, self.run_dir, trial_id)
        return load_checkpoint(folder, trial_id, checkpoint, source)

    def _places(self, folder_in: Callable[[str, str], str], *names: str) -> Iterator[Path]:
        """Where a file or folder of the trial may be, the likeliest first."""
        for trial_id, _ in reversed(self.submitted):
            for folder in beside(self.run_dir):
                yield Path(folder_in(str(folder), trial_id), *names)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrialResult:
    """One trial of a sweep, as it stands or as it ended.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup, load
        >>> def train(config):
        ...     for step in (1, 2):
        ...         yield {"loss": config["lr"] / step}
        >>> with FluidExecutor(backend="local", devices=1, run_dir="run", verbose=0) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, budget=2, trial_id="a")])
        ...     done = executor.submit_trialgroup(group).wait()
        >>> (trial,) = load("run").trials
        >>> trial.trial_id, trial.state, trial.iteration, trial.metrics, [r.metrics for r in trial.results]
        ('a', 'DONE', 2, {'loss': 0.25}, [{'loss': 0.5}, {'loss': 0.25}])

    Attributes:
        trial_id: the trial, by the id under which reports show it.
        group: name of its group.
        config: its hyperparameters.
        state: ``"DONE"``, ``"STOPPED"``, ``"INFEASIBLE"`` (its code raised :class:`fluid.Infeasible`), ``"FAILED"``,
            ``"PAUSED"`` or ``"PAUSED BY THE USER"``; of a run folder also
            ``"UNFINISHED"``, if it had not ended, and ``"UNKNOWN"``; of a handle also the other states of
            :class:`fluid.trialgroup.TrialState`.
        iteration: iterations that it has done.
        metrics: those of its last iteration; empty before the first.
        results: all its iterations, in order.
        failure: why it failed, or is infeasible; ``None`` otherwise.
        seeds: of its random number generators when it was set up: ``random``, ``numpy`` and ``torch``; ``None`` of a
            run of an older Fluid.
        files: where its files are; ``None`` if it has none.
        start: the state from which it starts, another trial's: ``parent``, the id of that trial; ``at``, iterations
            done by the state, ``None`` while that is unknown; ``path``, the checkpoint, of a trial of another run;
            ``is_shared``, whether the iterations until then are this trial's, too. ``None`` if it begins afresh.
    """

    trial_id: str
    group: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str
    iteration: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[Result, ...] = field(default=(), repr=False)
    failure: Failure | None = None
    seeds: Seeds | None = field(default=None, repr=False)
    files: TrialFiles | None = field(default=None, repr=False, compare=False)
    start: StartFrom | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        facts = f"{self.trial_id!r}, {self.state}, iteration={self.iteration}, metrics={short_text(self.metrics)}"
        return f"TrialResult({facts}, config={short_text(self.config)})"

    def lent(self) -> TrialResult:
        """A record of a reader's own, of one that stays as it is: what it holds is copied when it is first read."""
        config, metrics, results = map(Shared, (self.config, self.metrics, self.results))
        own: dict[str, Any] = {"config": config, "metrics": metrics, "results": results}
        return replace(self, **own)

    @property
    def infeasible(self) -> str | None:
        """Why it is infeasible, as its code says; ``None`` if it is not."""
        return self.failure.message if self.state == TrialState.INFEASIBLE and self.failure is not None else None

    @property
    def seconds(self) -> float:
        """Wall time of the iterations that it ran itself."""
        return float(sum(result.seconds for result in self.results if not result.source))

    @property
    def device_seconds(self) -> float:
        """Seconds of devices that the iterations it ran itself used; of devices that trials shared, its part."""
        return float(sum(result.device_seconds for result in self.results))

    @property
    def log(self) -> Path | None:
        """The file with what it printed; ``None`` if there is none."""
        return None if self.files is None else self.files.log

    @property
    def folder(self) -> Path | None:
        """The folder that :func:`fluid.trial_dir` gave it; ``None`` if it has none on this machine."""
        return None if self.files is None else self.files.folder

    @property
    def checkpoints(self) -> tuple[KeptCheckpoint, ...]:
        """The checkpoints that are kept on disk now, the newest last; also those of runs that it shared."""
        return () if self.files is None else self._files_with_shared.checkpoints

    @property
    def _files_with_shared(self) -> TrialFiles:
        """Its files, and those of the runs whose iterations are its own, too: they come before it does."""
        assert self.files is not None
        runs = dict.fromkeys(result.source for result in self.results if result.source)
        return (
            replace(self.files, submitted=(*((run, 0) for run in runs), *self.files.submitted)) if runs else self.files
        )

    @property
    def checkpoint(self) -> Path | None:
        """The newest folder that ``save_checkpoint`` filled; ``None`` if no checkpoint is kept."""
        kept = self.checkpoints
        return kept[-1].path if kept else None

    @property
    def checkpoint_iteration(self) -> int | None:
        """Iterations done at :attr:`checkpoint`; ``None`` if no checkpoint is kept."""
        kept = self.checkpoints
        return kept[-1].iteration if kept else None

    def load_checkpoint(self, checkpoint: Path | None = None) -> Any:
        """Loads a checkpoint.

        The trainable and its config are unpickled from the run folder, which runs code: load only folders that you
        trust.

        Args:
            checkpoint: one of :attr:`checkpoints`, by its path; ``None``, the default, for the newest.

        Returns:
            Of a class: an object of it, set up with the trial's config and restored. Of a generator function with a
            state: the state. Of a function that calls :func:`fluid.report`: the folder that its ``save`` filled. Of a
            function for Ray Tune: the ``ray.tune.Checkpoint`` that it reported.

        Raises:
            FluidError: no checkpoint is kept, or it is damaged.
            InvalidFieldError: the trainable cannot be unpickled.
        """
        path = self.checkpoint if checkpoint is None else Path(checkpoint)
        if path is None or self.files is None:
            raise FluidError(
                f"trial {self.trial_id!r} has no checkpoint: to have one, give its function a parameter state and"
                " yield (metrics, state), or its class save_checkpoint and load_checkpoint; a sweep keeps that"
                ' of its best trial, and with keep="last" those of all'
            )
        return self._files_with_shared.load(path)


for _name, _copied in (
    ("config", _copy_config),
    ("metrics", _copy_metrics),
    ("results", lambda shared: tuple(result.lent() for result in shared.value)),
):
    setattr(TrialResult, _name, _AtFirstRead(vars(TrialResult)[_name], {Shared: _copied}))
