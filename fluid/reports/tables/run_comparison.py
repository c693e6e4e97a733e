"""Compares recorded runs: ``fluid report RUN RUN ...``, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fluid.display.format import count, dollar_column, durations, percent, printable, shortened
from fluid.display.palette import mark
from fluid.errors import InvalidFieldError
from fluid.reports.run.run import RecordedRun, TrialRun, run_names
from fluid.reports.tables.hyperparameters import differing, value_text
from fluid.reports.tables.ranking import best_of, goal_of, open_metric, value_of
from fluid.reports.tables.run import best_json
from fluid.reports.tables.trials import metric_text, no_best_line
from fluid.results.iterations import flat
from fluid.results.metrics import Goal, is_number

#: Most characters of a run's name and of a hyperparameter's value, and most hyperparameters.
_LONGEST_NAME, _LONGEST_VALUE, _MOST_PARAMETERS = 32, 24, 40
#: Columns that narrow terminals leave out, the first one first.
_OPTIONAL = ("iterations", "wall time", "trials", "busy", "trial", "makespan", "cost")


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs.

    Attributes:
        run: the run.
        name: a name that no other of them has.
        best: its best trial; ``None`` if none has a value of the metric.
        value: the trial's.
        reached: seconds from the run's first start until a trial had reached the value that all runs with a best
            trial reached; ``None`` if none did.
    """

    run: RecordedRun
    name: str
    best: TrialRun | None
    value: float | None
    reached: float | None


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side.

    Attributes:
        goal: what they are judged by; ``None`` if no trial of any run reported a number.
        runs: the runs, in the order given.
        level: the best value of the worst run, which all others with a best trial reached too.
    """

    goal: Goal | None
    runs: tuple[ComparedRun, ...]
    level: float | None

    @property
    def winner(self) -> ComparedRun | None:
        """The run with the best value; the first of equal ones."""
        having = [(one.value, one) for one in self.runs if one.value is not None]
        if not having or self.goal is None:
            return None
        return (min if self.goal.less else max)(having, key=lambda pair: pair[0])[1]


def compare(runs: Sequence[RecordedRun], metric: str | None = None, mode: str | None = None) -> RunComparison:
    """Compares runs.

    Args:
        runs: two or more.
        metric: what they are judged by; ``None`` for the first run's own metric that most of the runs have.
        mode: ``"min"`` or ``"max"``; ``None`` for the search's, else for what the metric's name says.

    Raises:
        InvalidFieldError: a run is given twice, the metric is in none of them, the mode is neither, or the given metric
            has none and may mean either.
    """
    folders = [run.path.resolve() for run in runs]
    for place, folder in enumerate(folders):
        if folder in folders[:place]:
            raise InvalidFieldError("run", str(runs[place].path), "is given twice")
    goal = _goal(runs, metric, mode)
    bests = [best_of(run, goal) for run in runs]
    values = [None if best is None or goal is None else value_of(best, goal) for best in bests]
    known = [value for value in values if value is not None]
    level = (max if goal.less else min)(known) if goal is not None and known else None
    compared = (
        ComparedRun(run, name, best, value, _reached(run, goal, level))
        for run, name, best, value in zip(runs, run_names(runs), bests, values, strict=True)
    )
    return RunComparison(goal, tuple(compared), level)


def comparison_tables(comparison: RunComparison, *, width: int = 80) -> RenderableType:
    """A line for each run, and the hyperparameters in which their best trials differ.

    Args:
        comparison: the runs.
        width: characters of a line; narrow ones have fewer columns.
    """
    goal = comparison.goal
    title = f"{len(comparison.runs)} runs"
    if goal is not None:
        title += f" by {printable(goal.metric)}, {goal.direction}"
    parts: list[RenderableType] = [Text(title, style="bold")]
    unknown = next((metric for one in comparison.runs if (metric := open_metric(one.run)) is not None), None)
    if goal is None and unknown is not None:
        parts.append(no_best_line(unknown))
    parts += [Text(f"Note on {letter}: {note}", style="yellow") for letter, note in _notes(comparison)]
    columns = _columns(comparison)
    console = Console(width=100_000)
    for header in _OPTIONAL:
        if console.measure(_runs_table(comparison, columns)).maximum <= width:
            break
        columns.pop(header, None)
    parts.append(_runs_table(comparison, columns))
    if comparison.level is not None and goal is not None:
        sign = "<=" if goal.less else ">="
        text = f"* best; reached: time from the first start until {goal.metric} {sign} {metric_text(comparison.level)}"
        parts.append(Text(printable(f"{text}, which every run reached"), style="dim"))
    return Group(*parts, *_config_differences(comparison))


def as_json(comparison: RunComparison) -> dict[str, Any]:
    """The output of ``fluid report RUN RUN ... --json``.

    * ``metric`` and ``mode``, by which the runs are compared
    * ``level``: the value that each run reached, the best of the worst run; ``best_run``: the folder of the best one
    * ``runs``: of each ``run`` (its folder) ``name``, ``best`` as of one run, ``reached_level_s``, ``trials`` and
      ``iterations`` (their numbers), ``devices``, ``makespan_s``, ``wall_time_s``, ``utilisation``, ``costs`` and
      ``notes``, as of one run
    """
    goal, winner = comparison.goal, comparison.winner
    return {
        "metric": None if goal is None else goal.metric,
        "mode": None if goal is None else goal.mode,
        "level": comparison.level,
        "best_run": None if winner is None else str(winner.run.path),
        "runs": [
            {
                "run": str(one.run.path),
                "name": one.name,
                "best": best_json(one.run, goal),
                "reached_level_s": one.reached,
                "trials": len(one.run.trials),
                "iterations": one.run.iterations,
                "devices": len(one.run.timeline.devices),
                "makespan_s": one.run.timeline.makespan,
                "wall_time_s": one.run.wall,
                "utilisation": one.run.timeline.utilisation,
                "costs": one.run.costs.as_json(),
                "notes": list(one.run.notes),
            }
            for one in comparison.runs
        ],
    }


def _goal(runs: Sequence[RecordedRun], metric: str | None, mode: str | None) -> Goal | None:
    if metric is None:
        numbers = [own.metric for run in runs if (own := goal_of(run, mode=mode)) is not None]
        shared = [name for name in numbers if all(name in run.metrics for run in runs if run.metrics)]
        metric = next(iter(shared or numbers), None)
        if metric is None:
            return None
    # The first run that has the metric, and knows its mode, tells it.
    known = [run for run in runs if metric in run.metrics]
    having = next((run for run in known if run.mode_of(metric) is not None), known[0] if known else runs[0])
    return goal_of(having, metric, mode)


def _reached(run: RecordedRun, goal: Goal | None, level: float | None) -> float | None:
    if goal is None or level is None:
        return None
    return min(
        (
            iteration.end
            for trial in run.trials
            for iteration in trial.finished
            if is_number(value := iteration.metrics.get(goal.metric)) and not goal.is_better(level, value)
        ),
        default=None,
    )


def _notes(comparison: RunComparison) -> list[tuple[str, str]]:
    found = []
    for place, one in enumerate(comparison.runs):
        if one.best is None and comparison.goal is not None:
            found.append((mark(place).upper(), f"no trial reported {comparison.goal.metric}."))
        found += [(mark(place).upper(), note) for note in one.run.notes]
    return found


def _columns(comparison: RunComparison) -> dict[str, list[str]]:
    """The cells of each column, by header."""
    runs = comparison.runs
    columns: dict[str, list[str]] = {}
    if comparison.goal is not None:
        values = ["" if one.value is None else metric_text(one.value) for one in runs]
        columns[f"best {comparison.goal.metric}"] = [
            f"{value} {'*' if one is comparison.winner else ' '}" for value, one in zip(values, runs, strict=True)
        ]
        columns["trial"] = ["" if one.best is None else shortened(one.best.trial_id, 20) for one in runs]
        columns["reached"] = _times([one.reached for one in runs])
    columns["trials"] = [f"{len(one.run.trials):,}" for one in runs]
    columns["iterations"] = [f"{one.run.iterations:,}" for one in runs]
    columns["makespan"] = durations([one.run.timeline.makespan for one in runs])
    columns["wall time"] = _times([one.run.wall for one in runs])
    columns["busy"] = [percent(one.run.timeline.utilisation) for one in runs]
    costs = [one.run.costs.usd for one in runs]
    if any(usd is not None for usd in costs):
        texts = iter(dollar_column([usd for usd in costs if usd is not None]))
        columns["cost"] = ["-" if usd is None else next(texts) for usd in costs]
    return columns


def _times(seconds: Sequence[float | None]) -> list[str]:
    texts = iter(durations([value for value in seconds if value is not None]))
    return ["-" if value is None else next(texts) for value in seconds]


def _runs_table(comparison: RunComparison, columns: dict[str, list[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    table.add_column("run", overflow="fold", min_width=6)
    for header in columns:
        table.add_column(printable(header), justify="right", no_wrap=True)
    for place, one in enumerate(comparison.runs):
        style = "bold green" if one is comparison.winner else ""
        cells = [printable(cells[place]) for cells in columns.values()]
        name = shortened(printable(one.name), _LONGEST_NAME)
        table.add_row(mark(place).upper(), name, *cells, style=style)
    return table


def _config_differences(comparison: RunComparison) -> list[RenderableType]:
    configs = [{} if one.best is None else flat(one.best.config) for one in comparison.runs]
    names = differing(configs)
    if not any(configs):
        return []
    if not names:
        return [Text("\nThe best trials have the same config.")]
    shown = names[:_MOST_PARAMETERS]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for place in range(len(configs)):
        table.add_column(mark(place).upper(), justify="right", overflow="fold")
    for name in shown:
        texts = [value_text(config[name]) if name in config else "-" for config in configs]
        table.add_row(printable(name), *(shortened(printable(text), _LONGEST_VALUE) for text in texts))
    same = len({name for config in configs for name in config}) - len(names)
    title = "\nConfigs of the best trials, where they differ"
    title += f" ({count(same, 'hyperparameter')} the same):" if same else ":"
    left = [Text(f"... and {count(len(names) - len(shown), 'more')}; --json has all", style="dim")]
    return [Text(title), table, *(left if len(names) > len(shown) else [])]
