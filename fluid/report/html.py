"""Renders a recorded run as one HTML page: device timeline, utilisation, metric curves and a table of trials.

The page loads no other file, so it can be mailed, archived and opened from a disk. Summary and tables are plain HTML;
``page.js`` draws the rest from data inside the page. All names that users chose are escaped and shown as text only.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fluid.display.format import (
    count,
    duration,
    durations,
    number,
    percent,
    placement_name,
    short_names,
    shortened,
    width_name,
    widths_name,
)
from fluid.display.palette import colour, ink
from fluid.display.states import states_text
from fluid.errors import InvalidFieldError
from fluid.report.idle import WAITED
from fluid.report.run import KeyMeasurements, RecordedRun, TrialRun
from fluid.results.metrics import is_number

#: Points of all curves together, and the fewest and most of one curve.
_POINTS, _LEAST_POINTS, _MOST_POINTS = 150_000, 20, 400
#: Lines of all stories together, the fewest and most of one, and most characters of a line.
_STORY_LINES, _LEAST_LINES, _MOST_LINES, _LONGEST_LINE = 20_000, 12, 200, 600
#: Most steps of the utilisation. A longer series is replaced by its means over this many equal parts of the run.
_MOST_STEPS = 2000
#: Most hyperparameters with a column of their own, and most characters of one value.
_MOST_PARAMETERS, _LONGEST_VALUE = 6, 60
#: The page may not load anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def save_html(path: str | Path, run: RecordedRun) -> None:
    """Writes the page to a file.

    Args:
        path: the file to write.
        run: the run to show.

    Raises:
        InvalidFieldError: the file cannot be written.
    """
    try:
        Path(path).write_text(render_html(run), encoding="utf-8")
    except OSError as error:
        raise InvalidFieldError("html", str(path), f"cannot be written: {error.strerror or error}") from error


def render_html(run: RecordedRun) -> str:
    """The page as text."""
    title = escape(run.name)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{title} - Fluid</title>",
        f"<style>{_asset('page.css')}</style></head><body>",
        f"<header><h1>{title}</h1>{_summary(run)}{_notes(run)}</header>",
        "<noscript><p class=note>The charts need JavaScript. The tables do not.</p></noscript>",
        _asset("page.html"),
        _trials_table(run),
        f"<div class=pair>{_card('Groups', _groups_table(run)) if not run.is_one_search else ''}",
        f"{_card('Measured', _keys_table(run.keys))}</div>",
        '<div id="tooltip" hidden></div>',
        f'<script type="application/json" id="data">{_embedded(page_data(run))}</script>',
        f"<script>{_asset('page.format.js')}</script>",
        f"<script>{_asset('page.js')}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def page_data(run: RecordedRun) -> dict[str, Any]:
    """The data that ``page.js`` draws: plain lists, strings and numbers."""
    timeline = run.timeline
    kinds = {device.kind for device in timeline.devices}
    kind = kinds.pop() if len(kinds) == 1 else "device"
    placements: dict[str, int] = {}
    segments = []
    for segment in timeline.segments:
        placement = placements.setdefault(placement_name(segment.width, segment.devices, kind), len(placements))
        segments.append([segment.row, *map(_short, (segment.start, segment.end)), placement, _short(segment.pause)])
    lanes = {device.index: lane for lane, device in enumerate(timeline.devices)}
    return {
        "makespan": timeline.makespan,
        "clocked": run.clock is not None,
        "lanes": [f"{device.kind} {device.index}" for device in timeline.devices],
        "hosts": [device.host for device in timeline.devices],
        "placements": list(placements),
        "segments": segments,
        "blocks": [[b.segment, b.lane, b.lanes, b.slot, b.slots] for b in timeline.blocks],
        "absent": [
            [lanes[device], _short(start), _short(end)]
            for device, intervals in timeline.absences.items()
            for start, end in intervals
        ],
        "busy": _utilisation(run),
        "metrics": [{"name": name, "less": run.less_is_better(name)} for name in run.metrics],
        "trials": _trials_data(run),
    }


# --- Data for the charts


def _utilisation(run: RecordedRun) -> list[list[float]]:
    """The times at which the busy share of the devices changes, and its value from each to the next."""
    times, shares = run.timeline.utilisation_steps()
    if len(shares) > _MOST_STEPS:
        times = np.linspace(0.0, run.timeline.makespan, _MOST_STEPS + 1)
        shares = run.timeline.utilisation_bins(_MOST_STEPS)
    return [[_short(float(time)) for time in times], [round(float(share), 4) for share in shares]]


def _trials_data(run: RecordedRun) -> list[dict[str, Any]]:
    curves = max(1, len(run.trials) * len(run.metrics))
    most = min(max(_POINTS // curves, _LEAST_POINTS), _MOST_POINTS)
    most_lines = min(max(_STORY_LINES // max(1, len(run.trials)), _LEAST_LINES), _MOST_LINES)
    short = short_names([trial.trial_id for trial in run.trials])
    found = []
    for row, trial in enumerate(run.trials):
        found.append(
            {
                "id": trial.trial_id,
                "short": short[row],
                "colour": colour(row),
                "ink": ink(colour(row)),
                "facts": _trial_facts(run, trial),
                "story": _story(run, trial, most_lines),
                "config": {str(name): _value(value, 400) for name, value in trial.config.items()},
                "curves": [_curve(trial, metric, most) for metric in run.metrics],
                "last": [_shown(trial.last.get(metric)) for metric in run.metrics],
                "low": [_shown(trial.ranges.get(metric, (None, None))[0]) for metric in run.metrics],
                "high": [_shown(trial.ranges.get(metric, (None, None))[1]) for metric in run.metrics],
            }
        )
    return found


def _curve(trial: TrialRun, metric: str, most: int) -> list[list[float]]:
    """The iterations, times and values of a metric; at most ``most`` points, evenly chosen and including the last."""
    points = [(each.number, each.end, each.metrics[metric]) for each in trial.finished if metric in each.metrics]
    points = [point for point in points if is_number(point[2])]
    if len(points) > most:
        points = [points[round(part * (len(points) - 1) / (most - 1))] for part in range(most)]
    return [[x for x, _, _ in points], [_short(t) for _, t, _ in points], [_short(float(y)) for _, _, y in points]]


def _trial_facts(run: RecordedRun, trial: TrialRun) -> dict[str, str]:
    """The entries that the page shows for a selected trial, besides its config and metrics."""
    names = {group.group_id: group.name for group in run.groups}
    facts = {
        "group": names.get(trial.group_id, trial.group_id),
        "state": trial.state.lower(),
        "iterations": _iterations(trial),
        "time": duration(trial.seconds),
        "widths": ", ".join(f"{width_name(width)} for {duration(seconds)}" for width, seconds in trial.widths.items()),
        "profile key": trial.key,
        "failure": trial.failure,
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


def _short(value: float) -> float:
    """Rounds to six significant digits, which are more than a screen shows."""
    return float(f"{value:.6g}")


def _shown(value: object) -> str:
    if isinstance(value, float):
        # Five digits distinguish metrics such as 0.9312 and 0.9318.
        return f"{value:.5g}" if math.isfinite(value) else str(value)
    return "" if value is None else _value(value, _LONGEST_VALUE)


def _value(value: object, most: int) -> str:
    if isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= most else text[: most - 3] + "..."


def _embedded(data: object) -> str:
    """JSON for a script element, in which no ``<`` can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


