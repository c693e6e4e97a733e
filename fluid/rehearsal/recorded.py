"""One's own run folder as a source of replayed trials."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fluid.directions import direction_of, open_text
from fluid.errors import FluidError, InvalidFieldError, require_integer
from fluid.measure.runtime_model import FloatArray
from fluid.rehearsal.benchmark import Benchmark, Curve, ValueRange
from fluid.rehearsal.config_guess import FOR_FOREST, ConfigGuess, GuessedCurves
from fluid.rehearsal.curves import CurveTable, MetricPath, curve_table, leaves
from fluid.rehearsal.overheads import Overheads
from fluid.rehearsal.replayable import ReplayedFusion, ReplayedIteration
from fluid.rehearsal.run_records import RecordedTrial, RunRecords, read_records, texts_of
from fluid.rehearsal.spaces import space_of
from fluid.results.metrics import Goal

#: Curves of configs that are kept.
_MOST_KEPT = 4096
_SEED = 0


def recorded(
    run_dir: str | Path | Sequence[str | Path],
    *,
    metric: str | None = None,
    mode: str | None = None,
    noise: int | None = None,
) -> ReplayedRun:
    """Makes the trials of an earlier sweep a source of replayed ones.

    A config that was run does what was recorded, with the same seconds. Where a trial was stopped early, its curve goes
    on from its last value as those of trials that went on. A config that was not run is guessed: its curves by a small
    random forest over the recorded ones (of fewer than 8 trials, by the nearest config), its seconds and its memory by
    the cohorts of the recorded trials. :meth:`ReplayedRun.describe` says how well.

    Example:
        >>> import fluid
        >>> from fluid.rehearsal import ReplayedIteration, recorded
        >>> def train(config):
        ...     yield {"loss": config["lr"]}
        >>> def replay(config, iterations):
        ...     return [ReplayedIteration({"loss": config["lr"] / i}, seconds=60.0) for i in iterations]
        >>> train.replay = replay
        >>> trials = [fluid.Trial(train, {"lr": lr}, budget=4) for lr in (0.1, 0.2, 0.3)]
        >>> with fluid.FluidExecutor(backend="simulated", devices=3, max_width=1, run_dir="run", verbose=0) as executor:
        ...     done = executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
        >>> source = recorded("run", metric="loss")
        >>> source.replay({"lr": 0.2}, range(2, 4))[0].metrics, source.max_iterations
        ({'loss': 0.1}, 4)

    Args:
        run_dir: a run folder, or several, of sessions that have ended, were killed or still run; rehearsed ones too.
        metric: what is optimized; ``None``, the default, for what the search of the run says.
        mode: ``"min"`` or ``"max"``; ``None``, the default, for what the search says, else for what the metric's name
            does.
        noise: a seed by which what is guessed is drawn, for each config once, so that rehearsals with several seeds
            differ as much as the guess is uncertain; ``None``, the default, for the median.

    Raises:
        InvalidFieldError: a path is not a run folder, holds no finished iteration, or is of a newer Fluid; or nothing
            says the mode of a metric that may mean either.
    """
    folders = [run_dir] if isinstance(run_dir, (str, Path)) else run_dir
    if not isinstance(folders, Sequence) or not folders:
        raise InvalidFieldError("run_dir", run_dir, "must be the path of a run folder, or several")
    if noise is not None:
        noise = require_integer("noise", noise, at_least=0)
    return ReplayedRun([read_records(folder, metric, mode) for folder in folders], noise)


class ReplayedRun(Benchmark):
    """Replays trials from run folders; :func:`recorded` makes it.

    Example:
        >>> import fluid
        >>> from fluid.rehearsal import recorded
        >>> def train(config):
        ...     yield {"loss": config["lr"]}
        >>> trials = [fluid.Trial(train, {"lr": lr}) for lr in (0.1, 0.2, 0.3)]
        >>> with fluid.FluidExecutor(backend="local", devices=1, run_dir="run", verbose=0) as executor:
        ...     done = executor.submit_trialgroup(fluid.TrialGroup(trials)).wait()
        >>> source = recorded("run")
        >>> source.metric, source.best_known, source.worst_known
        ('loss', 0.1, 0.3)
        >>> source.describe()[-1]
        'only 3 trials: a config that was not run is taken to do as the nearest one that was'

    Args:
        records: of the folders, at least one.
        noise: a seed of draws; ``None`` for medians.

    Attributes:
        overheads: as they were measured in the first of the runs. The seconds of each were converted by its own.
    """

    def __init__(self, records: Sequence[RunRecords], noise: int | None = None) -> None:
        self._records = records
        self._noise = noise
        self._trials = [trial for run in records for trial in run.trials]
        goal = next((run.goals[0] for run in records if run.goals), None)
        self._table = curve_table(self._trials, None if goal is None else goal.metric)
        self._is_goal_known = goal is not None
        if goal is None:
            metric = "/".join(self._table.metrics[0].path) if self._table.metrics else "loss"
            mode = direction_of(metric)
            if mode is None:
                reason = open_text(metric, f"metric={metric!r} and mode='min' or mode='max'")
                raise InvalidFieldError("mode", None, reason)
            goal = Goal(metric, mode == "min")
        self._goal = goal
        super().__init__(
            name=" and ".join(run.name for run in records),
            space=space_of([trial.config for trial in self._trials]),
            metric=goal.metric,
            mode=goal.mode,
            max_iterations=max(trial.last for trial in self._trials),
        )
        self.overheads: Overheads = records[0].overheads
        self._fusion = next((run.fusion for run in records if run.fusion.rates is not None), None)
        self._guess = ConfigGuess(self._trials, self._table, _SEED)
        self._rows: dict[tuple[str | None, ...], int] = {}
        for row, trial in enumerate(self._trials):
            key = self._guess.columns.key(trial.texts) or ()
            known = self._rows.get(key)
            if known is None or self._trials[known].last < trial.last:
                self._rows[key] = row
        last = sorted(trial.last for trial in self._trials if trial.ended)
        #: When trials end by themselves, if most of those that were not stopped did.
        self._end = last[(len(last) - 1) // 2] if 2 * len(last) > len(self._trials) - self._stopped else None
        self._courses: dict[tuple[tuple[str, str], ...], _ConfigCourse] = {}
        self._asked: dict[tuple[tuple[str, str], ...], tuple[bool, bool]] = {}
        #: Names in the configs asked for that no recorded config has, and the furthest iteration replayed.
        self._unknown: dict[str, None] = {}
        self._furthest = 0

    def __repr__(self) -> str:
        return f"<ReplayedRun {self.name!r}: {len(self._trials)} trials>"

    @cached_property
    def known(self) -> ValueRange:
        """The best and the worst of the best values of the recorded trials; NaN if no trial has reported the metric."""
        best: list[float] = []
        for trial in self._trials:
            values = [self._goal.value_in(one.metrics) for one in trial.iterations.values()]
            known = [value for value in values if value is not None]
            if known:
                best.append(min(known) if self._goal.less else max(known))
        if not best:
            return ValueRange(math.nan, math.nan)
        return ValueRange(min(best), max(best)) if self._goal.less else ValueRange(max(best), min(best))

    def replay(self, config: Mapping[str, Any], iterations: range) -> Sequence[ReplayedIteration]:
        """Returns what a trial does in some iterations: see :class:`fluid.rehearsal.Replayable`."""
        texts = texts_of(config)
        key = tuple(sorted(texts.items()))
        course = self._courses.get(key)
        if course is None:
            if len(self._courses) >= _MOST_KEPT:
                self._courses.clear()
            course = self._courses[key] = self._course(texts, key)
        played = course.iterations(iterations)
        if played:
            self._furthest = max(self._furthest, iterations.start + len(played) - 1)
        return played

    def replay_many(self, curves: Sequence[Curve]) -> list[Sequence[ReplayedIteration]]:
        """The same for several trials, in order."""
        return [self.replay(config, iterations) for config, iterations in curves]

    @property
    def fuses(self) -> bool:
        """Whether trials were fused, so that it is known what that takes."""
        return self._fusion is not None

    def fusion(self, config: Mapping[str, Any]) -> ReplayedFusion | None:
        """With which trials a trial can train in one step: see :class:`fluid.rehearsal.Replayable`."""
        return None if self._fusion is None else self._fusion.of_config(texts_of(config))

    def describe(self) -> list[str]:
        """What it tells, how well it guesses, and what was asked of it so far, a sentence each."""
        lines = [self._recorded_line(run) for run in self._records]
        if not self._is_goal_known:
            lines.append(f"no search names a metric there; {self.metric} is taken, {self.mode}")
        if self._stopped:
            lines.append(
                f"{_trials_word(self._stopped)} ended before iteration {self.max_iterations}; beyond, curves go on as"
                " those of trials that went on"
            )
        lines += self._quality_lines()
        lines += self._fusion_lines()
        failed = sum(trial.failed for trial in self._trials)
        if failed:
            lines.append(f"{_trials_word(failed)} failed; a rehearsal has them go on")
        if self._asked:
            recorded_count = sum(was_run for was_run, _ in self._asked.values())
            outside = sum(not is_inside for _, is_inside in self._asked.values())
            rest = "" if recorded_count == len(self._asked) else "; the others are guessed"
            lines.append(f"{recorded_count} of {len(self._asked)} configs were run before{rest}")
            if outside:
                lines.append(f"{outside} of {len(self._asked)} configs lie outside of what was recorded")
            if self._unknown:
                lines.append(f"no recorded config has {', '.join(self._unknown)}: taken to have no effect")
            if self._furthest > self.max_iterations:
                lines.append(
                    f"iterations up to {self._furthest} were rehearsed; from {self.max_iterations} on, the last one"
                    " recorded, metrics stay as they are"
                )
        return lines + [note for run in self._records for note in run.notes]

    @cached_property
    def _stopped(self) -> int:
        return sum(not trial.ended and trial.last < self.max_iterations for trial in self._trials)

    def _recorded_line(self, run: RunRecords) -> str:
        iterations = sum(len(trial.iterations) for trial in run.trials)
        date = f", recorded on {run.date}" if run.date else ""
        return f"{run.name} in {run.path}: {_trials_word(len(run.trials))} with {iterations:,} iterations{date}"

    def _fusion_lines(self) -> list[str]:
        rates = None if self._fusion is None else self._fusion.rates
        if rates is not None:
            steps = ", ".join(f"{rows} rows {rates.stretch(rows):.3g}" for rows in rates.rows[1:])
            return [f"fused trials take, in times of the seconds of one alone: {steps}"]
        if any(run.fusion.is_possible for run in self._records):
            return ["no trials were fused there: trials are not fused, as it is not known what that takes"]
        return []

    def _quality_lines(self) -> list[str]:
        what = "/".join(self._table.metrics[0].path) if self._table.metrics else "metrics"
        if not self._guess.by_forest:
            why = "no config differs" if self._table.metrics else "no metric is a number"
            if len(self._trials) < FOR_FOREST:
                why = f"only {_trials_word(len(self._trials))}"
            return [f"{why}: a config that was not run is taken to do as the nearest one that was"]
        try:
            quality = self._guess.quality
        except FluidError as error:
            return [f"configs that were not run cannot be guessed: {error}"]
        if quality is None or math.isnan(quality.error):
            return []
        line = f"it guesses the {what} of configs that were not run within +-{quality.error:.3g} (80 %)"
        if not math.isnan(quality.correlation):
            line += f", rank correlation {quality.correlation:.2f} at iteration {quality.iteration}"
        line += f", judged on {quality.trials} of {_trials_word(len(self._trials))} left out in turn"
        if quality.trials < len(self._trials):
            line += " (those that were stopped before may be further off)"
        if not math.isnan(quality.seconds):
            line += f"; their seconds within {100.0 * quality.seconds:.0f} %"
        return [line]

    def _course(self, texts: Mapping[str, str], key: tuple[tuple[str, str], ...]) -> _ConfigCourse:
        columns = self._guess.columns
        self._unknown.update(dict.fromkeys(name for name in texts if name not in self._names))
        place = columns.key(texts)
        row = None if place is None else self._rows.get(place)
        self._asked[key] = (row is not None, columns.is_inside(texts))
        if row is not None:
            return _RecordedCourse(self._table, self._trials, row)
        draw = None if self._noise is None else _share(f"{self._noise} {key}")
        guessed = self._guess.curves(texts, draw)
        return _GuessedCourse(self._table, self._trials, guessed, self._first_share, self._end)

    @cached_property
    def _names(self) -> frozenset[str]:
        """Those of all that recorded configs have."""
        return frozenset(name for trial in self._trials for name in trial.texts)

    @cached_property
    def _first_share(self) -> float:
        """How many times the others' seconds a first iteration takes, the median over trials."""
        shares = [
            trial.iterations[1].seconds / trial.mean_seconds
            for trial in self._trials
            if 1 in trial.iterations and len(trial.iterations) > 1 and trial.mean_seconds > 0.0
        ]
        return float(np.median(shares)) if shares else 1.0


