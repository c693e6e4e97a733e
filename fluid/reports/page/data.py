"""The data of the HTML page: what its scripts draw, as plain lists, strings and numbers.

One mapping holds all runs that the page shows. ``fluid report`` embeds it into the page, and ``fluid view`` sends it
anew whenever the session has gone on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fluid.display.format import count, dollars, duration, percent, placement_name
from fluid.display.names import states_text
from fluid.errors import InvalidFieldError
from fluid.reports.analysis.idle import WAITED
from fluid.reports.figures.forks import lineages
from fluid.reports.page.trials import best_points, pareto_set, progress_data, rounded, shared_data, trials_data
from fluid.reports.run.run import RecordedRun, run_names
from fluid.reports.tables.run import fused_text
from fluid.results.metrics import Goal, is_bookkeeping

#: Most steps of the utilisation. A longer series is replaced by its means over this many equal parts of the run.
_MOST_STEPS = 2000
#: The importances of the hyperparameters for each metric: names and shares, or why there are none.
Importances = Mapping[str, Sequence[tuple[str, float]] | str]


def page_data(
    runs: Sequence[RecordedRun],
    *,
    goal: Goal | None = None,
    importances: Sequence[Importances] = (),
    live: bool = False,
) -> dict[str, Any]:
    """The data of a page that shows one run, or compares several.

    Args:
        runs: the runs.
        goal: what the page judges trials by at first; ``None`` for the metric of the searches, in their mode.
        importances: the importances of the hyperparameters in each run; empty if they were not computed.
        live: whether the page will be told how the run goes on.

    Raises:
        InvalidFieldError: there is no run to show.
    """
    if not runs:
        raise InvalidFieldError("runs", list(runs), "there must be at least one")
    metrics, names = metrics_of(runs, goal), run_names(runs)
    trials, parameters, texts = trials_data(runs, [metric["name"] for metric in metrics])
    return {
        "title": " vs. ".join(names),
        "live": live,
        "metrics": metrics,
        "parameters": parameters,
        "trials": trials,
        "texts": texts,
        "runs": [
            {
                **_run_data(run, names[number], metrics, importances[number] if number < len(importances) else {}),
                "shared": shared_data(run, number, parameters),
            }
            for number, run in enumerate(runs)
        ],
    }


def metrics_of(runs: Sequence[RecordedRun], goal: Goal | None = None) -> list[dict[str, Any]]:
    """The metrics of all runs: the given goal first, then those of the searches, each run's order otherwise."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    goals = {goal.metric for run in runs for goal in run.goals}
    searched = {name for run in runs for name in run.searched}
    return [
        {
            "name": name,
            "mode": _mode_of(runs, name, goal),
            "goal": name in goals,
            "counts": is_bookkeeping(name),
        }
        for name in sorted(names, key=lambda name: (goal is None or name != goal.metric, name not in searched))
    ]


def _mode_of(runs: Sequence[RecordedRun], metric: str, goal: Goal | None) -> str | None:
    if goal is not None and metric == goal.metric:
        return goal.mode
    return next((mode for run in runs if metric in run.metrics and (mode := run.mode_of(metric)) is not None), None)


def _run_data(
    run: RecordedRun, name: str, metrics: Sequence[Mapping[str, Any]], importances: Importances
) -> dict[str, Any]:
    known = [metric["name"] if metric["name"] in run.metrics else None for metric in metrics]
    return {
        **run_summary(run, name),
        "progress": [None if metric is None else progress_data(best_points(run, metric)) for metric in known],
        "pareto": pareto_set(run) if len(run.goals) > 1 else [],
        "importances": importances_data(importances),
        "forks": [
            [each.row, -1 if each.parent is None else each.parent, each.at, each.last, each.outside]
            for each in lineages(run.rows)
        ],
        **_timeline_data(run),
    }


def importances_data(importances: Importances) -> dict[str, Any]:
    """The importances of the hyperparameters of one run."""
    return {
        metric: found if isinstance(found, str) else [[parameter, rounded(share)] for parameter, share in found]
        for metric, found in importances.items()
    }


