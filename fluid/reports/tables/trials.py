"""The best trial, the table of trials and the failures, as ``fluid report`` prints them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fluid.directions import open_text
from fluid.display.format import count, dollar_column, durations, number, percent, printable, shortened, widths_name
from fluid.display.names import state_style
from fluid.display.palette import colour
from fluid.errors import InvalidFieldError
from fluid.reports.analysis.importance import Importances
from fluid.reports.run.run import RecordedRun, TrialRun
from fluid.reports.story.words import bytes_name
from fluid.reports.tables.hyperparameters import differing, value_text
from fluid.reports.tables.ranking import best_iteration, best_of, open_metric, ranked
from fluid.results.best import NOT_BEST
from fluid.results.iterations import flat
from fluid.results.metrics import Goal, is_number
from fluid.trainables.usage import TITLES
from fluid.trialgroup import TrialState

#: How the mode of a metric is named where a run is read.
WAYS = "--mode min or --mode max"
#: Most rows of a table, unless the user asks for more.
DEFAULT_TABLE_ROWS = 20
#: Most characters of a value in the table, of one of the best trial's, and of a failure's message.
_LONGEST_CELL, _LONGEST_VALUE, _LONGEST_MESSAGE = 20, 60, 300
#: Most hyperparameters of the best trial, kinds of failures, and trials named for each of them.
_MOST_PARAMETERS, _MOST_FAILURES, _MOST_NAMES = 24, 8, 3
#: Least importance that is shown.
_LEAST_SHARE = 0.01
#: Columns that are neither hyperparameters nor metrics.
_FACTS: dict[str, Callable[[RecordedRun, Sequence[TrialRun]], list[str]]] = {
    "iterations": lambda run, trials: [iterations_text(trial) for trial in trials],
    "time": lambda run, trials: durations([trial.seconds for trial in trials]),
    "device time": lambda run, trials: durations([trial.device_seconds for trial in trials]),
    "cost": lambda run, trials: _costs(run, trials),
    "widths": lambda run, trials: [widths_name(trial.widths) for trial in trials],
    "from": lambda run, trials: [start_text(trial) for trial in trials],
}


def _usages(name: str, run: RecordedRun, trials: Sequence[TrialRun]) -> list[str]:
    return [usage_text(trial, name) for trial in trials]


_FACTS |= {title: partial(_usages, name) for name, title in TITLES.items()}


@dataclass(frozen=True)
class TableStyle:
    """How the table of trials is printed.

    Attributes:
        width: characters of a line.
        rows: most trials.
        columns: the columns besides trial and state; ``None`` for the metric and all hyperparameters that fit.
    """

    width: int = 80
    rows: int = DEFAULT_TABLE_ROWS
    columns: Sequence[str] | None = None


@dataclass
class _TrialColumn:
    header: str
    cells: list[str]
    is_figure: bool = False


def metric_text(value: float) -> str:
    """A metric's value: five digits distinguish 0.9312 and 0.9318."""
    return number(value) if abs(value) >= 1e5 else f"{value:.5g}"


def iterations_text(trial: TrialRun) -> str:
    """How many iterations a trial has finished, and of how many if that is known: ``"3/9"``."""
    return f"{trial.iterations}" if trial.budget is None else f"{trial.iterations}/{trial.budget}"


def start_text(trial: TrialRun) -> str:
    """The trial from whose state one starts, and after how many iterations: ``"a@8"``; empty if it begins afresh."""
    if trial.start is None:
        return ""
    return f"{trial.start.parent or trial.start.path}@{'newest' if trial.start.at is None else trial.start.at}"


def usage_text(trial: TrialRun, name: str) -> str:
    """What a trial used in all of what a field of :class:`fluid.trainables.usage.Usage` is; empty if not measured."""
    used = getattr(trial.usage, name)
    return "" if used is None else bytes_name(used) if name.endswith("_bytes") else number(used)


def best_lines(run: RecordedRun, goal: Goal | None) -> list[RenderableType]:
    """The best value of the metric, its trial and the trial's hyperparameters; nothing if no trial has a value."""
    best = best_of(run, goal)
    if best is None or goal is None:
        return []
    value, iteration = best_iteration(best, goal)
    of_budget = "" if best.budget is None else f" of {best.budget}"
    line = Text().append(f"best {printable(goal.metric)} {metric_text(value)}", style="bold")
    line.append(f" ({goal.direction}): {printable(best.trial_id)}")
    line.append(f", at iteration {iteration.number}{of_budget}; ")
    line.append(best.state.lower(), style=state_style(best.state))
    config = flat(best.config)
    changing = set(differing(flat(trial.config) for trial in run.trials))
    # What tells the trial from others comes first.
    names = sorted(config, key=lambda name: name not in changing)
    entries = [f"{name}={shortened(value_text(config[name]), _LONGEST_VALUE)}" for name in names[:_MOST_PARAMETERS]]
    if len(names) > _MOST_PARAMETERS:
        entries.append(f"+{len(names) - _MOST_PARAMETERS} more in --json")
    shown = Padding(Text(printable(", ".join(entries)), overflow="fold"), (0, 0, 0, 2))
    return [line, shown] if entries else [line]