class _ConfigCourse(Protocol):
    """What a config does."""

    def iterations(self, asked: range) -> list[ReplayedIteration]:
        """Some of its iterations."""
        ...


class _RecordedCourse:
    """A trial as it was recorded, and beyond.

    Args:
        table: the curves.
        trials: those recorded.
        row: of the trial.
    """

    def __init__(self, table: CurveTable, trials: Sequence[RecordedTrial], row: int) -> None:
        self._table = table
        self._trials = trials
        self._row = row
        self._trial = trials[row]

    @cached_property
    def _beyond(self) -> list[tuple[FloatArray, FloatArray]]:
        return [self._table.anchored(metric, self._row, self._trial) for metric in self._table.metrics]

    def iterations(self, asked: range) -> list[ReplayedIteration]:
        """Those recorded as they are; none behind the last one of a trial that ended by itself."""
        trial, known = self._trial, self._trial.iterations
        played = []
        for number in asked:
            one = known.get(number)
            if one is not None:
                played.append(one._replace(memory_bytes=trial.memory_bytes))
            elif trial.ended and number > trial.last:
                break
            else:
                played.append(self._guessed(number))
        return played

    def _guessed(self, number: int) -> ReplayedIteration:
        table, at = self._table, math.log(number)
        values = [float(np.interp(at, np.log(points), curve)) for points, curve in self._beyond]
        shown = [metric.shown(np.array([value])) for metric, value in zip(table.metrics, values, strict=True)]
        metrics = _metrics_at(table, self._trial, number, [value[0] for value in shown])
        spread = 0.0
        if table.metrics:
            first = table.metrics[0]
            half = float(np.interp(at, np.log(table.grid), first.spread[self._row]))
            spread = _shown_spread(values[0], half, is_log=first.is_log)
        return ReplayedIteration(metrics, self._trial.mean_seconds, self._trial.memory_bytes, spread)


