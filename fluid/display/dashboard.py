"""The dashboard: a session's status as text, with the progress of its groups, its devices and its measurements.

It fits the given width and height, from one trial to thousands, by summing up what there is no room for. It is legible
without colours and without Unicode. :mod:`fluid.display.live` redraws it on a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from fluid.display.device_map import ASCII, UNICODE, DashboardGlyphs, DeviceMap, TrialNumbers
from fluid.display.format import clock_time, count, number, percent, printable, shortened
from fluid.display.states import ended_trials, has_ended, listed_states, state_style, with_interrupted
from fluid.session.status import GroupStatus, Status

#: Most lines for groups, for measurements, and for trials that give no result.
_MOST_GROUPS, _MOST_KEYS, _MOST_SILENT = 8, 2, 1
_LONGEST_NAME = 24
_LEAST_BAR, _WIDEST_BAR = 8, 40
#: Characters between columns.
_GAP = 2
#: The height from which blank lines separate the parts.
_ROOM_FOR_GAPS = 14
_DIM, _BOLD, _BAD, _GOOD = Style(dim=True), Style(bold=True), Style(color="red", bold=True), Style(color="green")


@dataclass(frozen=True)
class Dashboard:
    """A status as a renderable of rich.

    Attributes:
        status: the status to draw.
        width, height: characters per line, and lines, at most.
        numbers: the number of every trial on a device.
    """

    status: Status
    width: int
    height: int
    numbers: Mapping[str, int] = field(repr=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines."""
        coloured = console.color_system is not None and not console.no_color
        for line in _DashboardLines(self, ASCII if options.ascii_only else UNICODE, coloured).lines():
            if options.ascii_only:
                line.plain = line.plain.encode("ascii", "replace").decode()
            line.no_wrap, line.overflow = True, "crop"
            line.truncate(self.width)
            yield line


def render(status: Status, width: int, height: int = 24, numbers: Mapping[str, int] | None = None) -> Dashboard:
    """A dashboard of ``status`` in at most ``width`` characters and ``height`` lines.

    Args:
        status: the status to draw.
        width, height: of the terminal, in characters and lines.
        numbers: the number of every trial on a device, which chooses its colour; in order of appearance if ``None``.
    """
    return Dashboard(
        status, max(width, 1), max(height, 1), TrialNumbers().update(status) if numbers is None else numbers
    )


def summary_lines(status: Status, seconds: Mapping[int, float], *, most: int = 20) -> list[Text]:
    """The lines that remain on the terminal when the session ends: one per group.

    Args:
        status: the last status.
        seconds: how long each group ran, by position in ``status.groups``.
        most: most lines; the first line then sums up the earlier groups.
    """
    groups = status.groups
    skipped = max(0, len(groups) - most + 1) if len(groups) > most else 0
    name_width = min(_LONGEST_NAME, max((len(_display_name(group.name)) for group in groups[skipped:]), default=0))
    lines = []
    if skipped:
        lines.append(_sum_of(groups[:skipped], "earlier group"))
    for position, group in enumerate(groups[skipped:], skipped):
        line = Text().append(f"{_display_name(group.name):<{name_width}}", style=_BOLD)
        line.append(f"  {count(_trials(group), 'trial')}: ")
        line.append_text(_states_text(with_interrupted(group.trials)))
        line.append(f"; {_iterations(group)}; {clock_time(seconds.get(position, status.at))}")
        lines.append(line)
    return lines


