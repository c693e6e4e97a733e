"""A Gantt chart as text: a line per device, or one per slot where trials share it, with time from left to right.

Every trial has a letter, so the chart is legible without colours. With colours the letter is only at the start of each
bar. The chart fits any width of terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from fluid.display.format import duration, percent, printable, tick_label, tick_step, unit_for
from fluid.display.palette import colour, ink, mark
from fluid.reports.run.timeline import Bar, Timeline

#: Most devices and most lines of the chart. A line below says how many devices are left out.
MAX_DEVICES = 32
MAX_LINES = 48
#: The width, in characters, from which the chart has a column of utilisation at its right.
_ROOM_FOR_SHARES = 60
_SHARES_WIDTH = 6
_LEAST_COLUMNS = 8
_LONGEST_NAME = 24

#: Owners of the cells that no trial owns.
_IDLE, _BOUND, _ABSENT = -1, -2, -3
_DIM = Style(dim=True)


@dataclass(frozen=True)
class _GanttGlyphs:
    """The characters of a chart."""

    idle: str
    bound: str
    absent: str
    pause: str
    rail: str
    top: str
    middle: str
    bottom: str
    corner: str
    axis: str
    tick: str
    pointer: str
    ellipsis: str
    levels: str


_UNICODE = _GanttGlyphs("·", "┊", "/", "~", "│", "┌", "│", "└", "└", "─", "┴", "▲", "…", " ▁▂▃▄▅▆▇█")
_ASCII = _GanttGlyphs(".", ":", "/", "~", "|", "+", "|", "+", "+", "-", "+", "^", "...", " 123456789")


def trial_style(trial: int) -> Style:
    """The trial's colour as background, with legible text on it."""
    return Style(color=ink(colour(trial)), bgcolor=colour(trial))