class _GuessedCourse:
    """A config that was not run.

    Args:
        table: the curves.
        trials: those recorded.
        guessed: the curves of the config.
        first_share: how many times the others' seconds its first iteration takes.
        end: the iteration with which it ends by itself; ``None`` if it does not.
    """

    def __init__(
        self,
        table: CurveTable,
        trials: Sequence[RecordedTrial],
        guessed: GuessedCurves,
        first_share: float,
        end: int | None,
    ) -> None:
        self._table = table
        self._nearest = trials[guessed.nearest]
        self._guessed = guessed
        self._first_share = first_share
        self._end = end
        self._steps = np.log(table.grid)

    def iterations(self, asked: range) -> list[ReplayedIteration]:
        """Guesses of them, up to where such trials end by themselves."""
        table, guessed = self._table, self._guessed
        numbers = asked if self._end is None else range(asked.start, min(asked.stop, self._end + 1))
        if not numbers:
            return []
        at = np.log(np.arange(numbers.start, numbers.stop, dtype=np.float64))
        curves = [np.interp(at, self._steps, curve) for curve in guessed.values]
        shown = [metric.shown(curve).tolist() for metric, curve in zip(table.metrics, curves, strict=True)]
        halves = np.interp(at, self._steps, guessed.spread).tolist() if curves else [0.0] * len(at)
        is_log = bool(table.metrics) and table.metrics[0].is_log
        played = []
        for place, number in enumerate(numbers):
            metrics = _metrics_at(table, self._nearest, number, [values[place] for values in shown])
            spread = _shown_spread(float(curves[0][place]), halves[place], is_log=is_log) if curves else 0.0
            seconds = guessed.seconds * (self._first_share if number == 1 else 1.0)
            played.append(ReplayedIteration(metrics, seconds, guessed.memory_bytes, spread))
        return played