# --- Plain HTML


def _summary(run: RecordedRun) -> str:
    timeline = run.timeline
    states = states_text(Counter(trial.state for trial in run.trials))
    tiles = [
        ("makespan", duration(timeline.makespan), ""),
        ("devices busy", percent(timeline.utilisation), f"of {run.devices_held}"),
        ("trials", f"{len(run.trials):,}", states),
        ("iterations", f"{sum(group.iterations for group in run.groups):,}", count(run.resizes, "resize")),
    ]
    entries = [(name, run.session.get(key)) for name, key in (("began", "began"), ("planner", "planner"))]
    entries += [("GPUs shared by", run.sharing)]
    entries += [("backend", run.session.get("backend")), ("Fluid", run.session.get("fluid")), ("folder", str(run.path))]
    line = " &nbsp;·&nbsp; ".join(f"{escape(name)} <b>{escape(str(value))}</b>" for name, value in entries if value)
    boxes = "".join(
        f"<div class=tile><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(more)}</small></div>"
        for name, value, more in tiles
    )
    return f'<p class="session">{line}</p><div class="tiles">{boxes}</div>{_idle_line(run)}'


def _idle_line(run: RecordedRun) -> str:
    """The unused device time by its cause."""
    idle = run.idle
    if idle is None:
        return ""
    figures = {name: duration(seconds) for name, seconds in idle.figures.items()}
    figures[WAITED] += f" ({100.0 * idle.waited_share:.2f} %)"
    line = " &nbsp;·&nbsp; ".join(f"{escape(name)} <b>{escape(figure)}</b>" for name, figure in figures.items())
    return f'<p class="session" title="device-seconds; see docs/cli.md">unused device time: {line}</p>'


def _notes(run: RecordedRun) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes)


def _card(title: str, table: str) -> str:
    return f'<section class=card><h2>{title}</h2><div class="scroll">{table}</div></section>'


