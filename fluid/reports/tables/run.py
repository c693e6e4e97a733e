"""Prints a recorded run, its groups and its trials: as tables or as JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fluid.display.format import count, dollar_column, duration, durations, percent, printable, shortened
from fluid.display.names import states_text
from fluid.reports.analysis.cohorts import KeyCohorts
from fluid.reports.analysis.idle import WAITED, IdleTime
from fluid.reports.analysis.importance import Importances
from fluid.reports.analysis.key_measurements import KeyMeasurements
from fluid.reports.run.run import RecordedRun, TrialRun
from fluid.reports.story.words import bytes_name
from fluid.reports.tables.ranking import best_iteration, best_of, goal_of, open_metric
from fluid.reports.tables.trials import (
    DEFAULT_TABLE_ROWS,
    TableStyle,
    best_lines,
    failure_lines,
    importance_line,
    no_best_line,
    trials_table,
)
from fluid.results.metrics import Goal
from fluid.results.submitted import SubmittedTrial
from fluid.wire import plain

_LONGEST_NAME = 32
#: Characters of a line from which the table of groups has their states.
_ROOM_FOR_STATES = 76


def run_tables(
    run: RecordedRun,
    *,
    goal: Goal | None = None,
    importances: Importances | None = None,
    rows: int = DEFAULT_TABLE_ROWS,
    width: int = 80,
    columns: Sequence[str] | None = None,
) -> RenderableType:
    """A run as a summary line, its best trial, its groups and its trials by the metric; then what the engine did.

    Args:
        run: the run.
        goal: what trials are judged by; ``None`` for what :func:`~fluid.reports.tables.ranking.goal_of` finds.
        importances: those of the hyperparameters for it; ``None`` to say nothing about them.
        rows: most groups and most trials to list; a line says how many are left out.
        width: characters of a line; narrow ones have fewer columns.
        columns: the columns of trials, in place of those that fit.

    Raises:
        InvalidFieldError: a column is not one of the run.
    """
    goal = goal or goal_of(run)
    trials = trials_table(run, goal, TableStyle(width=width, rows=rows, columns=columns))
    parts: list[RenderableType] = [_headline(run)]
    parts += [Text(f"Note: {note}", style="yellow") for note in run.notes]
    for each in run.goals if goal in run.goals else (goal,):  # A search may have several.
        parts += best_lines(run, each)
    if goal is None and (metric := open_metric(run)) is not None:
        parts.append(no_best_line(metric))
    parts += [] if importances is None else [importance_line(importances)]
    if run.is_one_search:  # The summary line names it, and there is no other group to compare it with.
        (group,) = run.groups
        seed = "" if group.search is None or group.search.seed is None else f"; seed {group.search.seed}"
        parts.append(Text(f"{states_text(group.states)}; {count(group.iterations, 'iteration')}{seed}"))
    if not run.is_one_search:
        parts.append(_groups_table(run, rows, compact=width < _ROOM_FOR_STATES))
        parts += _left_out(len(run.groups), rows, "group")
        parts += [Text(run.policy_text)] if run.policy_text else []
    parts += trials
    parts += _left_out(len(run.trials), rows, "trial")
    if failures := failure_lines(run):
        parts += [*failures, Text()]
    parts += _engine_parts(run)
    if run.stories:
        folder = shlex.quote(printable(str(run.path)))
        line = Text("what happened to a trial, and why: ", "dim").append(f"fluid why {folder} TRIAL")
        line.no_wrap, line.overflow = True, "ignore"  # A command that is folded cannot be copied.
        parts.append(line)
    return Group(*parts)


def _engine_parts(run: RecordedRun) -> list[RenderableType]:
    """What the run cost, what the engine did, foresaw and measured, and how devices were used."""
    parts: list[RenderableType] = [Text("; ".join(run.costs.texts))] if run.costs.texts else []
    parts += [Text(text) for text in (run.sharing_of_runs, run.resize_gains.text, run.restores.text) if text]
    parts += [Text(printable(line)) for line in run.forecast_lines]
    for cohorts in run.cohorts:
        parts += _cohort_parts(cohorts)
    names = {f"{each.key} [{cohort.conditions}]" for each in run.cohorts for cohort in each.cohorts}
    # What was measured of a cohort is in its table.
    parts += [Text(_measured(key)) for key in run.keys if key.model is not None or key.key not in names]
    if run.idle is not None:
        parts.append(_idle_table(run.idle))
    if run.sharing:
        parts.append(Text(f"GPUs shared by {printable(run.sharing)}"))
    return parts


def as_json(run: RecordedRun, goal: Goal | None = None, importances: Importances | None = None) -> dict[str, Any]:
    """The output of ``fluid report RUN --json``. Times are in seconds; what is unknown is ``null``.

    * ``run``: the run folder; ``session``: the content of its ``session.json``, such as the planner; ``notes``: a
      sentence for each thing that could not be read
    * ``devices``: their number; ``device_seconds``: for how long devices were held within the makespan, added up
    * ``makespan_s``: from the first start of an iteration to the last finish; ``wall_time_s``: from the opening of the
      executor to its closing, or to the last entry of the journal of a session that still runs
    * ``utilisation``: share of ``device_seconds`` in which at least one trial held the device
    * ``iterations_run``: iterations that ran; those that were run once for several trials count once
    * ``resizes``: changes of a trial's number of devices. From a half to a third of one is none, as only the number of
      trials on the device changed
    * ``resize_gains``: ``chosen`` resizes that the engine decided on, and ``predicted_s``, by how many seconds they
      were to end trials earlier in all; ``compared``, those of which that was measured, with ``compared_predicted_s``
      and ``realised_s``; ``stall_s``, predicted seconds that trials stood still
    * ``restores``, ``costs``, ``forecasts``, ``cohorts``, ``idle``: see below
    * ``best``: of the best trial ``metric``, ``mode``, ``value``, ``trial``, ``group``, ``state``, the ``iteration``
      with that value, ``at_s``, when it ended, and ``config``; ``null`` if no trial reported a number
    * ``importances``: ``metric``, ``shares`` by hyperparameter, which add up to 1, ``method``, number of ``trials``,
      and ``note``: why there are none, or what they leave out
    * ``groups``: of each ``group`` (its id) and ``name``; ``search`` (of a sweep ``metric``, ``mode``, ``trials`` and
      ``seed``); ``owner``, ``priority``, ``preempt``, ``weight``, ``deadline`` (pairs of seconds since it was submitted
      and what an end after that costs), ``on_miss`` and ``requires`` (as text), as it was submitted; ``trials``, their
      number; ``shared_runs``, runs that Fluid added, to run iterations once for several of them; ``states``, trials by
      state; ``iterations``, ``makespan_s``, and ``device_seconds`` and ``cost_usd`` of its trials
    * ``trials``: of each ``trial`` (its id) ``group``, ``profile_key``, ``config``, ``failure``, ``traceback`` and
      ``log`` (a path), ``iterations`` done and ``budget``
        * ``state``: ``DONE``, ``STOPPED``, ``INFEASIBLE``, ``FAILED``, ``PAUSED``, ``PAUSED BY THE USER``,
          ``UNFINISHED``, or ``UNKNOWN`` if the journal does not mention the trial
        * ``start``: the state of another trial that it starts from: ``parent``, ``at``, the iterations done by it,
          ``path`` of the checkpoint if it is of another run, and ``is_shared``, whether the iterations until then are
          its own, too; ``null`` for a trial that begins afresh
        * ``seconds`` of the iterations that it ran itself, ``device_seconds`` that they used, ``cost_usd`` for these,
          and ``usage``, what else they used, as far as measured (``read_bytes``, ``written_bytes``)
        * ``fused_rows``: most trials with which it was fused, itself included; ``widths``: a list of ``width``, devices
          or the share of one, and ``seconds``
        * by metric ``last``, ``least`` and ``greatest``; ``story`` as of ``fluid why``
    * ``profile``: of each ``key`` ``seconds_per_iteration`` alone on a device, ``alpha``, ``beta``, ``c``, the
      ``fused_rows`` that are worth it (1 for none) and their ``fused_gain``; keys that ran on several device models
      have an entry for each, with ``model`` and ``speed``, relative to the model that the key ran on first

    Args:
        run: the run.
        goal: what the best trial is judged by; ``None`` for what :func:`~fluid.reports.tables.ranking.goal_of` finds.
        importances: those of the hyperparameters for it.
    """
    return {
        "run": str(run.path),
        "session": {key: _plain(value) for key, value in run.session.items()},
        "devices": len(run.timeline.devices),
        "device_seconds": run.timeline.device_seconds,
        "makespan_s": run.timeline.makespan,
        "wall_time_s": run.wall,
        "utilisation": run.timeline.utilisation,
        "iterations_run": run.iterations_run,
        "resizes": run.resizes,
        "resize_gains": asdict(run.resize_gains),
        "restores": run.restores.as_json(),
        "costs": run.costs.as_json(),
        "forecasts": forecasts_json(run),
        "cohorts": [_plain(each.as_json()) for each in run.cohorts],
        "best": best_json(run, goal or goal_of(run)),
        "importances": None if importances is None else asdict(importances),
        "idle": None if run.idle is None else idle_json(run.idle),
        "groups": [
            {
                "group": group.group_id,
                "name": group.name,
                "search": None if group.search is None else asdict(group.search),
                "owner": group.terms.owner,
                "priority": group.terms.priority,
                "preempt": group.terms.preempt,
                "weight": group.terms.weight,
                "deadline": None if (due := group.terms.deadline) is None else [list(step) for step in due.steps],
                "on_miss": None if due is None else due.on_miss,
                "requires": None if group.requires is None else str(group.requires),
                "trials": len(group.trials),
                "shared_runs": len(group.shared_runs),
                "states": dict(group.states),
                "iterations": group.iterations,
                "makespan_s": group.makespan,
                "device_seconds": group.device_seconds,
                "cost_usd": run.costs.usd_of(group.device_seconds),
            }
            for group in run.groups
        ],
        "trials": [
            {
                **_trial_json(trial),
                "cost_usd": run.costs.usd_of(trial.device_seconds),
                "story": story_json(run, trial),
            }
            for trial in run.trials
        ],
        "profile": [
            {
                "key": k.key,
                "model": k.model,
                "speed": k.speed,
                "seconds_per_iteration": k.seconds,
                "alpha": k.alpha,
                "beta": k.beta,
                "c": k.c,
                "fused_rows": k.fused,
                "fused_gain": k.gain,
            }
            for k in run.keys
        ],
        "notes": list(run.notes),
    }


def best_json(run: RecordedRun, goal: Goal | None) -> dict[str, Any] | None:
    """The best trial as data; ``None`` if no trial has a value."""
    best = best_of(run, goal)
    if best is None or goal is None:
        return None
    value, iteration = best_iteration(best, goal)
    return {
        "metric": goal.metric,
        "mode": goal.mode,
        "value": value,
        "trial": best.trial_id,
        "group": best.group_id,
        "state": best.state,
        "iteration": iteration.number,
        "at_s": iteration.end,
        "config": _plain(best.config),
    }


def _trial_json(trial: TrialRun) -> dict[str, Any]:
    log = None if trial.files is None else trial.files.log
    return {
        "trial": trial.trial_id,
        "group": trial.group_id,
        "profile_key": trial.key,
        "config": _plain(trial.config),
        "state": trial.state,
        "failure": trial.failure_text,
        "traceback": trial.traceback,
        "log": None if log is None else str(log),
        "iterations": trial.iterations,
        "budget": trial.budget,
        "start": start_json(trial),
        "seconds": trial.seconds,
        "device_seconds": trial.device_seconds,
        "usage": plain(trial.usage),
        "fused_rows": trial.most_fused,
        "widths": [{"width": width, "seconds": seconds} for width, seconds in trial.widths.items()],
        "last": {name: _plain(value) for name, value in trial.last.items()},
        "least": {name: low for name, (low, _) in trial.ranges.items()},
        "greatest": {name: high for name, (_, high) in trial.ranges.items()},
    }


def start_json(trial: SubmittedTrial) -> dict[str, Any] | None:
    """From which state of another trial it starts, as data; ``None`` if it begins afresh."""
    return None if trial.start is None else trial.start._asdict()


def story_json(run: RecordedRun, trial: TrialRun) -> list[dict[str, Any]]:
    """A trial's story as data: of each line ``at_s``, ``clock`` (time of day), ``what``, ``text`` and ``facts``."""
    return [
        {
            "at_s": line.at,
            "clock": run.clock_time(line.at) or None,
            "what": line.what,
            "text": line.text,
            "facts": _plain(line.facts),
        }
        for line in run.story_of(trial)
    ]