def no_best_line(metric: str) -> Text:
    """Why no best trial is shown, and how to say what is best."""
    return Text(printable(f"no best: {open_text(metric, WAYS)}"), style="yellow")


def importance_line(found: Importances) -> RenderableType:
    """The importances of the hyperparameters, the most important first, or why there are none."""
    title = f"importance for {printable(found.metric)}"
    if not found.shares:
        return Text(f"{title}: {printable(found.note)}", style="dim")
    # Spaces that do not break keep a name and its figure on one line.
    shown = [
        f"{printable(name)} {percent(share)}".replace(" ", "\u00a0")
        for name, share in found.shares.items()
        if share >= _LEAST_SHARE
    ]
    if left := len(found.shares) - len(shown):
        shown.append(f"{left} more below {percent(_LEAST_SHARE)}")
    line = Text(f"{title}: ").append(", ".join(shown), style="bold")
    note = f"; {printable(found.note)}" if found.note else ""
    return line.append(f" ({found.method} of {count(found.trials, 'trial')}{note})", style="dim")


def trials_table(run: RecordedRun, goal: Goal | None, style: TableStyle) -> list[RenderableType]:
    """The trials, the best by the metric first and failed ones last, and a line about the columns that do not fit.

    Raises:
        InvalidFieldError: a chosen column is not one of the run.
    """
    configs = [flat(trial.config) for trial in run.trials]
    rows = ranked(run.trials, goal)[: style.rows]
    trials = [run.trials[row] for row in rows]
    if style.columns is not None:
        chosen = [_chosen(run, configs, name, rows) for name in style.columns]
        return [_table(rows, trials, chosen)]
    first_metric = open_metric(run) if goal is None else goal.metric
    metric = [] if first_metric is None else [_metric_column(first_metric, trials, None if goal is None else goal.mode)]
    done = [_fact_column(run, "iterations", trials)]
    first = [*done[: _fitting(style.width, rows, trials, metric, done)], *metric]
    names = differing(configs)
    parameters = [_parameter_column(name, [configs[row] for row in rows]) for name in names]
    # Figures of the engine are the last to be shown: a width of 1 says nothing.
    widths = any(width != 1.0 for trial in run.trials for width in trial.widths)
    fused = any(trial.most_fused > 1 for trial in run.trials)
    # The wall times of fused trials add up to many times the run's.
    facts = ["device time" if fused else "time", *(["cost"] if run.paid.price is not None else [])]
    used = [title for name, title in TITLES.items() if any(getattr(trial.usage, name) for trial in run.trials)]
    forks = ["from"] if any(trial.start is not None for trial in run.trials) else []
    last = [_fact_column(run, name, trials) for name in [*forks, *facts, *(["widths"] if widths else []), *used]]
    fitting = _fitting(style.width, rows, trials, first, parameters)
    shown = [*first, *parameters[:fitting]]
    if fitting == len(parameters):
        shown += last[: _fitting(style.width, rows, trials, shown, last)]
        return [_table(rows, trials, shown)]
    return [_table(rows, trials, shown), Text(_more(names[fitting:], style.width), style="dim")]


def _more(names: Sequence[str], width: int) -> str:
    """A line that names the hyperparameters without a column, as many as fit."""
    line = f"+{len(names)} more: --columns "
    for place, name in enumerate(names):
        mark = "," if place else ""
        if place and len(line) + len(mark) + len(name) > width - 4:
            return f"{line},..."
        line += mark + printable(name)
    return line


def failure_lines(run: RecordedRun) -> list[RenderableType]:
    """Why trials failed or are infeasible: a paragraph for each message, with the place in the code and the log."""
    kinds: dict[tuple[str, str], list[TrialRun]] = {}
    for trial in run.trials:
        if trial.state in NOT_BEST:
            kinds.setdefault((trial.state, trial.failure_text), []).append(trial)
    lines: list[RenderableType] = []
    for (state, message), trials in sorted(kinds.items(), key=lambda kind: -len(kind[1]))[:_MOST_FAILURES]:
        names = ", ".join(printable(trial.trial_id) for trial in trials[:_MOST_NAMES])
        more = f" and {len(trials) - _MOST_NAMES:,} more" if len(trials) > _MOST_NAMES else ""
        is_one = len(trials) == 1
        what = "failed" if state == TrialState.FAILED else "is infeasible" if is_one else "are infeasible"
        line = Text().append(f"{names}{more} {what}", style=state_style(state))
        lines.append(line.append(f": {shortened(printable(message) or 'unknown reason', _LONGEST_MESSAGE)}"))
        where = last_frame(trials[0].traceback)
        found = [f"  {printable(where)}"] if where else []
        log = None if trials[0].files is None else trials[0].files.log
        found += [f"  log: {printable(str(log))}"] if log is not None else []
        # Without line breaks in a path, it can be copied.
        lines += [Text(each, style="dim", no_wrap=True, overflow="ignore") for each in found]
    if len(kinds) > _MOST_FAILURES:
        lines.append(Text(f"... and {count(len(kinds) - _MOST_FAILURES, 'more kind')} of failure", style="dim"))
    return lines


