"""Tables of trials, as pandas DataFrames. Importing pandas takes most of a second, so that functions do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from fluid._imports import try_import
from fluid.directions import open_text
from fluid.errors import require_one_of
from fluid.results.best import BestTrial, best_result, merit_of, ranked
from fluid.results.iterations import flat
from fluid.results.metrics import Goal, is_number
from fluid.results.records import Result, TrialResult, short_text
from fluid.trialgroup import TrialState

if TYPE_CHECKING:
    from pandas import DataFrame as DataFrame


def dataframe(
    trials: Iterable[TrialResult], every: str, goal: Goal | None = None, price: float | None = None
) -> DataFrame:
    """Makes the table: see :meth:`fluid.SweepResult.dataframe`.

    Args:
        trials: the trials.
        every: ``"trial"`` or ``"iteration"``.
        goal: what the trials' best values are of; ``None`` for none.
        price: US dollars for a device-hour; ``None`` if unknown: there is no ``cost_usd`` then.
    """
    require_one_of("every", every, ("trial", "iteration"))
    with try_import("pandas", extra="pandas") as imports:
        import pandas
    imports.check()
    listed = list(trials)
    rows = list(_trial_rows(listed, goal) if every == "trial" else _iteration_rows(listed))
    names = list(dict.fromkeys(name for row in rows for name in row))
    for row in rows if price is not None else ():
        row["cost_usd"] = price * row["device_seconds"] / 3600.0
    own = ["trial", "group", "state", "iteration", "seconds", "device_seconds", *(["cost_usd"] * (price is not None))]
    last = ["checkpoint", "error"] if every == "trial" else []
    best = [f"best/{goal.metric}", "best/iteration"] if every == "trial" and goal is not None else []
    if len({trial.group for trial in listed}) <= 1:
        own.remove("group")
    own += [name for name in ("parent", "at", "source") if any(row.get(name) is not None for row in rows)]
    config = [name for name in names if name.startswith("config/")]
    metrics = [name for name in names if name.startswith("metrics/")]
    return pandas.DataFrame(rows, columns=[*own, *config, *metrics, *best, *last])


def _trial_rows(trials: Iterable[TrialResult], goal: Goal | None) -> Iterator[dict[str, Any]]:
    for trial in trials:
        checkpoint = trial.checkpoint
        yield {
            **_own(trial, trial.iteration, trial),
            "parent": None if trial.start is None else trial.start.parent or trial.start.path,
            "at": None if trial.start is None else trial.start.at,
            **_prefixed("config", trial.config),
            **_prefixed("metrics", trial.metrics),
            **_best(trial, goal),
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "error": None if trial.failure is None else trial.failure.message,
        }


def _best(trial: TrialResult, goal: Goal | None) -> dict[str, Any]:
    best = None if goal is None else best_result(trial, goal)
    if best is None or goal is None:
        return {}
    return {f"best/{goal.metric}": best[0], "best/iteration": best[1].iteration}


def _iteration_rows(trials: Iterable[TrialResult]) -> Iterator[dict[str, Any]]:
    for trial in trials:
        config = _prefixed("config", trial.config)
        for result in trial.results:
            metrics = _prefixed("metrics", result.metrics)
            yield {**_own(trial, result.iteration, result), "source": result.source or None, **config, **metrics}


def _own(trial: TrialResult, iteration: int, took: TrialResult | Result) -> dict[str, Any]:
    return {
        "trial": trial.trial_id,
        "group": trial.group,
        "state": trial.state,
        "iteration": iteration,
        "seconds": took.seconds,
        "device_seconds": took.device_seconds,
    }


def _prefixed(prefix: str, content: object) -> dict[str, Any]:
    return {f"{prefix}/{name}": value for name, value in flat(content).items()}


# -- showing -------------------------------------------------------------------------------------
#
# How records show themselves: one or a few lines of text, and tables for notebooks.


#: Most rows of a table, and most of its columns of one kind.
_ROWS, _COLUMNS = 10, 12


def sweep_text(
    name: str,
    where: str,
    trials: Sequence[TrialResult],
    best: BestTrial | None,
    openly: Sequence[str] = (),
) -> str:
    """A sweep in two or three lines.

    Args:
        name: its name.
        where: its state and its folder.
        trials: its trials.
        best: the best of them; ``None`` if there is none.
        openly: metrics without a mode whose names leave it open.
    """
    lines = [f"SweepResult {name!r}: {states_text(trials)}; {where}"]
    if best is not None:
        lines.append(f"  best: {best.text}")
    lines += [f"  no best: {open_text(metric)}" for metric in openly[:1]]
    for state, first in ((TrialState.FAILED, "failed first"), (TrialState.INFEASIBLE, "infeasible first")):
        failed = next((trial for trial in trials if trial.state == state and trial.failure is not None), None)
        if failed is not None and failed.failure is not None:
            lines.append(f"  {first}: trial {failed.trial_id!r}, {failed.failure.message}")
    return "\n".join(lines)


def states_text(trials: Sequence[TrialResult]) -> str:
    """Counts trials by state, as in ``"3 trials (2 DONE, 1 FAILED)"``."""
    counts = Counter(trial.state for trial in trials)
    shown = ", ".join(f"{number} {state}" for state, number in counts.items())
    return f"{len(trials)} trial{'s' * (len(trials) != 1)}" + (f" ({shown})" if shown else "")


def sweep_html(text: str, trials: Sequence[TrialResult], goal: Goal | None) -> str:
    """A sweep as a table for notebooks, the best trials first.

    Args:
        text: what is above it.
        trials: the trials.
        goal: what they are ranked by; ``None`` to leave them in order.
    """
    head = escape(text).replace("\n", "<br>")
    rows = list(trials) if goal is None else ranked(trials, lambda trial: merit_of(trial, goal))
    shown = rows[:_ROWS]
    configs = _names(trial.config for trial in shown)
    metrics = [] if goal is None else [goal.metric]
    metrics += [name for name in _names(trial.metrics for trial in shown) if name not in metrics]
    columns = ["trial", "state", "iteration", *configs, *metrics[:_COLUMNS]]
    body = "".join(_row(trial, configs, metrics[:_COLUMNS], goal) for trial in shown)
    more = f"<div>{len(rows) - len(shown)} more trials: see .dataframe()</div>" if len(rows) > len(shown) else ""
    titles = "".join(f"<th>{escape(name)}</th>" for name in columns)
    return f"<div>{head}</div><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{more}"


def _names(contents: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for content in contents for name in flat(content)))[:_COLUMNS]


def _row(trial: TrialResult, configs: Sequence[str], metrics: Sequence[str], goal: Goal | None) -> str:
    config, last = flat(trial.config), flat(trial.metrics)
    if goal is not None:
        best = best_result(trial, goal)
        last[goal.metric] = None if best is None else best[0]
    values = [trial.trial_id, trial.state, trial.iteration]
    values += [config.get(name) for name in configs] + [last.get(name) for name in metrics]
    return "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in values) + "</tr>"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) and is_number(value) else short_text(value)