def idle_json(idle: IdleTime) -> dict[str, float]:
    """The device time in which no iteration ran, in the output of ``fluid report --json`` as ``idle``.

    It is ``null`` if the journal is of an older version. Seconds are summed over the devices, from the first submission
    to the end of the last iteration. In them a device

    * ``start_s``: was held by a trial that had not run an iteration yet: its process started, and it was set up
    * ``hand_over_s``: had run iterations, and was held by the next trial, which had not begun to run
    * ``unreported_s``: was held by a trial between two of its iterations, as while it was saved, or during an iteration
      that was not reported, because it failed, was cut off or repeated an earlier one
    * ``trial_waited_s``: was held by no trial although a trial was queued that fitted; ``trial_waited_share`` is its
      share of makespan times devices. The engine starts a queued trial as soon as it fits, so this is 0 unless the
      journal lacks an entry
    * ``no_trial_s``: was held by no trial, and none was queued
    * ``packing_ramp_up_s``: ran an iteration, but fewer trials than pay by the last measurement, while one was queued
      and packing had not been measured that far yet
    """
    return {
        "start_s": idle.start,
        "hand_over_s": idle.hand_over,
        "unreported_s": idle.unreported,
        "trial_waited_s": idle.waited,
        "trial_waited_share": idle.waited_share,
        "no_trial_s": idle.no_trial,
        "packing_ramp_up_s": idle.ramp_up,
    }


