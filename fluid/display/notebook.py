"""The live view in a notebook: one display, which is updated in place, as HTML and as text.

It needs no widgets: an IPython kernel sends displays and their updates, and every frontend shows them. The display is
in the cell that submits the group; a group of another cell begins a display there.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import io
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, TextIO

from rich.console import Console, RenderableType

from fluid.directions import search_text
from fluid.display.dashboard import render
from fluid.display.follow import StatusFollower
from fluid.display.format import clock_time, count, percent, short_names
from fluid.display.names import config_text, has_ended, metric_text, states_text, with_interrupted
from fluid.display.palette import colour, ink
from fluid.display.summary import folder_lines, shown_path, summary_lines
from fluid.errors import FluidError
from fluid.session.status import DeviceStatus, GroupStatus, Status
from fluid.waiting.waits import AwaitedThread

# -- notebook html -------------------------------------------------------------------------------
#
# HTML of the live view in a notebook. It suits light and dark themes.


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
    start: str = "",
) -> str:
    """The current state of a session.

    Args:
        status: the status; ``None`` before the first.
        numbers: the number of every trial on a device, which chooses its colour.
        shares: the share done of each group whose iterations are known, by position.
        announced: what is about to begin; empty if nothing is.
        ends: by when each group is likely to have ended, by position, where known.
        start: what the first iterations wait for; empty if they wait for nothing.
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
    facts += [states_text(totals), f"starting: {start}" if start else ""]
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
    """What remains of a session: a row per group, its best result first, and the run folder."""
    rows = "".join(
        _row(
            f"<b>{escape(group.name)}</b>",
            best_html(group),
            escape(f"{count(sum(group.trials.values()), 'trial')}: {states_text(with_interrupted(group.trials))}"),
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


# -- notebook ------------------------------------------------------------------------------------


#: Seconds between two updates.
_INTERVAL = 0.5
#: Seconds that ``close`` waits for the thread, which may be waiting for a status.
_PATIENCE = 2.0
#: Size of the text for frontends without HTML.
_WIDTH, _HEIGHT = 100, 30


class NotebookView:
    """Shows a session in the output of a cell until it is closed. Create one only if :meth:`wanted` is true.

    Args:
        status: returns the current status; the view ends if it raises a :class:`FluidError`.
        interval: seconds between two updates.
    """

    def __init__(self, status: Callable[[], Status], *, interval: float = _INTERVAL) -> None:
        self._status = status
        self._interval = interval
        self._follower = StatusFollower()
        #: Held while something is sent.
        self._lock = threading.RLock()
        #: The display, the cell that it is in, and the context to send from, by which the kernel knows the cell.
        self._display: Any = None
        self._cell: int | None = None
        self._context = contextvars.copy_context()
        #: The HTML that was sent last.
        self._sent = ""
        self._finished = False
        self._stopping = threading.Event()
        self._thread = AwaitedThread("fluid-live", self._run)
        self._thread.start()

    @staticmethod
    def wanted() -> bool:
        """Whether this process is the kernel of a notebook."""
        return getattr(_shell(), "kernel", None) is not None

    @property
    def is_drawn(self) -> bool:
        """Whether the view is shown."""
        return not self._finished

    def write_above(self, stream: TextIO, text: str) -> bool:
        """Does nothing: in a notebook the output of a cell keeps its order."""
        return False

    def announce(self, text: str) -> None:
        """Shows what is about to begin, until the next group is submitted."""
        self._follower.announce(text)
        self.begin_group()

    def begin_group(self) -> None:
        """Shows the display in the current cell, if it is in another one. Called where a group is submitted."""
        cell = getattr(_shell(), "execution_count", None)
        if self._finished or threading.current_thread() is self._thread:
            return
        with self._lock:
            if self._display is not None and cell == self._cell:
                return
            self._cell, self._context = cell, contextvars.copy_context()
            self._display = _display(*self._now(), display_id=True)

    def close(self) -> None:
        """Sends the final state. Closing twice is harmless."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE)
        self._finish()

    # -- the view's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._refresh() and not self._stopping.wait(self._interval):
                pass
            if self._stopping.is_set():
                self._refresh()
        finally:
            if not self._stopping.is_set():
                self._finish()

    def _refresh(self) -> bool:
        """Takes the current status, and sends it if it has changed; returns whether to continue."""
        try:
            status = self._status()
        except FluidError:
            return False
        with self._lock:
            if self._finished:
                return False
            self._follower.take(status)
            if self._stopping.is_set():
                return False  # The thread that closes the view sends the rest.
            if all(has_ended(group.trials) for group in status.groups) and not self._follower.announced:
                self._send(*self._end())
            else:
                self._send(*self._now())
        return True

    def _now(self) -> tuple[str, str]:
        """The current state, as HTML and as text."""
        follower = self._follower
        if follower.last is None:
            return status_html(None, {}, {}, follower.announced), f"Fluid  {follower.announced}".rstrip()
        shares, ends, announced = follower.shares(), follower.ends(), follower.announced
        known: dict[str, Any] = {"announced": announced, "ends": ends, "start": follower.start}
        shown = render(follower.last, _WIDTH, _HEIGHT, follower.numbers, shares=shares, **known)
        return status_html(follower.last, follower.numbers, shares, **known), _text(shown)

    def _end(self) -> tuple[str, str]:
        """What remains, as HTML and as text."""
        last = self._follower.last
        if last is None or not last.groups:
            return "", ""
        lines = summary_lines(last, self._follower.seconds(), width=_WIDTH)
        lines += [] if last.run_dir is None else folder_lines(last.run_dir, _WIDTH)
        return final_html(last, self._follower.seconds()), "\n".join(line.plain for line in lines)

    def _send(self, html: str, text: str, context: contextvars.Context | None = None) -> None:
        if self._display is None or html == self._sent:
            return
        self._sent = html
        with contextlib.suppress(Exception):  # The kernel may be about to end.
            (context or self._context.copy()).run(self._display.update, _Forms(html, text))

    def _finish(self) -> None:
        """Sends what remains, from the cell that closes the view: some frontends hear only the cell that runs."""
        with self._lock:
            if not self._finished:
                self._finished = True
                self._send(*self._end(), contextvars.copy_context())


class _Forms:
    """What IPython displays, in two forms."""

    def __init__(self, html: str, text: str) -> None:
        self._forms = {"text/html": html, "text/plain": text}

    def _repr_mimebundle_(self, **options: Any) -> dict[str, str]:
        return self._forms


def _shell() -> Any:
    """IPython's shell; ``None`` where this process has none."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get is None else get()


def _display(html: str, text: str, **options: Any) -> Any:
    return importlib.import_module("IPython.display").display(_Forms(html, text), **options)


def _text(shown: RenderableType) -> str:
    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None, force_jupyter=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()