def _metrics_at(table: CurveTable, like: RecordedTrial, number: int, values: Sequence[float]) -> dict[str, Any]:
    """What a trial reports: numbers as guessed, and what is no number as a trial has reported it by then."""
    metrics: dict[str, Any] = {}
    for curves, value in zip(table.metrics, values, strict=True):
        _put(metrics, curves.path, int(value) if curves.is_whole else float(value))
    for path, counter in table.counters.items():
        _put(metrics, path, counter.at(number))
    if table.others:
        known = _latest(like, number)
        reported = leaves(known.metrics)
        for path in table.others:
            if path in reported:
                _put(metrics, path, reported[path])
    return metrics


def _latest(trial: RecordedTrial, number: int) -> ReplayedIteration:
    known = [each for each in trial.iterations if each <= number]
    return trial.iterations[known[-1] if known else next(iter(trial.iterations))]


def _put(metrics: dict[str, Any], path: MetricPath, value: Any) -> None:
    for name in path[:-1]:
        metrics = metrics.setdefault(name, {})
    metrics[path[-1]] = value


def _shown_spread(value: float, half: float, *, is_log: bool) -> float:
    """Half of a range around a value, as the trial reports it."""
    return 0.5 * (math.exp(value + half) - math.exp(value - half)) if is_log else half


def _share(text: str) -> float:
    """A number from 0 to 1 that a text draws."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2.0**48


def _trials_word(number: int) -> str:
    return "1 trial" if number == 1 else f"{number:,} trials"
