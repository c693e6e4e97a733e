"""The dashboard: a session's status as text, with the progress of its groups, its devices and its measurements.

It fits the given width and height, from one trial to thousands, by summing up what there is no room for. It is legible
without colours and without Unicode. :mod:`fluid.display.live` redraws it on a terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from fluid.directions import search_text
from fluid.display.device_map import ASCII, UNICODE, DashboardGlyphs, DeviceMap, TrialNumbers
from fluid.display.format import clock_time, count, number, percent
from fluid.display.names import (
    config_text,
    ended_trials,
    has_ended,
    listed_states,
    metric_text,
    shortened_apart,
    state_style,
    summed_states,
)
from fluid.results.best import BestSoFar
from fluid.session.status import GroupStatus, Status
from fluid.trialgroup import TrialState

#: Most lines for groups, for measurements, and for trials that give no result.
_MOST_GROUPS, _MOST_KEYS, _MOST_SILENT = 10, 2, 1
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
        shares: the share done of each group whose iterations are known, by position.
        announced: what is about to begin; empty if nothing is.
        ends: by when each group is likely to have ended, by position, where known.
        start: what the first iterations wait for; empty if they wait for nothing.
    """

    status: Status
    width: int
    height: int
    numbers: Mapping[str, int] = field(repr=False)
    shares: Mapping[int, float]
    announced: str = ""
    ends: Mapping[int, str] = field(default_factory=dict)
    start: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines."""
        coloured = console.color_system is not None and not console.no_color
        for line in _DashboardLines(self, ASCII if options.ascii_only else UNICODE, coloured).lines():
            if options.ascii_only:
                line.plain = line.plain.encode("ascii", "replace").decode()
            line.no_wrap, line.overflow = True, "crop"
            line.truncate(self.width)
            yield line


def render(
    status: Status,
    width: int,
    height: int = 24,
    numbers: Mapping[str, int] | None = None,
    *,
    shares: Mapping[int, float] | None = None,
    announced: str = "",
    ends: Mapping[int, str] = {},
    start: str = "",
) -> Dashboard:
    """A dashboard of ``status`` in at most ``width`` characters and ``height`` lines.

    Args:
        status: the status to draw.
        width, height: of the terminal, in characters and lines.
        numbers: the number of every trial on a device, which chooses its colour; in order of appearance if ``None``.
        shares: the share done of each group, by position; ``None`` for those of the status.
        announced: what is about to begin; empty if nothing is.
        ends: by when each group is likely to have ended, by position, where known.
        start: what the first iterations wait for; empty if they wait for nothing.
    """
    own = {position: group.share for position, group in enumerate(status.groups) if group.share is not None}
    return Dashboard(
        status,
        max(width, 1),
        max(height, 1),
        TrialNumbers().update(status) if numbers is None else numbers,
        own if shares is None else shares,
        announced,
        ends,
        start,
    )


class _DashboardLines:
    """Draws one dashboard with one set of characters."""

    def __init__(self, dashboard: Dashboard, glyphs: DashboardGlyphs, coloured: bool) -> None:
        self._status = dashboard.status
        self._width = dashboard.width
        self._height = dashboard.height
        self._numbers = dashboard.numbers
        self._announced = dashboard.announced
        self._start = dashboard.start
        self._shares = {id(self._status.groups[at]): share for at, share in dashboard.shares.items()}
        self._ends = {id(self._status.groups[at]): end for at, end in dashboard.ends.items()}
        self._glyphs = glyphs
        self._coloured = coloured

    def lines(self) -> list[Text]:
        """All lines; at most as many as the height allows."""
        if not self._status.groups and self._announced:
            return [self._header()]
        keys = self._key_lines()
        start = [Text(f"starting  {self._start}", style=_DIM)] if self._start else []
        silent = start + self._goal_lines() + self._given_up_lines() + self._awaited_lines() + self._silent_lines()
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
        line.append(f"  {clock_time(self._status.at)}{' rehearsed' if self._status.rehearsed else ''}")
        totals: Counter[str] = Counter()
        for group in self._status.groups:
            totals.update(group.trials)
        if self._announced:
            line.append(f"  {self._announced}")
        use = f"  {busy} of {count(len(devices), 'device')} busy" if devices else ""
        if self._status.asked:
            use += f"  {count(self._status.asked, 'more device')} asked for"
        if not totals:
            return line.append(use)
        # A failure counts for more than the number of busy devices, which the map below shows too.
        states = Text("  ").append_text(states_text_within(totals, self._width - line.cell_len - 2))
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
        sums = [sum_of_groups(ended, "ended group", style=_DIM)] if ended and most > 2 else []
        room = most - len(sums)
        if len(active) > room:
            room -= room > 2
            if room < most - len(sums):
                sums.append(sum_of_groups(active[:-room], "more group", style=_DIM))
            active = active[-room:]
        known = [group for group in active if group.best is not None or group.open_metric is not None]
        if len(sums) + len(active) + len(known) > most:
            return [*sums, *self._bars(active, with_best=True)]
        lines = list(sums)
        for group, bar in zip(active, self._bars(active, with_best=False), strict=True):
            lines.append(bar)
            if group.best is not None:
                lines.append(self._best_line(group.best))
            elif group.open_metric is not None:
                lines.append(no_best_text(group.open_metric, self._width, lead="  "))
        return lines

    def _best_line(self, best: BestSoFar) -> Text:
        """The best result of a group, with as much of the config as there is room for."""
        return best_text(best, self._width, lead="  best ", ellipsis=self._glyphs.ellipsis)

    def _bars(self, groups: Sequence[GroupStatus], *, with_best: bool) -> list[Text]:
        """A line per group, in columns; narrow terminals get fewer columns.

        If the session has only one group, the header already lists its states. Repeating them here would make the
        columns change their width all the time.
        """
        names = shortened_apart([group.name for group in groups], _LONGEST_NAME, self._glyphs.ellipsis)
        shares = [self._shares.get(id(group)) for group in groups]
        columns: dict[str, list[Text]] = {
            "name": [Text(name) for name in names],
            "said": [Text(_said(group), style=_DIM) for group in groups],
            "bar": [Text(" " * _LEAST_BAR) for _ in groups],
            "share": [Text("" if share is None else percent(share), justify="right") for share in shares],
            "progress": [Text(_progress(group), justify="right") for group in groups],
            "trials": [Text(_trials_of(group), justify="right") for group in groups],
            "states": [_states_text(group.trials) for group in groups],
            "best": [Text(_short_best(group.best)) for group in groups],
            "eta": [Text(_eta(group), style=_BOLD) for group in groups],
            "end": [Text(self._ends.get(id(group), "")) for group in groups],
        }
        if len(self._status.groups) == 1:
            del columns["states"]
        if not with_best:
            del columns["best"]
        columns = {name: cells for name, cells in columns.items() if _width_of(cells)}
        spare = 0
        for dropped in ("trials", "progress", "states", "end", "said", "bar", "best", "eta"):
            spare = self._width - sum(_width_of(cells) for cells in columns.values()) - _GAP * (len(columns) - 1)
            if spare >= 0:
                break
            columns.pop(dropped, None)
        if "bar" in columns:
            width = min(_WIDEST_BAR, _LEAST_BAR + max(0, spare))
            columns["bar"] = [self._bar(share, width) for share in shares]
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

    def _bar(self, share: float | None, width: int) -> Text:
        if share is None:
            return Text(" " * width)
        done = min(width, int(share * width + 1e-9))
        bar = Text().append(self._glyphs.done * done, style=_GOOD)
        return bar.append(self._glyphs.left * (width - done), style=_DIM)

    def _goal_lines(self) -> list[Text]:
        """How the session stands to its deadline and its budget."""
        goal = self._status.goal
        if goal is None or not goal.text:
            return []
        style = _BAD if goal.is_missed else _DIM
        return list(_wrapped("goal  ", goal.text.split("; "), self._width, _MOST_SILENT, style))

    def _given_up_lines(self) -> list[Text]:
        """The devices that do not work."""
        parts = [f"device {index}, as {why}" for index, why in self._status.given_up]
        return list(_wrapped("given up  ", parts, self._width, _MOST_SILENT, _BAD)) if parts else []

    def _awaited_lines(self) -> list[Text]:
        """The devices that groups wait for and that there are not."""
        waiting = [group for group in self._status.groups if group.awaited]
        names = shortened_apart([group.name for group in waiting], _LONGEST_NAME, self._glyphs.ellipsis)
        texts = [" and ".join(group.awaited) for group in waiting]
        only = len(self._status.groups) == 1
        parts = [text if only else f"{name}: {text}" for name, text in zip(names, texts, strict=True)]
        return list(_wrapped("waits for  ", parts, self._width, _MOST_SILENT, _BAD)) if parts else []

    def _silent_lines(self) -> list[Text]:
        """The trials that give no result."""
        silent = self._status.silent
        names = shortened_apart([trial_id for trial_id, _ in silent], _LONGEST_NAME, self._glyphs.ellipsis)
        parts = [f"{name} for {clock_time(seconds)}" for name, (_, seconds) in zip(names, silent, strict=True)]
        lines = _wrapped("no result  ", parts, self._width, _MOST_SILENT, _BAD) if parts else ()
        return list(lines)

    # -- measurements -------------------------------------------------------------------------------------

    def _key_lines(self) -> list[Text]:
        """For each profile key, the largest measured packing and its overhead alpha, and what fusing gains."""
        facts: dict[str, str] = {}
        for key, c in self._status.packing.items():
            packed = f"up to {c} a device, alpha {number(self._status.alpha.get(key, 1.0))}" if c > 1 else ""
            rows, gain = self._status.fused.get(key, (1, 1.0))
            fused = f"{rows} fused do {number(gain)}x" if rows > 1 else ""
            if packed or fused:
                facts[key] = "; ".join(filter(None, (packed, fused)))
        names = shortened_apart(list(facts), _LONGEST_NAME, self._glyphs.ellipsis)
        parts = [f"{name}: {fact}" for name, fact in zip(names, facts.values(), strict=True)]
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


def best_text(best: BestSoFar, width: int, *, lead: str = "best ", ellipsis: str = "…") -> Text:
    """The best result in one line of at most ``width`` characters: metric, value, trial, iteration, and the config."""
    (metric,), (trial,) = (shortened_apart([name], _LONGEST_NAME, ellipsis) for name in (best.metric, best.trial_id))
    line = Text(lead).append(f"{metric} {metric_text(best.value)}", style=_BOLD)
    besides = [(shortened_apart([name], _LONGEST_NAME, ellipsis)[0], value) for name, value in best.besides.items()]
    rest = "".join(f", {name} {metric_text(value)}" for name, value in besides)
    rest += f"  {trial}, iteration {best.iteration:,}{best.fate}"
    direction = f" ({best.direction})"
    line.append(direction if line.cell_len + len(direction) + cell_len(rest) <= width else "").append(rest)
    config = config_text(best.config, width - line.cell_len - _GAP, ellipsis)
    return line.append(f"{'':{_GAP}}{config}", style=_DIM) if config else line


def no_best_text(metric: str, width: int, *, lead: str = "") -> Text:
    """Why there is no best result of a metric, in one line of at most ``width`` characters."""
    line = Text(f"{lead}no best: {search_text(metric)}", style=_DIM)
    line.truncate(width)
    return line


def sum_of_groups(groups: Sequence[GroupStatus], what: str, style: Style | str = "") -> Text:
    """The sum of several groups as one line."""
    totals: Counter[str] = Counter()
    for group in groups:
        totals.update(group.trials)
    line = Text(f"{count(len(groups), what)}, {count(sum(totals.values()), 'trial')}: ", style=style)
    return line.append_text(_states_text(totals))


def states_text_within(trials: Mapping[str, int], width: int) -> Text:
    """The number of trials in each state, in at most ``width`` characters: summed up, or the most telling."""
    summed = summed_states(trials)
    telling = [part for part in summed if part[0] in ("RUNNING", "FAILED")]
    for parts in (listed_states(trials), summed, telling, telling[-1:]):
        text = _joined(parts)
        if text.cell_len <= width:
            return text
    return Text()


def _states_text(trials: Mapping[str, int]) -> Text:
    """The number of trials in each state: ``6 running, 12 queued, 1 failed``."""
    return _joined(listed_states(trials))


def _joined(states: Iterable[tuple[str, str]]) -> Text:
    return Text(", ").join(Text(text, style=state_style(state)) for state, text in states)


def _progress(group: GroupStatus) -> str:
    """The iterations done, and those in all; of a search, whose trials may be stopped early, a prediction."""
    if not group.iterations and group.is_search:
        return count(group.iterations_done, "iteration")
    about = "~" if group.is_search and not has_ended(group.trials) else ""
    return f"{group.iterations_done:,}/{about}{group.iterations:,}"


def _said(group: GroupStatus) -> str:
    """Whose a group is and how urgent, whether its deadline is met, and which place trials have that wait."""
    waits = group.place is not None and not group.awaited and group.trials.get(TrialState.QUEUED, 0) > 0
    return ", ".join(filter(None, (group.said, group.outlook, f"no. {group.place} in line" if waits else "")))


def _trials_of(group: GroupStatus) -> str:
    """How many trials of a search have ended, or begun while none has ended, if it has said how many there will be."""
    if group.expected is None:
        return ""
    ended = ended_trials(group.trials)
    return f"{ended:,}/{group.expected:,} trials" if ended else f"{group.begun:,} of {group.expected:,} trials begun"


def _short_best(best: BestSoFar | None) -> str:
    if best is None:
        return ""
    (metric,) = shortened_apart([best.metric], _LONGEST_NAME // 2)
    return f"{metric} {metric_text(best.value)}{best.less_note}"


def _eta(group: GroupStatus) -> str:
    if has_ended(group.trials):
        return ""
    if group.eta is None:
        return "" if group.is_search else "ETA ?"
    return f"ETA {clock_time(group.eta)}"


def _width_of(cells: Iterable[Text]) -> int:
    return max((cell.cell_len for cell in cells), default=0)