class TextGantt:
    """A Gantt chart of a timeline as a renderable of rich.

    Args:
        timeline: the timeline to draw.
        max_devices: most devices to draw.
        legend_lines: most lines of legend; 0 for no legend.
    """

    def __init__(self, timeline: Timeline, *, max_devices: int = MAX_DEVICES, legend_lines: int = 3) -> None:
        self._timeline = timeline
        self._max_devices = max_devices
        self._legend_lines = legend_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines of the chart."""
        coloured = console.color_system is not None and not console.no_color
        chart = _GanttLines(self._timeline, options.max_width, _ASCII if options.ascii_only else _UNICODE, coloured)
        lines = [*chart.device_lines(self._max_devices), *chart.utilisation_line(), *chart.axis_lines()]
        for line in [*lines, *chart.legend_lines(self._legend_lines)]:
            line.no_wrap, line.overflow = True, "crop"
            yield line


class _GanttLines:
    """Draws one timeline at one width."""

    def __init__(self, timeline: Timeline, width: int, glyphs: _GanttGlyphs, coloured: bool) -> None:
        self._timeline = timeline
        self._width = width
        self._glyphs = glyphs
        self._coloured = coloured
        digits = max(len(str(device.index)) for device in timeline.devices)
        self._labels = {device.index: f"{device.kind} {device.index:>{digits}}" for device in timeline.devices}
        self._margin = max(map(len, self._labels.values())) + 2
        self._shares = width >= _ROOM_FOR_SHARES
        self._columns = max(_LEAST_COLUMNS, width - self._margin - (_SHARES_WIDTH if self._shares else 0))
        #: Characters to the right of the rail: the columns and, if there is room, the utilisation.
        self._room = max(self._columns, width - self._margin)
        self._paused = False
        self._crowded = False
        self._fused = False

    # -- devices ------------------------------------------------------------------------------------------

    def device_lines(self, max_devices: int) -> Iterator[Text]:
        devices = self._timeline.devices
        shown = lines = 0
        for device in devices[:max_devices]:
            bars = self._timeline.bars[device.index]
            height = max((bar.slots for bar in bars), default=1)
            if shown and lines + height > MAX_LINES:
                break
            shown, lines = shown + 1, lines + height
            yield from self._device(device.index, bars, height)
        left = [self._timeline.busy_fractions[device.index] for device in devices[shown:]]
        if left:
            busy = percent(sum(left) / len(left))
            text = f"{self._glyphs.ellipsis} and {len(left)} more devices, busy {busy} on average"
            yield Text(text, style=_DIM)

    def _device(self, index: int, bars: Sequence[Bar], height: int) -> Iterator[Text]:
        for line in range(height):
            text = Text(f"{self._labels[index] if line == 0 else '':<{self._margin - 2}} ")
            text.append(self._rail(line, height), style=_DIM)
            chars, owners = self._cells(index, bars, line, height)
            for owner, cells in groupby(zip(owners, chars, strict=True), key=lambda cell: cell[0]):
                text.append("".join(char for _, char in cells), style=self._style(owner))
            if self._shares and line == 0:
                text.append(f"{percent(self._timeline.busy_fractions[index]):>{_SHARES_WIDTH}}", style=_DIM)
            yield text

    def _rail(self, line: int, height: int) -> str:
        if height == 1:
            return self._glyphs.rail
        if line == 0:
            return self._glyphs.top
        return self._glyphs.bottom if line == height - 1 else self._glyphs.middle

    def _cells(self, index: int, bars: Sequence[Bar], line: int, height: int) -> tuple[list[str], list[int]]:
        """The characters of one line of a device, and the owner of each: a trial, or one of the negative constants."""
        chars, owners = [self._glyphs.idle] * self._columns, [_IDLE] * self._columns
        # A free slot of a busy device is blank: the device is not idle.
        for start, end in self._timeline.busy_intervals[index]:
            first, last = self._column(start), self._column(end)
            chars[first:last] = " " * (last - first)
        bound = self._bound_column()
        if bound is not None:
            chars[bound], owners[bound] = self._glyphs.bound, _BOUND
        for start, end in self._timeline.absences.get(index, ()):
            for column in range(self._column(start), self._column(end)):
                chars[column], owners[column] = self._glyphs.absent, _ABSENT
        too_short = []
        for bar in bars:
            # The height of a bar is its share of the device's lines.
            if not bar.slot * height // bar.slots <= line < (bar.slot + 1) * height // bar.slots:
                continue
            trial = self._timeline.trials[bar.row]
            first, last = self._column(bar.start), self._column(bar.end)
            if first == last:
                too_short.append((min(first, self._columns - 1), trial))
            for column, char in enumerate(self._fill(bar, last - first), first):
                chars[column], owners[column] = char, trial
        # A bar shorter than a column is shown only if its column is otherwise free.
        for column, trial in too_short:
            if owners[column] < 0:
                chars[column], owners[column] = self._fit(mark(trial), 1), trial
        return chars, owners

    def _fill(self, bar: Bar, length: int) -> str:
        pause = self._timeline.segments[bar.segment].pause
        paused = min(length, self._column(bar.start + pause) - self._column(bar.start))
        self._paused = self._paused or paused > 0
        return self._glyphs.pause * paused + self._fit_name(bar, length - paused)

    def _fit_name(self, bar: Bar, length: int) -> str:
        """A trial's letter or number, or the number of fused trials, over ``length`` cells."""
        pack = self._timeline.pack_name(bar.segment)
        if not pack:
            return self._fit(mark(self._timeline.trials[bar.row]), length)
        self._fused = True
        number = pack.split()[0]
        return self._fit(next((name for name in (f"{pack} ", f"{number}f") if len(name) <= length), "f"), length)

    def _fit(self, name: str, length: int) -> str:
        """A trial's letter or number over ``length`` cells."""
        if length < len(name):
            self._crowded = self._crowded or length > 0
            return "#" * length
        if self._coloured:
            return f"{name:<{length}}"
        return name * length if len(name) == 1 else f"{name:=<{length}}"

    def _style(self, owner: int) -> Style:
        if owner < 0:
            return _DIM
        return trial_style(owner) if self._coloured else Style.null()

    # -- time ---------------------------------------------------------------------------------------------

    def _column(self, seconds: float) -> int:
        """The column whose left edge is nearest to a time; the number of columns for the makespan."""
        if self._timeline.makespan <= 0.0:
            return 0
        return min(self._columns, int(seconds / self._timeline.makespan * self._columns + 0.5))

    def _bound_column(self) -> int | None:
        bound = self._timeline.lower_bound
        return min(self._column(bound), self._columns - 1) if bound > 0.0 else None

    def utilisation_line(self) -> Iterator[Text]:
        levels = self._glyphs.levels
        text = Text(f"{'busy':<{self._margin - 2}} ", style=_DIM)
        text.append(self._glyphs.rail)
        for share in self._timeline.utilisation_bins(self._columns).tolist():
            text.append(levels[min(len(levels) - 1, int(share * (len(levels) - 1) + 0.5))])
        if self._shares:
            text.append(f"{percent(self._timeline.utilisation):>{_SHARES_WIDTH}}", style=Style(bold=True))
        yield text

    def axis_lines(self) -> Iterator[Text]:
        span, glyphs = self._timeline.makespan, self._glyphs
        line = [glyphs.axis] * self._columns
        step = tick_step(span, max(6, self._columns // 9))
        labels = []
        for count in range(int(span / step + 1e-9) + 1):
            column = min(self._column(count * step), self._columns - 1)
            line[column] = glyphs.tick
            labels.append((column, tick_label(count * step, span)))
        labels[-1] = (labels[-1][0], f"{labels[-1][1]} {unit_for(span)[0]}")
        rail = " " * (self._margin - 1) + glyphs.corner
        yield Text(rail + "".join(line), style=_DIM)
        yield Text(" " * self._margin + _row_of(labels, self._room), style=_DIM)
        yield from self._marker_lines()

    def _marker_lines(self) -> Iterator[Text]:
        pointer, span = self._glyphs.pointer, self._timeline.makespan
        makespan = _pointer(self._columns - 1, pointer, f"makespan {duration(span)}", self._room)
        bound = self._bound_column()
        if bound is None:
            yield Text(" " * self._margin + makespan)
            return
        text = _pointer(bound, pointer, f"lower bound {duration(self._timeline.lower_bound, like=span)}", self._room)
        gap = len(makespan) - len(makespan.lstrip())
        if len(text) < gap:
            yield Text(" " * self._margin + text + makespan[len(text) :])
        else:
            yield Text(" " * self._margin + text)
            yield Text(" " * self._margin + makespan)

    # -- legend -------------------------------------------------------------------------------------------

    def legend_lines(self, most: int) -> Iterator[Text]:
        names = self._timeline.names
        shown = sorted(self._timeline.named) if self._timeline.packs else list(range(len(names)))
        line, used = Text(), 0
        for position, trial in enumerate(shown, 1):
            name = printable(names[trial])
            short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + self._glyphs.ellipsis
            more = f"+{len(shown) - position + 1} more"
            # The last line keeps room for "+N more" unless this is the last entry.
            reserve = len(more) + 2 if used + 1 >= most and position < len(shown) else 0
            if line and len(line) + len(mark(trial)) + len(short) + 3 + reserve > self._width:
                if used + 1 >= most:
                    yield line.append(more, style=_DIM)
                    break
                line.rstrip()
                yield line
                line, used = Text(), used + 1
            if most:
                line.append(mark(trial), style=trial_style(trial) if self._coloured else Style.null())
                line.append(f" {short}  ")
        else:
            if line:
                line.rstrip()
                yield line
        notes = [(self._paused, f"{self._glyphs.pause} pause of a resize")]
        notes += [(self._fused, "f trials fused into one model, as many as it says")]
        notes += [(bool(self._timeline.absences), f"{self._glyphs.absent} device absent")]
        notes += [(self._crowded, "# too short for its number")]
        texts = [note for needed, note in notes if needed]
        if texts:
            yield Text("   ".join(texts), style=_DIM)


def _row_of(labels: Sequence[tuple[int, str]], width: int) -> str:
    """Labels centred at their columns; a label that would touch the next one is left out."""
    row = [" "] * width
    free = width
    for column, label in reversed(labels):
        at = max(0, min(column - (len(label) - 1) // 2, width - len(label)))
        if at + len(label) < free or free == width:
            row[at : at + len(label)] = label
            free = at
    return "".join(row).rstrip()


def _pointer(column: int, pointer: str, text: str, room: int) -> str:
    """A pointer at a column with its text to the right, or to the left if there is no room."""
    if column + 2 + len(text) <= room:
        return " " * column + f"{pointer} {text}"
    return f"{text} {pointer}".rjust(column + 1)
