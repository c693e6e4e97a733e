"""HTML of the live view in a notebook. It suits light and dark themes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from fluid.directions import search_text
from fluid.display.format import clock_time, count, percent, short_names
from fluid.display.names import config_text, metric_text
from fluid.display.palette import colour, ink
from fluid.display.states import has_ended, states_text, with_interrupted
from fluid.display.summary import shown_path
from fluid.session.status import DeviceStatus, GroupStatus, Status

#: Most rows of groups and boxes of devices.
_MOST_GROUPS, _MOST_DEVICES = 20, 64
_CELL = "padding:1px 10px 1px 0;text-align:left;white-space:nowrap"
_DIM = "opacity:.65"
_MOST_CONFIG, _MOST_TRIALS = 100, 12


def status_html(
    status: Status | None,
    numbers: Mapping[str, int],
    shares: Mapping[int, float],
    announced: str = "",
    ends: Mapping[int, str] = {},
) -> str:
    """The current state of a session.

    Args:
        status: the status; ``None`` before the first.
        numbers: the number of every trial on a device, which chooses its colour.
        shares: the share done of each group whose iterations are known, by position.
        announced: what is about to begin; empty if nothing is.
        ends: by when each group is likely to have ended, by position, where known.
    """
    if status is None:
        return _box(f"<b>Fluid</b> <span style='{_DIM}'>{escape(announced)}</span>")
    totals: Counter[str] = Counter()
    for group in status.groups:
        totals.update(group.trials)
    busy = sum(1 for device in status.devices if device.residents)
    facts = [clock_time(status.at), announced, f"{busy} of {count(len(status.devices), 'device')} busy"]
    if status.asked:
        facts.append(f"{count(status.asked, 'more device')} asked for")
    facts.append(states_text(totals))
    head = f"<b>Fluid</b> {escape('  ·  '.join(filter(None, facts)))}"
    rows = "".join(
        _group_row(group, shares.get(position), ends.get(position, ""))
        for position, group in _last(list(enumerate(status.groups)))
    )
    silent = ", ".join(f"{trial} for {clock_time(seconds)}" for trial, seconds in status.silent[:5])
    warning = f"<div style='color:#d55e00'>no result from {escape(silent)}</div>" if silent else ""
    if status.goal is not None and status.goal.text:
        colour = "#d55e00" if status.goal.is_missed else "inherit"
        warning += f"<div style='color:{colour}'>{escape(status.goal.text)}</div>"
    lost = "; ".join(f"device {index} is given up: {why}" for index, why in status.given_up)
    warning += f"<div style='color:#d55e00'>{escape(lost)}</div>" if lost else ""
    return _box(f"<div>{head}</div>{_earlier(status)}{_table(rows)}{warning}{_devices(status.devices, numbers)}")


def final_html(status: Status, seconds: Mapping[int, float]) -> str:
    """What remains of a session: a row per group, its best result, and the run folder."""
    rows = "".join(
        _row(
            f"<b>{escape(group.name)}</b>",
            escape(f"{count(sum(group.trials.values()), 'trial')}: {states_text(with_interrupted(group.trials))}"),
            best_html(group),
            f"<span style='{_DIM}'>{clock_time(seconds.get(position, status.at))}</span>",
        )
        for position, group in _last(list(enumerate(status.groups)))
    )
    folder = "" if status.run_dir is None else folder_html(shown_path(status.run_dir))
    return _box(f"{_earlier(status)}{_table(rows)}{folder}")


def folder_html(folder: str) -> str:
    """The run folder, and the commands that show it."""
    commands = " ".join(f"<code>fluid {what} {escape(folder)}</code>" for what in ("report", "view"))
    return f"<div style='{_DIM}'>results in <code>{escape(folder)}</code>; see them with {commands}</div>"


def best_html(group: GroupStatus) -> str:
    """The best result of a group: metric, value, trial, iteration and config."""
    best = group.best
    if best is None:
        return "" if group.open_metric is None else escape(f"no best: {search_text(group.open_metric)}")
    config = config_text(best.config, _MOST_CONFIG)
    where = f"{best.trial_id}, iteration {best.iteration:,}{best.fate}{': ' if config else ''}{config}"
    value = f"{escape(best.metric)} <b>{metric_text(best.value)}</b>"
    value += "".join(f", {escape(name)} {metric_text(other)}" for name, other in best.besides.items())
    return f"best {value} ({best.direction}) <span style='{_DIM}'>{escape(where)}</span>"


def _group_row(group: GroupStatus, share: float | None, end: str) -> str:
    about = "~" if group.is_search and not has_ended(group.trials) else ""
    progress = f"{group.iterations_done:,}"
    progress += f"/{about}{group.iterations:,} iterations" if group.iterations else " iterations"
    eta = "" if group.eta is None or has_ended(group.trials) else f"ETA {clock_time(group.eta)}"
    return _row(
        f"<b>{escape(group.name)}</b>",
        "" if share is None else f"{_bar(share)} {percent(share)}",
        progress,
        eta,
        end,
        best_html(group),
    )


def _bar(share: float) -> str:
    outer = "display:inline-block;width:120px;height:8px;border-radius:4px;background:rgba(128,128,128,.3)"
    inner = f"width:{100.0 * share:.1f}%;height:8px;border-radius:4px;background:#009e73"
    return f"<span style='{outer}'><span style='display:block;{inner}'></span></span>"


def _devices(devices: Sequence[DeviceStatus], numbers: Mapping[str, int]) -> str:
    if len(devices) > _MOST_DEVICES:
        return ""
    residents = list(dict.fromkeys(trial for device in devices for trial, _ in device.residents))
    short = dict(zip(residents, short_names(residents), strict=True))
    several = len({device.host for device in devices}) > 1
    boxes = []
    for device in devices:
        host = f"{device.host.split('.')[0]} " if several else ""
        chips = "".join(
            _chip(
                _all_of(trials),
                f"{len(trials)} {device.sharing}" if len(trials) > 1 else short[trials[0]],
                numbers.get(trials[0], 0),
            )
            for trials, _ in device.parts
        )
        idle = f"<span style='{_DIM}'>idle</span>"
        boxes.append(
            "<span style='display:inline-block;margin:2px 10px 2px 0'>"
            f"<span style='{_DIM}'>{escape(host)}{escape(device.kind)} {device.device_id}</span> {chips or idle}</span>"
        )
    return f"<div>{''.join(boxes)}</div>"


def _all_of(trials: Sequence[str]) -> str:
    """Trials for a tooltip: all, or the first ones."""
    more = len(trials) - _MOST_TRIALS
    return ", ".join(trials[:_MOST_TRIALS]) + (f" and {count(more, 'other')}" if more > 0 else "")


def _chip(trial: str, name: str, number: int) -> str:
    background = colour(number)
    style = f"background:{background};color:{ink(background)};border-radius:3px;padding:0 4px;margin-right:2px"
    return f"<span style='{style}' title='{escape(trial)}'>{escape(name)}</span>"


def _earlier(status: Status) -> str:
    hidden = len(status.groups) - _MOST_GROUPS
    return f"<div style='{_DIM}'>{count(hidden, 'earlier group')}</div>" if hidden > 0 else ""


def _last(groups: list[tuple[int, GroupStatus]]) -> list[tuple[int, GroupStatus]]:
    return groups[-_MOST_GROUPS:]


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td style='{_CELL}'>{cell}</td>" for cell in cells) + "</tr>"


def _table(rows: str) -> str:
    return f"<table style='margin:2px 0;border-collapse:collapse'>{rows}</table>" if rows else ""


def _box(inner: str) -> str:
    return f"<div style='font-family:monospace;font-size:13px'>{inner}</div>"