def last_frame(traceback: str) -> str:
    """The last place in a traceback, ``"train.py, line 12, in step: loss.backward()"``; empty if there is none."""
    lines = traceback.splitlines()
    at = max((row for row, line in enumerate(lines) if line.startswith('  File "')), default=None)
    if at is None:
        return ""
    path, _, place = lines[at].removeprefix('  File "').partition('", ')
    code = lines[at + 1].strip() if len(lines) > at + 1 and lines[at + 1].startswith("    ") else ""
    return f"{path}, {place}" + (f": {code}" if code else "")


# --- The table


def _table(rows: Sequence[int], trials: Sequence[TrialRun], columns: Sequence[_TrialColumn]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    table.add_column("trial", overflow="fold", min_width=8)
    table.add_column("state", no_wrap=True)
    for column in columns:
        table.add_column(printable(column.header), justify="right", overflow="fold", no_wrap=column.is_figure)
    for place, (row, trial) in enumerate(zip(rows, trials, strict=True)):
        state = Text(trial.state.lower(), style=state_style(trial.state))
        cells = [printable(column.cells[place]) for column in columns]
        table.add_row(Text("  ", style=f"on {colour(row)}"), printable(trial.trial_id), state, *cells)
    return table


def _fitting(
    width: int,
    rows: Sequence[int],
    trials: Sequence[TrialRun],
    first: Sequence[_TrialColumn],
    more: Sequence[_TrialColumn],
) -> int:
    """How many of the columns ``more``, from the first on, fit into a line behind ``first``."""
    console = Console(width=100_000)
    # Long names are folded: they do not take the place of figures.
    named = [replace(trial, trial_id=shortened(trial.trial_id, _LONGEST_CELL)) for trial in trials]
    number = len(more)
    while number and console.measure(_table(rows, named, [*first, *more[:number]])).maximum > width:
        number -= 1
    return number


def _parameter_column(name: str, configs: Sequence[Mapping[str, Any]]) -> _TrialColumn:
    return _TrialColumn(
        name, [shortened(value_text(config[name], 4), _LONGEST_CELL) if name in config else "" for config in configs]
    )


def _fact_column(run: RecordedRun, name: str, trials: Sequence[TrialRun]) -> _TrialColumn:
    return _TrialColumn(name, _FACTS[name](run, trials), is_figure=name not in ("widths", "from"))


def _costs(run: RecordedRun, trials: Sequence[TrialRun]) -> list[str]:
    found = [usd for trial in trials if (usd := run.costs.usd_of(trial.device_seconds)) is not None]
    return dollar_column(found) or ["" for _ in trials]


def _metric_column(metric: str, trials: Sequence[TrialRun], mode: str | None) -> _TrialColumn:
    """The best values of a metric; the last ones if it is unknown which are best."""
    if mode is None:
        values = [value if is_number(value := trial.last.get(metric)) else None for trial in trials]
    else:
        values = [trial.best(metric, less=mode == "min") for trial in trials]
    texts = ["" if value is None else metric_text(value) for value in values]
    return _TrialColumn(f"{'last' if mode is None else 'best'} {metric}", texts, is_figure=True)


def _chosen(run: RecordedRun, configs: Sequence[Mapping[str, Any]], name: str, rows: Sequence[int]) -> _TrialColumn:
    """The column that the user named: ``config/NAME``, ``metrics/NAME``, or NAME: a hyperparameter, metric or fact."""
    trials = [run.trials[row] for row in rows]
    for prefix, known in (("config/", {key for config in configs for key in config}), ("metrics/", {*run.metrics})):
        for candidate in (name, name.removeprefix(prefix)):
            if candidate in known and (candidate == name or name.startswith(prefix)):
                if prefix == "config/":
                    return _parameter_column(candidate, [configs[row] for row in rows])
                return _metric_column(candidate, trials, run.mode_of(candidate))
    if name in _FACTS:
        return _fact_column(run, name, trials)
    names = [*dict.fromkeys([*(key for config in configs for key in config), *run.metrics, *_FACTS])]
    raise InvalidFieldError("columns", name, f"is not a column of {run.path}; it has {', '.join(names)}")