class _DashboardLines:
    """Draws one dashboard with one set of characters."""

    def __init__(self, dashboard: Dashboard, glyphs: DashboardGlyphs, coloured: bool) -> None:
        self._status = dashboard.status
        self._width = dashboard.width
        self._height = dashboard.height
        self._numbers = dashboard.numbers
        self._glyphs = glyphs
        self._coloured = coloured

    def lines(self) -> list[Text]:
        """All lines; at most as many as the height allows."""
        keys, silent = self._key_lines(), self._silent_lines()
        gap = [Text()] if self._height >= _ROOM_FOR_GAPS else []
        groups = self._group_lines(max(1, min(_MOST_GROUPS, self._height // 4)))
        used = 1 + len(groups) + len(silent) + len(keys) + (2 + bool(keys)) * len(gap)
        devices = self._devices(max(1, self._height - used))
        lines = [self._header(), *gap, *groups, *silent, *gap, *devices, *(gap if keys else []), *keys]
        return lines[: self._height]

    def _header(self) -> Text:
        devices = self._status.devices
        busy = sum(1 for device in devices if device.residents)
        line = Text().append("Fluid", style=_BOLD)
        line.append(f"  {clock_time(self._status.at)}")
        totals: Counter[str] = Counter()
        for group in self._status.groups:
            totals.update(group.trials)
        states = Text("  ").append_text(_states_text(totals)) if totals else Text()
        use = f"  {busy} of {count(len(devices), 'device')} busy" if devices else ""
        if self._status.asked:
            use += f"  {count(self._status.asked, 'more device')} asked for"
        # A failure counts for more than the number of busy devices, which the map below shows too.
        if line.cell_len + len(use) + states.cell_len <= self._width:
            line.append(use)
        return line.append_text(states)

    def _devices(self, most: int) -> list[Text]:
        devices = self._status.devices
        if not devices:
            return []
        return DeviceMap(devices, self._width, self._numbers, self._glyphs, self._coloured).lines(most)

    # -- groups -------------------------------------------------------------------------------------------

    def _group_lines(self, most: int) -> list[Text]:
        groups = self._status.groups
        active = [group for group in groups if not has_ended(group.trials)]
        ended = [group for group in groups if has_ended(group.trials)]
        if not active:  # The last group says more than a sum does.
            active, ended = ended[-1:], ended[:-1]
        sums = [_sum_of(ended, "ended group", style=_DIM)] if ended and most > 2 else []
        room = most - len(sums)
        if len(active) > room:
            room -= room > 2
            if room < most - len(sums):
                sums.append(_sum_of(active[:-room], "more group", style=_DIM))
            active = active[-room:]
        return [*sums, *self._bars(active)]

    def _bars(self, groups: Sequence[GroupStatus]) -> list[Text]:
        """A line per group, in columns; narrow terminals get fewer columns.

        If the session has only one group, the header already lists its states. Repeating them here would make the
        columns change their width all the time.
        """
        columns: dict[str, list[Text]] = {
            "name": [Text(_display_name(group.name, self._glyphs.ellipsis)) for group in groups],
            "bar": [Text(" " * _LEAST_BAR) for _ in groups],
            "share": [Text(percent(_share(group)), justify="right") for group in groups],
            "progress": [Text(_progress(group), justify="right") for group in groups],
            "states": [_states_text(group.trials) for group in groups],
            "eta": [Text(_eta(group), style=_BOLD) for group in groups],
        }
        if len(self._status.groups) == 1:
            del columns["states"]
        for dropped in ("progress", "states", "bar", "eta"):
            spare = self._width - sum(_width_of(cells) for cells in columns.values()) - _GAP * (len(columns) - 1)
            if spare >= 0:
                break
            columns.pop(dropped, None)
        if "bar" in columns:
            columns["bar"] = [self._bar(group, min(_WIDEST_BAR, _LEAST_BAR + max(0, spare))) for group in groups]
        widths = {name: _width_of(cells) for name, cells in columns.items()}
        lines = []
        for position in range(len(groups)):
            line = Text()
            for name, cells in columns.items():
                cell = cells[position].copy()
                pad = widths[name] - cell.cell_len
                cell = Text(" " * pad) + cell if cell.justify == "right" else cell + Text(" " * pad)
                line.append_text(cell).append(" " * _GAP)
            line.rstrip()
            lines.append(line)
        return lines

    def _bar(self, group: GroupStatus, width: int) -> Text:
        done = min(width, int(_share(group) * width + 1e-9))
        bar = Text().append(self._glyphs.done * done, style=_GOOD)
        return bar.append(self._glyphs.left * (width - done), style=_DIM)

    def _silent_lines(self) -> list[Text]:
        """The trials that give no result."""
        parts = [
            f"{_display_name(trial_id, self._glyphs.ellipsis)} for {clock_time(seconds)}"
            for trial_id, seconds in self._status.silent
        ]
        lines = _wrapped("no result  ", parts, self._width, _MOST_SILENT, _BAD) if parts else ()
        return list(lines)

    # -- measurements -------------------------------------------------------------------------------------

    def _key_lines(self) -> list[Text]:
        """For each profile key, the largest measured packing and its overhead alpha."""
        alpha = self._status.alpha
        known = {key: c for key, c in self._status.packing.items() if c > 1}
        parts = [
            f"{_display_name(key, self._glyphs.ellipsis)}: up to {c} a device, alpha {number(alpha.get(key, 1.0))}"
            for key, c in known.items()
        ]
        if not parts or self._height < _ROOM_FOR_GAPS:
            return []
        return list(_wrapped("measured  ", parts, self._width, _MOST_KEYS))


def _wrapped(lead: str, parts: Sequence[str], width: int, most: int, style: Style = _DIM) -> Iterator[Text]:
    """The parts in at most ``most`` lines; the last line says how many parts are left out."""
    lines = [lead]
    for position, part in enumerate(parts):
        joined = f"{lines[-1]}{part}   "
        more = f"+{len(parts) - position} more"
        if len(lines[-1]) > len(lead) and len(joined.rstrip()) > width - (len(more) if len(lines) == most else 0):
            if len(lines) == most:
                lines[-1] += more
                break
            joined = f"{'':<{len(lead)}}{part}   "
            lines.append(joined)
        lines[-1] = joined
    return (Text(line.rstrip(), style=style) for line in lines)


def _sum_of(groups: Sequence[GroupStatus], what: str, style: Style | str = "") -> Text:
    """The sum of several groups as one line."""
    totals: Counter[str] = Counter()
    for group in groups:
        totals.update(group.trials)
    line = Text(f"{count(len(groups), what)}, {count(sum(totals.values()), 'trial')}: ", style=style)
    return line.append_text(_states_text(totals))


def _states_text(trials: Mapping[str, int]) -> Text:
    """The number of trials in each state: ``6 running, 12 queued, 1 failed``."""
    return Text(", ").join(Text(text, style=state_style(state)) for state, text in listed_states(trials))


def _trials(group: GroupStatus) -> int:
    return sum(group.trials.values())


def _share(group: GroupStatus) -> float:
    if group.expected is not None:
        return min(1.0, ended_trials(group.trials) / group.expected)
    return min(1.0, group.iterations_done / group.iterations) if group.iterations else 1.0


def _progress(group: GroupStatus) -> str:
    """The group's progress: in trials if the search algorithm announced their number, else in iterations."""
    if group.expected is not None:
        return f"{ended_trials(group.trials):,}/{group.expected:,} trials"
    return f"{group.iterations_done:,}/{group.iterations:,}"


def _iterations(group: GroupStatus) -> str:
    """The finished iterations; and their budget, unless a search algorithm keeps extending it."""
    budget = "" if group.expected is not None else f"/{group.iterations:,}"
    return f"{group.iterations_done:,}{budget} iterations"


def _eta(group: GroupStatus) -> str:
    if has_ended(group.trials) or group.expected is not None:
        return ""
    return f"ETA {clock_time(group.eta)}" if group.eta is not None else "ETA ?"


def _display_name(name: str, ellipsis: str = "…") -> str:
    """The name of a group or profile key, safe for a terminal and short enough for a column."""
    return shortened(printable(name), _LONGEST_NAME, ellipsis)


def _width_of(cells: Iterable[Text]) -> int:
    return max((cell.cell_len for cell in cells), default=0)
