"""The trials in the data of the HTML page: configs, metrics, curves, stories and failures, and the best of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluid.display.format import count, duration, durations, short_names, shortened, width_name, widths_name
from fluid.display.palette import colour
from fluid.reports.run.run import RecordedRun, TrialRun
from fluid.reports.tables.trials import start_text, usage_text
from fluid.results.best import eligible
from fluid.results.iterations import flat
from fluid.results.metrics import is_number, pareto_front
from fluid.trainables.usage import TITLES

#: Points of all curves together, and the fewest and most of one curve.
_POINTS, _LEAST_POINTS, _MOST_POINTS = 150_000, 20, 400
#: Lines of all stories together, the fewest and most of one, and most characters of a line.
_STORY_LINES, _LEAST_LINES, _MOST_LINES, _LONGEST_LINE = 16_000, 8, 200, 600
#: Widths of which the page says for how long each was held.
_MOST_WIDTHS = 6
#: Most characters of a value of a config, and of a metric.
_LONGEST_VALUE, _LONGEST_METRIC = 2000, 60
#: Failed trials whose output is shown, and the most characters of the end of it; most characters of a traceback.
_MOST_LOGS, _LONGEST_LOG, _LONGEST_TRACEBACK = 100, 2000, 8000


@dataclass(frozen=True)
class TrialsFrame:
    """What the entries of trials have in common.

    Attributes:
        metrics: the names of the metrics, in the order of ``curves``, ``best`` and ``last``.
        parameters: the names of the hyperparameters, in the order of ``config``.
        points: most points of a curve.
        lines: most lines of a story.
    """

    metrics: Sequence[str]
    parameters: Sequence[str]
    points: int
    lines: int

    @classmethod
    def of(cls, metrics: Sequence[str], parameters: Sequence[str], trials: int) -> TrialsFrame:
        """For so many trials."""
        total = max(1, trials)
        points = min(max(_POINTS // (total * max(1, len(metrics))), _LEAST_POINTS), _MOST_POINTS)
        return cls(metrics, parameters, points, min(max(_STORY_LINES // total, _LEAST_LINES), _MOST_LINES))

    def entry(self, run: RecordedRun, number: int, row: int, logs: Logs) -> dict[str, Any]:
        """The data of one trial, without its short name.

        Args:
            run: the run.
            number: its position among the runs.
            row: the trial's position in the run.
            logs: reads the ends of outputs.
        """
        trial = run.trials[row]
        config = flat(trial.config)
        names = {group.group_id: group.name for group in run.groups}
        entry = {
            "run": number,
            "id": trial.trial_id,
            "colour": colour(row),
            "group": names.get(trial.group_id, trial.group_id),
            "state": trial.state.lower(),
            "iterations": trial.iterations,
            "budget": trial.budget,
            "seconds": rounded(trial.seconds),
            "device_seconds": rounded(trial.device_seconds),
            "widths": widths_name(trial.widths),
            "widest": max(trial.widths, default=0.0),
            "facts": _facts(trial),
            "story": _story(run, trial, self.lines),
            "config": [_plain(config.get(name)) for name in self.parameters],
            "curves": _curves(trial, self.metrics, self.points),
            "best": [_extremes(trial, metric) for metric in self.metrics],
            "last": [_shown(trial.last.get(metric)) for metric in self.metrics],
        }
        if any(isinstance(value, (Mapping, list)) for value in trial.config.values()):
            entry["nested"] = _plain(trial.config)
        if trial.files is not None and (kept := trial.files.checkpoints):
            entry["checkpoints"] = [[found.iteration, str(found.path)] for found in kept]
        if trial.start is not None:
            entry["from"] = start_text(trial)
        if trial.failure_text:
            texts = trial.traceback[-_LONGEST_TRACEBACK:], logs.end_of(trial)
            entry["failure"] = [trial.failure_text, *(text or None for text in texts)]
        return entry


def trials_data(
    runs: Sequence[RecordedRun], metrics: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """The trials of all runs, one after the other.

    Returns:
        the trials; the names of their hyperparameters, in the order of ``config`` of each trial; and the tracebacks and
        outputs, which trials name by position.
    """
    names = (name for run in runs for trial in run.trials for name in flat(trial.config))
    frame = TrialsFrame.of(metrics, list(dict.fromkeys(names)), sum(len(run.trials) for run in runs))
    texts: dict[str, int] = {}
    found = []
    for number, run in enumerate(runs):
        logs = Logs()
        for row, short in enumerate(short_names([trial.trial_id for trial in run.trials])):
            entry = {**frame.entry(run, number, row, logs), "short": short}
            if "failure" in entry:
                message, *told = entry["failure"]
                entry["failure"] = [message, *(text and texts.setdefault(text, len(texts)) for text in told)]
            found.append(entry)
    return found, list(frame.parameters), list(texts)


def shared_data(run: RecordedRun, number: int, parameters: Sequence[str]) -> list[dict[str, Any]]:
    """What Fluid has added to a run, to run iterations once for several trials: for the timeline and the forks.

    Args:
        run: the run.
        number: its position among the runs.
        parameters: the names of the hyperparameters, in the order of ``config``.
    """
    return [
        {
            "run": number,
            "id": trial.trial_id,
            "short": trial.trial_id,
            "shared": True,
            "colour": colour(row),
            "state": trial.state.lower(),
            "config": [_plain(flat(trial.config).get(name)) for name in parameters],
            "best": [],
        }
        for row, trial in enumerate(run.rows[len(run.trials) :], len(run.trials))
    ]


#: When an iteration ended, its value, the row of its trial and its number.
Point = tuple[float, float, int, int]


def points_of(run: RecordedRun, metric: str, rows: Iterable[int]) -> list[Point]:
    """The values of a metric in the trials of some rows."""
    return [
        (each.end, each.metrics[metric], row, each.number)
        for row in rows
        for each in run.trials[row].finished
        if is_number(each.metrics.get(metric))
    ]


def best_points(run: RecordedRun, metric: str) -> dict[str, list[Point]]:
    """The values that were the best when they came, for either mode.

    Values of failed trials do not count, unless all have failed.
    """
    points = points_of(run, metric, eligible(range(len(run.trials)), lambda row: run.trials[row].state))
    return {mode: improving(points, mode) for mode in ("min", "max")}


def improving(points: Iterable[Point], mode: str) -> list[Point]:
    """Those of the values that were the best when they came, in order of time."""
    sign = 1.0 if mode == "min" else -1.0
    found: list[Point] = []
    for point in sorted(points):
        if not found or sign * point[1] < sign * found[-1][1]:
            found.append(point)
    return found


def progress_data(best: Mapping[str, Sequence[Point]]) -> dict[str, list[list[float]]]:
    """The steps of the best value so far, for either mode: times, values, rows of the trials and iterations."""
    return {
        mode: [
            [rounded(point[0]) for point in points],
            [point[1] for point in points],
            [point[2] for point in points],
            [point[3] for point in points],
        ]
        for mode, points in best.items()
    }


def pareto_set(run: RecordedRun) -> list[list[float]]:
    """The iterations that no other one beats in all goals of the searches: rows of the trials, iterations and values.

    Failed trials count only if all have failed.
    """
    found: list[list[float]] = []
    for row in eligible(range(len(run.trials)), lambda row: run.trials[row].state):
        for each in run.trials[row].finished:
            values = [value for goal in run.goals if is_number(value := each.metrics.get(goal.metric))]
            if len(values) == len(run.goals):
                found.append([row, each.number, *values])
    return [found[place] for place in pareto_front([point[2:] for point in found], run.goals)]


def rounded(value: float) -> float:
    """Rounds to six significant digits, which are more than a screen shows."""
    return float(f"{value:.6g}")


def _curves(trial: TrialRun, metrics: Sequence[str], most: int) -> list[list[list[float]] | None]:
    """Each metric's iterations, times and values; at most ``most`` points, evenly chosen and including the last.

    Iterations and times are empty if they are those of the first metric's curve, and iterations if they count from 1.
    """
    found: list[list[list[float]] | None] = []
    shared: list[tuple[int, float]] = []
    for metric in metrics:
        numbers = [
            (each.number, rounded(each.end), rounded(each.metrics[metric]))
            for each in trial.finished
            if is_number(each.metrics.get(metric))
        ]
        if len(numbers) > most:
            numbers = [numbers[round(part * (len(numbers) - 1) / (most - 1))] for part in range(most)]
        if not numbers:
            found.append(None)
            continue
        where, values = [point[:2] for point in numbers], [point[2] for point in numbers]
        if found and where == shared:
            found.append([[], [], values])
            continue
        if not found:
            shared = where
        counted = all(number == position for position, (number, _) in enumerate(where, 1))
        found.append([[] if counted else [x for x, _ in where], [t for _, t in where], values])
    return found


def _extremes(trial: TrialRun, metric: str) -> list[float] | None:
    """The minimum and the maximum of a metric, each with its iteration and time; ``None`` if it was never a number."""
    points = [
        (each.metrics[metric], each.number, each.end) for each in trial.finished if is_number(each.metrics.get(metric))
    ]
    if not points:
        return None
    least, greatest = min(points), max(points, key=lambda point: (point[0], -point[1]))
    return [least[0], least[1], rounded(least[2]), greatest[0], greatest[1], rounded(greatest[2])]


def _facts(trial: TrialRun) -> dict[str, str]:
    """What the page shows about a selected trial, besides its config, its metrics and what its columns show."""
    many = len(trial.widths) > _MOST_WIDTHS  # A fused trial changes its width with each that comes or goes.
    widths = (f"{width_name(width)} for {duration(seconds)}" for width, seconds in trial.widths.items())
    most = trial.most_fused
    facts = {
        "widths": widths_name(trial.widths) if many else ", ".join(widths),
        "fused": f"with up to {count(most - 1, 'other')}" if most > 1 else "",
        **{title: usage_text(trial, name) for name, title in TITLES.items()},
        "starts from": "" if trial.start is None else trial.start.text,
        "profile key": trial.key,
    }
    return {name: fact for name, fact in facts.items() if fact}


def _story(run: RecordedRun, trial: TrialRun, most: int) -> list[list[str]]:
    """The time, the clock and the text of each line of a trial's story; of a long one, the middle is left out."""
    lines = list(run.story_of(trial))
    times = durations([line.at for line in lines])
    found = [
        [time, run.clock_time(line.at), shortened(line.text, _LONGEST_LINE)]
        for time, line in zip(times, lines, strict=True)
    ]
    if len(found) > most:
        left_out = f"... {count(len(found) - most, 'line')} left out; fluid why tells all"
        found[most // 2 : len(found) - most + most // 2] = [["", "", left_out]]
    return found


class Logs:
    """Reads the ends of the outputs of the first failed trials of a run."""

    def __init__(self) -> None:
        self._left = _MOST_LOGS

    def end_of(self, trial: TrialRun) -> str:
        """The end of what a trial printed, from the start of a line; empty if there is nothing."""
        log = trial.files.log if trial.files is not None and self._left > 0 else None
        if log is None:
            return ""
        self._left -= 1
        try:
            with log.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LONGEST_LOG))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""
        return (text.partition("\n")[2] or text if size > _LONGEST_LOG else text).rstrip()


def _shown(value: object) -> float | str | None:
    """A metric's newest value: a number if it can be drawn, else text."""
    if value is None or is_number(value):
        return None if value is None else rounded(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return shortened(text, _LONGEST_METRIC)


def _plain(value: Any) -> Any:
    """A value of a config as JSON can hold it; lists, and texts of any length, in as many characters as are shown."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return shortened(value, _LONGEST_VALUE) if isinstance(value, str) else value