def run_summary(run: RecordedRun, name: str) -> dict[str, Any]:
    """What the page says of a run as a whole, apart from its timeline."""
    facts = [(key, run.session.get(key)) for key in ("began", "planner")]
    facts += [("shared runs", run.sharing_of_runs)]
    facts += [("GPUs shared by", run.sharing), ("resizes", run.resize_gains.text), ("restores", run.restores.text)]
    facts += [("backend", run.session.get("backend")), ("Fluid", run.session.get("fluid")), ("folder", str(run.path))]
    return {
        "name": name,
        "path": str(run.path),
        "facts": [[name, str(value)] for name, value in facts if value],
        "notes": list(run.notes),
        "trials": len(run.trials),
        "states": states_text(Counter(trial.state for trial in run.trials)),
        "running": run.is_running,
        "iterations": run.iterations,
        "resizes": count(run.resizes, "resize"),
        "cost": None if run.costs.usd is None else dollars(run.costs.usd),
        "price": run.paid.price,
        "costs": run.costs.texts,
        "forecasts": run.forecast_lines,
        "cohorts": [[each.key, cohort.text, each.error_text] for each in run.cohorts for cohort in each.cohorts],
        "makespan": run.makespan,
        "wall": run.wall,
        "clocked": run.clock is not None,
        "one_search": run.is_one_search,
        "goals": [goal.metric for goal in run.goals],
        "groups": [
            {
                "name": group.name,
                "trials": len(group.trials),
                "states": states_text(group.states),
                "said": group.said,
                "iterations": group.iterations,
                "makespan": group.makespan,
                "device_seconds": rounded(group.device_seconds),
            }
            for group in run.groups
        ],
        "keys": [
            {
                "key": k.key if k.model is None else f"{k.key} on {k.model}",
                "seconds": k.seconds,
                "alpha": k.alpha,
                "c": k.c,
                "beta": k.beta,
                "packed": k.packing > 1,
                "fused": fused_text(k),
            }
            for k in run.keys
        ],
    }


def _timeline_data(run: RecordedRun) -> dict[str, Any]:
    timeline = run.timeline
    kinds = {device.index: device.kind for device in timeline.devices}
    placements: dict[str, int] = {}
    segments: list[list[Any]] = []
    for position, segment in enumerate(timeline.segments):
        found = {kinds[device] for device in segment.devices}
        kind = found.pop() if len(found) == 1 else "device"
        placement = placements.setdefault(placement_name(segment.width, segment.devices, kind), len(placements))
        entry = [segment.row, *map(rounded, (segment.start, segment.end)), placement, rounded(segment.pause)]
        segments.append([*entry, list(timeline.packs[position])] if position in timeline.packs else entry)
    lanes = {device.index: lane for lane, device in enumerate(timeline.devices)}
    return {
        "drawn": timeline.makespan,
        "busy_share": timeline.utilisation,
        "busy_text": percent(timeline.utilisation),
        "devices_text": run.devices_held,
        "idle": _idle_figures(run),
        "lanes": [f"{device.kind} {device.index}" for device in timeline.devices],
        "hosts": [device.host for device in timeline.devices],
        "placements": list(placements),
        "segments": segments,
        "blocks": [[b.segment, b.lane, b.lanes, b.slot, b.slots] for b in timeline.blocks],
        "absent": [
            [lanes[device], rounded(start), rounded(end)]
            for device, intervals in timeline.absences.items()
            for start, end in intervals
        ],
        "busy": _utilisation(run),
    }


def _utilisation(run: RecordedRun) -> list[list[float]]:
    """The times at which the busy share of the devices changes, and its value from each to the next."""
    times, shares = run.timeline.utilisation_steps()
    if len(shares) > _MOST_STEPS:
        times = np.linspace(0.0, run.timeline.makespan, _MOST_STEPS + 1)
        shares = run.timeline.utilisation_bins(_MOST_STEPS)
    return [[rounded(float(time)) for time in times], [round(float(share), 4) for share in shares]]


def _idle_figures(run: RecordedRun) -> list[list[str]]:
    """The unused device time by its cause; empty if the journal does not tell."""
    if run.idle is None:
        return []
    figures = {name: duration(seconds) for name, seconds in run.idle.figures.items()}
    figures[WAITED] += f" ({100.0 * run.idle.waited_share:.2f} %)"
    return [[name, figure] for name, figure in figures.items()]