def _groups_table(run: RecordedRun) -> str:
    rows = [
        [
            _cell(group.name),
            _cell(f"{len(group.trials):,}", len(group.trials)),
            _cell(states_text(group.states)),
            _cell(f"{group.iterations:,}", group.iterations),
            _cell(duration(group.makespan), group.makespan),
        ]
        for group in run.groups
    ]
    return _table(("group", "trials#", "states", "iterations#", "makespan#"), rows, "groups")


def _keys_table(keys: Sequence[KeyMeasurements]) -> str:
    if not keys:
        return '<p class="muted">No measurements: the profile is written when the session ends.</p>'
    rows = [
        [
            _cell(key.key),
            _cell("" if key.seconds is None else duration(key.seconds), key.seconds),
            _cell(f"{key.alpha:.3f}" if key.packing > 1 else "-", key.alpha),
            _cell(str(key.c) if key.packing > 1 else "-", key.c),
            _cell(f"{key.beta:.3f}", key.beta),
        ]
        for key in keys
    ]
    headers = ("profile key", "alone, per iteration#", "alpha (packing)#", "c (best packing)#", "beta (scaling)#")
    return _table(headers, rows, "keys")


def _trials_table(run: RecordedRun) -> str:
    differing = _differing_parameters(run.trials)
    parameters = [name for name, fits in differing.items() if fits][:_MOST_PARAMETERS]
    rows, attributes = [], []
    names = {group.group_id: group.name for group in run.groups}
    for row, trial in enumerate(run.trials):
        cells = [
            f'<td><i style="background:{colour(row)}"></i>{escape(trial.trial_id)}</td>',
            *([] if run.is_one_search else [_cell(names.get(trial.group_id, trial.group_id))]),
            f'<td class="state {escape(trial.state.lower())}">{escape(trial.state.lower())}</td>',
            _cell(_iterations(trial), trial.iterations),
            _cell(duration(trial.seconds), trial.seconds),
            _cell(widths_name(trial.widths), max(trial.widths, default=0.0)),
            *(_parameter_cell(trial.config.get(name)) for name in parameters),
            '<td class="num last"></td><td class="num best"></td>',
        ]
        rows.append(cells)
        attributes.append(f' data-row="{row}" tabindex="0"')
    facts = ("trial", *(() if run.is_one_search else ("group",)), "state", "iterations#", "time#", "widths#")
    headers = [*facts, *(f"{name}#" for name in parameters)]
    table = _table([*headers, "last#", "best#"], rows, "trials", attributes)
    hidden = [name for name in differing if name not in parameters]
    note = f'<p class="muted">Select a trial to see {escape(", ".join(hidden))}.</p>' if hidden else ""
    return f'<div class="scroll tall">{table}</div>{note}<div id="detail" hidden></div></section>'


def _table(
    headers: Iterable[str], rows: Iterable[Sequence[str]], name: str, attributes: Sequence[str] | None = None
) -> str:
    """A sortable table; a header that ends in ``#`` marks a column of numbers."""
    head = "".join(
        f'<th scope="col"{" class=num" * header.endswith("#")}><button>{escape(header.removesuffix("#"))}</button></th>'
        for header in headers
    )
    body = "".join(
        f"<tr{attributes[position] if attributes else ''}>{''.join(cells)}</tr>" for position, cells in enumerate(rows)
    )
    return f'<table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _cell(text: str, value: float | None = None) -> str:
    """A cell; ``value`` makes it one of numbers, by which the table is sorted."""
    if value is None:
        return f"<td>{escape(text)}</td>"
    return f'<td class="num" data-v="{value:.9g}">{escape(text)}</td>'


def _parameter_cell(value: object) -> str:
    text = "" if value is None else _value(value, _LONGEST_VALUE)
    if isinstance(value, (int, float)) and is_number(value):
        return _cell(number(value), value)
    return f'<td class="num">{escape(text)}</td>'


def _differing_parameters(trials: Sequence[TrialRun]) -> dict[str, bool]:
    """The hyperparameters in which trials differ, and whether a value of each fits a column."""
    values: dict[str, set[str]] = {}
    fits: dict[str, bool] = {}
    for trial in trials:
        for name, value in trial.config.items():
            values.setdefault(str(name), set()).add(repr(value))
            fits[str(name)] = fits.get(str(name), False) or isinstance(value, (str, int, float, bool))
    return {name: fits[name] for name, seen in values.items() if len(seen) > 1}


def _iterations(trial: TrialRun) -> str:
    return f"{trial.iterations}" if trial.budget is None else f"{trial.iterations}/{trial.budget}"


def _asset(name: str) -> str:
    return (resources.files("fluid.report") / name).read_text(encoding="utf-8")