def forecasts_json(run: RecordedRun) -> list[dict[str, Any]]:
    """When groups were forecast to end, in the output of ``fluid report --json`` as ``forecasts``.

    All times are in seconds since the first iteration of the run. A list, for each ``group`` that was forecast:

    * of its newest forecast ``at_s``, when it was made, and ``end_s``, by probability
    * once it has ended ``compared``, the forecasts at 25, 50 and 75 % of its time: ``share`` of the time, ``by_50_s``,
      ``by_90_s`` and ``ended_s``
    """
    return [
        {
            "group": group.group_id,
            "at_s": known[-1].at,
            "end_s": {f"{odds:g}": known[-1].by(odds) for odds in known[-1].seconds},
            "compared": [
                {"share": each.share, "by_50_s": each.middle, "by_90_s": each.high, "ended_s": each.ended}
                for each in run.compared_forecasts
                if each.group == group.name
            ],
        }
        for group in run.groups
        if (known := run.forecasts.get(group.group_id))
    ]


def _plain(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON does not have, by ``None``."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _headline(run: RecordedRun) -> Text:
    timeline = run.timeline
    line = Text().append(printable(run.name), style="bold")
    line.append(f": {count(len(run.trials), 'trial')} on {run.devices_held}")
    line.append(f", makespan {duration(timeline.makespan)}, devices busy {percent(timeline.utilisation)}")
    line.append("" if run.wall is None else f", wall time {duration(run.wall)}")
    return line.append(f", {count(run.resizes, 'resize')}" if run.resizes else "")


def _groups_table(run: RecordedRun, rows: int, *, compact: bool) -> Table:
    # The newest groups are of most interest.
    shown = run.groups[-rows:]
    columns = {
        "group": [shortened(printable(group.name), _LONGEST_NAME) for group in shown],
        "trials": [f"{len(group.trials):,}" for group in shown],
        "iterations": [f"{group.iterations:,}" for group in shown],
        "makespan": durations([group.makespan for group in shown]),
    }
    costs = [usd for group in shown if (usd := run.costs.usd_of(group.device_seconds)) is not None]
    if costs:
        columns["cost"] = dollar_column(costs)
    table = _empty_table()
    for header in columns:
        table.add_column(header, justify="left" if header == "group" else "right", no_wrap=True)
    said = [printable(group.said) for group in shown]
    if not compact:
        table.add_column("states", overflow="fold")
    if any(said):
        table.add_column("terms", overflow="fold")
    for place, group in enumerate(shown):
        cells = [cells[place] for cells in columns.values()]
        table.add_row(*cells, *([] if compact else [states_text(group.states)]), *([said[place]] if any(said) else []))
    return table


def _cohort_parts(cohorts: KeyCohorts) -> list[RenderableType]:
    """A table of the cohorts of a profile key, and how good predictions were."""
    said = Text(f"{printable(cohorts.key)}: {cohorts.error_text}")
    if not cohorts.cohorts:
        return [said] if cohorts.error_text else []
    known = cohorts.cohorts
    columns = {
        f"cohorts of {printable(cohorts.key)}": [printable(each.conditions) for each in known],
        "trials": [f"{each.trials:,}" for each in known],
        "an iteration": ["" if each.seconds is None else duration(each.seconds) for each in known],
        "memory": ["" if each.peak_bytes is None else bytes_name(each.peak_bytes) for each in known],
        "alpha": ["" if each.alpha is None else f"{each.alpha:.3f}" for each in known],
        "c": ["" if each.c is None else f"{each.c}" for each in known],
    }
    columns = {header: cells for header, cells in columns.items() if any(cells)}
    table = _empty_table()
    for place, header in enumerate(columns):
        table.add_column(header, justify="right" if place else "left", no_wrap=bool(place), overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return [table, *([said] if cohorts.error_text else [])]


def _idle_table(idle: IdleTime) -> Table:
    """The unused device time by its cause, in device-seconds."""
    table = _empty_table()
    table.add_column("unused device time", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, seconds in idle.figures.items():
        share = f"{100.0 * idle.waited_share:.2f} % of the sweep" if name == WAITED else ""
        table.add_row(name, duration(seconds), share)
    return table


def _measured(key: KeyMeasurements) -> str:
    text = f"{printable(key.key)}:" if key.model is None else f"{printable(key.key)} on {printable(key.model)}:"
    if key.seconds is not None:
        text += f" {duration(key.seconds)} per iteration alone,"
    packing = f"alpha {key.alpha:.3f}, c {key.c}" if key.packing > 1 else "packing not measured"
    speed = "" if key.model is None else f", speed {key.speed:.2f}"
    return f"{text} {packing}, beta {key.beta:.3f}{fused_text(key)}{speed}"


def fused_text(key: KeyMeasurements) -> str:
    """What fusing trials of a key was measured to gain, as the end of a list; empty if it was not measured."""
    if key.rows == 1:
        return ""
    if key.fused == 1:
        return f", fusing does not pay (2 fused do {key.gain:.2f}x the iterations of one)"
    return f", {key.fused} fused do {key.gain:.1f}x the iterations of one"


def _left_out(total: int, rows: int, noun: str) -> list[RenderableType]:
    return [Text(f"... and {count(total - rows, f'more {noun}')}\n", style="dim")] if total > rows else []


def _empty_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
