"""Formats durations, shares, widths, counts and axis ticks for every view and report.

The script of the HTML page (``fluid/reports/page/page.format.js``) has the same rules for what it formats by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import takewhile

#: Units of time: name, seconds in it, and the longest time, in seconds, that is shown in it.
_UNITS = (("s", 1.0, 300.0), ("min", 60.0, 3.0 * 3600.0), ("h", 3600.0, math.inf))
#: Most parts of a device that a width is taken to be a share of.
_MOST_PARTS = 1024
#: Steps between the ticks of an axis, in units. Beyond them, steps are 1, 2 or 5 times a power of ten.
_STEPS = {"s": (1, 2, 5, 10, 15, 30, 60), "min": (1, 2, 5, 10, 15, 30, 60), "h": (1, 2, 3, 6, 12, 24, 48)}


def duration(seconds: float, like: float | None = None) -> str:
    """A duration to three digits: ``"9.2 s"``, ``"12.5 min"``, ``"1.53 h"``.

    Args:
        seconds: the duration.
        like: a duration shown next to it, in seconds, whose unit is used.
    """
    if math.isinf(seconds):
        return "never"
    name, size = unit_for(seconds if like is None else like)
    if name == "s" and 0.0 < seconds < 0.1:
        return f"{number(seconds * 1000.0)} ms"
    return f"{number(seconds / size)} {name}"


def durations(seconds: Sequence[float]) -> list[str]:
    """Durations for a column, all in the unit of the longest and with equally many decimals."""
    finite = [value for value in seconds if math.isfinite(value)]
    longest = max(finite, default=0.0)
    name, size = unit_for(longest)
    if name == "s" and 0.0 < longest < 0.1:
        name, size = "ms", 0.001
    scaled = [value / size for value in finite]
    decimals = 2 if longest / size < 100.0 else 1
    if all(abs(value - round(value)) < 1e-9 * max(1.0, value) for value in scaled):
        decimals = 0
    return [f"{value / size:,.{decimals}f} {name}" if math.isfinite(value) else "never" for value in seconds]


def unit_for(seconds: float) -> tuple[str, float]:
    """The unit for times up to ``seconds``: its name, and the seconds in it."""
    return next((name, size) for name, size, most in _UNITS if seconds <= most or most == math.inf)


def device_time(seconds: float) -> str:
    """Device-seconds to three digits: ``"9.2 device-seconds"``, ``"12.5 device-minutes"``, ``"1 device-hour"``."""
    name, size = unit_for(seconds)
    shown = number(seconds / size)
    noun = {"s": "device-second", "min": "device-minute", "h": "device-hour"}[name]
    return f"{shown} {noun}{'' if shown == '1' else 's'}"


def dollars(usd: float) -> str:
    """US dollars: ``"$8.00"``, ``"$1,234.50"``, below a cent ``"$0.0012"``."""
    size = abs(usd)
    return f"{'-' if usd < 0.0 else ''}${size:,.{_cents(size)}f}"


def dollar_column(values: Sequence[float]) -> list[str]:
    """US dollars for a column, with equally many decimals: more than two only if none is a dollar."""
    largest = max(map(abs, values), default=0.0)
    decimals = 2 if largest >= 1.0 else max(3 if largest else 2, _cents(largest))
    return [f"{'-' if value < 0.0 else ''}${abs(value):,.{decimals}f}" for value in values]


def _cents(usd: float) -> int:
    """Decimals that show two digits of an amount below a cent, and cents of others."""
    return min(8, 1 - math.floor(math.log10(usd))) if 0.0 < usd < 0.01 else 2


def clock_time(seconds: float) -> str:
    """A duration in the format of a clock: ``"0:07"``, ``"12:30"``, ``"1:02:03"``, ``"2 d 03:04:05"``."""
    if not math.isfinite(seconds):
        return "never"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """A number to three significant digits, without an exponent while it is of a readable size."""
    if abs(value) >= 100.0:
        return f"{value:,.0f}"
    if 0.0 < abs(value) < 0.001:
        return f"{value:.2g}"
    digits = 2 - math.floor(math.log10(abs(value))) if value else 0
    text = f"{value:.{min(max(digits, 0), 5)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def figures(values: Sequence[float]) -> list[str]:
    """Numbers for a column: equally many decimals, at most 4, chosen so that the smallest one shows three digits."""
    smallest = min((abs(value) for value in values if value), default=1.0)
    decimals = min(max(2 - math.floor(math.log10(smallest)), 0), 4)
    return [f"{value:,.{decimals}f}" for value in values]


def percent(share: float) -> str:
    """A share as a whole percentage; only a full share is shown as 100 %."""
    return f"{math.floor(100.0 * share + 1e-9) if share > 0.99 else round(100.0 * share)} %"


def times(ratio: float) -> str:
    """A ratio: ``"3.26x"``; a dash if it is not a positive finite number."""
    return f"{ratio:.2f}x" if math.isfinite(ratio) and ratio > 0.0 else "-"


def fraction(width: float) -> str:
    """A width, or the sum of those of several trials on a device, as a number: ``"1/2"``, ``"3/4"``, ``"3"``."""
    return str(Fraction(width).limit_denominator(_MOST_PARTS)) if width < 1.0 else f"{round(width)}"


def width_name(width: float) -> str:
    """A width as a label: ``"1/2"``, ``"1"``, ``"x3"``."""
    return f"x{fraction(width)}" if width > 1.0 else fraction(width)


def widths_name(widths: Iterable[float]) -> str:
    """The widths of a trial, in order of first use: ``"1/4, 1, x2"``; of more than three, the smallest and largest."""
    found = list(widths)
    if len(found) > 3:
        return f"{width_name(min(found))} to {width_name(max(found))}"
    return ", ".join(map(width_name, found))


def placement_name(width: float, devices: Sequence[int], kind: str = "device") -> str:
    """The devices that a trial holds: ``"1/2 of device 4"``, ``"device 3"``, ``"3 devices: 0,1,2"``.

    Args:
        width: the trial's width.
        devices: indices of its devices.
        kind: the word for a device, such as ``"gpu"``.
    """
    if width < 1.0:
        return f"{fraction(width)} of {kind} {devices[0]}"
    if len(devices) == 1:
        return f"{kind} {devices[0]}"
    return f"{len(devices)} {kind}s: {index_ranges(devices)}"


def index_ranges(indices: Sequence[int]) -> str:
    """Indices in ascending order, runs of more than three as ranges: ``"0,1,4-9"``."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 3 else ",".join(map(str, run)) for run in runs)


