"""How records show themselves: one or a few lines of text, and tables for notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from fluid.directions import open_text
from fluid.results.best import BestTrial, best_result, merit_of, ranked
from fluid.results.iterations import flat
from fluid.results.metrics import Goal, is_number
from fluid.results.records import TrialResult, short_text

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
    failed = next((trial for trial in trials if trial.failure is not None), None)
    if failed is not None and failed.failure is not None:
        lines.append(f"  failed first: trial {failed.trial_id!r}, {failed.failure.message}")
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
