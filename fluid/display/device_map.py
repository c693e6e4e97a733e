"""The devices and the trials on them as text: a bar per device, or one character per device if there are many."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from rich.text import Text

from fluid.display.format import count, fraction, printable, short_names, shortened
from fluid.display.palette import colour, ink, mark
from fluid.session.status import DeviceStatus, Status

#: Characters between columns, and the shortest useful bar, in characters.
_GAP, _SHORTEST_BAR = 2, 10
_DIM = Style(dim=True)


@dataclass(frozen=True)
class DashboardGlyphs:
    """The characters of a dashboard."""

    idle: str
    fill: str
    rail: str
    done: str
    left: str
    ellipsis: str


UNICODE = DashboardGlyphs("·", "─", "│", "━", "─", "…")
ASCII = DashboardGlyphs(".", "-", "|", "#", ".", "~")


class TrialNumbers:
    """Numbers the trials on devices. A trial's number chooses its letter and colour, and it keeps it while it runs.

    The numbers of trials that have left are used again, so that few colours are in use at a time.
    """

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._previous: dict[str, int] = {}

    def update(self, status: Status) -> Mapping[str, int]:
        """Numbers the trials that are on devices now; returns the numbers by trial."""
        present = dict.fromkeys(trial for device in status.devices for trial, _ in device.residents)
        self._current = {trial: number for trial, number in self._current.items() if trial in present}
        taken = set(self._current.values())
        free = (number for number in range(len(present)) if number not in taken)
        for trial in present:
            if trial not in self._current:
                # A trial that returns gets its previous number, if that is free.
                chosen = self._previous.get(trial)
                if chosen is None or chosen in taken:
                    chosen = next(number for number in free if number not in taken)
                self._current[trial] = self._previous[trial] = chosen
                taken.add(chosen)
        return self._current


class DeviceMap:
    """Draws the devices of a session.

    Args:
        devices: by index.
        width: characters per line.
        numbers: the number of every trial on a device.
        glyphs: the characters to draw with.
        coloured: whether the terminal shows colours.
    """

    def __init__(
        self,
        devices: Sequence[DeviceStatus],
        width: int,
        numbers: Mapping[str, int],
        glyphs: DashboardGlyphs,
        coloured: bool,
    ) -> None:
        self._devices = devices
        self._width = width
        self._numbers = numbers
        self._glyphs = glyphs
        self._coloured = coloured
        residents = list(dict.fromkeys(trial for device in devices for trial, _ in device.residents))
        self._short = dict(zip(residents, short_names(residents), strict=True))

    def lines(self, most: int) -> list[Text]:
        """At most ``most`` lines (at least 1): bars, in several columns if necessary, or a character per device."""
        devices = self._devices
        columns = max(1, math.ceil(len(devices) / most))
        labels = _labels(devices, hosts=columns == 1)
        label = max(map(len, labels), default=0)
        room = (self._width - _GAP * (columns - 1)) // columns
        bar = room - label - 2
        if columns > 1 and bar < _SHORTEST_BAR:
            return self._grid_lines(most)
        rows = math.ceil(len(devices) / columns)
        lines = []
        for row in range(rows):
            line = Text()
            for position in range(row, len(devices), rows):
                line.append(" " * _GAP if line else "")
                line.append(f"{labels[position]:<{label}} ", style=_DIM if not devices[position].residents else "")
                line.append(self._glyphs.rail, style=_DIM)
                line.append_text(self._bar(devices[position], max(1, bar)))
            lines.append(line)
        return lines

    def _bar(self, device: DeviceStatus, width: int) -> Text:
        """The trials on a device side by side, each as wide as its share of the device; those of a pack as one."""
        total = max(1.0, sum(min(share, 1.0) for _, share in device.parts))
        line, taken, at = Text(), 0.0, 0
        for trials, share in device.parts:
            taken += min(share, 1.0) / total
            end = min(width, round(taken * width))
            line.append_text(self._cell(trials, share, end - at, device.sharing))
            at = max(at, end)
        return line.append(self._glyphs.idle * (width - at), style=_DIM)

    def _cell(self, trials: Sequence[str], share: float, width: int, sharing: str) -> Text:
        """A trial, or those of a pack, as ``width`` characters of a bar."""
        if width < 1:
            return Text()
        # Without colours, trials need a border between them and a fill that differs from an idle device.
        border, fill = ("", " ") if self._coloured else ("[" if width > 2 else "", self._glyphs.fill)
        size = "" if share == 1.0 else fraction(share) if share < 1.0 else f"x{fraction(share)}"
        room = width - len(border) - (width > 4)
        trial, short = trials[0], self._short.get(trials[0], trials[0])
        names = (f"{trial} {size}".rstrip(), f"{short} {size}".rstrip(), short)
        if len(trials) > 1:
            names = (f"{len(trials)} {sharing} {size}".rstrip(), f"{len(trials)} {sharing}", str(len(trials)))
        for name in names:
            if cell_len(name) <= room:
                break
        else:
            name = mark(self._numbers.get(trial, 0)) if room < 4 else shortened(trial, room, self._glyphs.ellipsis)
        text = Text(f"{border}{' ' if self._coloured and width > 4 else ''}{printable(name)}", style=self._style(trial))
        text.truncate(width, overflow="crop")
        if not self._coloured and text.cell_len < width:
            text.append(" ")
        return text.append(fill * (width - text.cell_len))

    def _grid_lines(self, most: int) -> list[Text]:
        """A character per device, for which bars have no room; each line begins with the index of its first device."""
        devices = self._devices
        label = len(str(devices[-1].device_id))
        per_line = max(1, self._width - label - 2)
        if per_line > 20:
            per_line -= per_line % 10
        lines: list[Text] = []
        for start in range(0, len(devices), per_line):
            part = devices[start : start + per_line]
            if len(lines) == most - 1 and start + per_line < len(devices):
                left = devices[start:]
                busy = sum(1 for device in left if device.residents)
                text = f"{self._glyphs.ellipsis} and {count(len(left), 'more device')}, {busy} busy"
                lines.append(Text(text, style=_DIM))
                break
            line = Text(f"{part[0].device_id:>{label}} ", style=_DIM)
            line.append(self._glyphs.rail)
            for device in part:
                line.append_text(self._dot(device))
            lines.append(line)
        if len(lines) < most and any(len(device.residents) > 1 for device in devices):
            lines.append(
                Text(f"{'':<{label}}  letter: one trial   digit: packed trials   {self._glyphs.idle} idle", style=_DIM)
            )
        return lines

    def _dot(self, device: DeviceStatus) -> Text:
        """A device as one character: idle, the letter of its trial, or the number of trials on it."""
        if not device.residents:
            return Text(self._glyphs.idle, style=_DIM)
        trial = device.residents[0][0]
        many = len(device.residents)
        name = mark(self._numbers.get(trial, 0))
        char = (str(many) if many < 10 else "+") if many > 1 else name if len(name) == 1 else "#"
        return Text(char, style=self._style(trial))

    def _style(self, trial: str) -> Style:
        if not self._coloured:
            return Style.null()
        background = colour(self._numbers.get(trial, 0))
        return Style(color=ink(background), bgcolor=background)


def _labels(devices: Sequence[DeviceStatus], *, hosts: bool) -> list[str]:
    """``gpu 3`` for each device, preceded by the host's name if there are several hosts."""
    digits = max((len(str(device.device_id)) for device in devices), default=1)
    names = [f"{device.kind} {device.device_id:>{digits}}" for device in devices]
    if not hosts or len({device.host for device in devices}) < 2:
        return names
    return [
        f"{shortened(printable(device.host.split('.')[0]), 12)} {name}"
        for device, name in zip(devices, names, strict=True)
    ]