def tick_step(span: float, most: int) -> float:
    """Seconds between the ticks of a time axis of ``span`` seconds that has room for ``most`` ticks."""
    if span <= 0.0:
        return 1.0
    least = span / max(most, 1)
    name, size = unit_for(span)
    steps = [step * size for step in _STEPS[name]]
    if least > steps[-1] or least < steps[0]:
        base = steps[0] if least < steps[0] else steps[-1]
        scale = 10.0 ** math.floor(math.log10(least / base)) * base
        steps = [scale, 2.0 * scale, 5.0 * scale, 10.0 * scale]
    return next((step for step in steps if step >= least * (1.0 - 1e-9)), steps[-1])


def tick_label(seconds: float, span: float) -> str:
    """The label of a tick, in the unit of its axis of ``span`` seconds, without the unit's name."""
    return f"{round(seconds / unit_for(span)[1], 9):g}"


def short_names(names: Sequence[str]) -> tuple[str, ...]:
    """Abbreviated names: without their common prefix and without what follows a comma.

    ``trial-00017`` becomes ``17``, and ``trial 3, stage 1`` becomes ``3``.
    """
    # The common prefix of the first and the last name in order is that of all.
    pairs = zip(min(names, default=""), max(names, default=""), strict=False)
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    shared = shared[: 1 + max(shared.rfind(mark) for mark in "-_/# ")]
    tails = [name[len(shared) :].split(",")[0].strip() or name for name in names]
    return tuple(str(int(tail)) if tail.isdecimal() else tail for tail in tails)


def shortened(text: str, most: int, ellipsis: str = "…") -> str:
    """Shortens a text to at most ``most`` characters by leaving out its middle."""
    if len(text) <= most:
        return text
    if most < 8:
        return text[-most:] if most > 0 else ""
    tail = (most - len(ellipsis)) // 2
    return text[: most - len(ellipsis) - tail] + ellipsis + text[-tail:]


def printable(text: str) -> str:
    """A user's name made safe for a terminal: control characters and line breaks become ``?``."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def count(things: int, what: str) -> str:
    """A number with its noun: ``"1 trial"``, ``"27 trials"``."""
    return f"{things:,} {what}" if things == 1 else f"{things:,} {what}s"
