"""The conditions of cohorts: of one split, and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fluid.planning.cohort_features import number_of

#: Most characters of a name in words.
_LONGEST_NAME = 40

#: The first side of a split: the smaller numbers, or the first of two sets of names; or the second one.
Side = Literal[0, 1]


@dataclass(frozen=True, slots=True)
class Threshold:
    """Parts trials by a number: up to ``at``, and above it.

    Attributes:
        feature: the dotted name of the config's value.
        at: the largest number of the first side.
    """

    feature: str
    at: float

    def side(self, values: Mapping[str, str]) -> Side | None:
        """The side of a config; ``None`` if it has no such number."""
        text = values.get(self.feature)
        number = None if text is None else number_of(text)
        return None if number is None else 0 if number <= self.at else 1


@dataclass(frozen=True, slots=True)
class NameSets:
    """Parts trials by a name, into two sets of names.

    Attributes:
        feature: the dotted name of the config's value.
        sides: the names of both sides.
    """

    feature: str
    sides: tuple[frozenset[str], frozenset[str]]

    def side(self, values: Mapping[str, str]) -> Side | None:
        """The side of a config; ``None`` if it has no such name, or one that was not seen before."""
        text = values.get(self.feature)
        return 0 if text in self.sides[0] else 1 if text in self.sides[1] else None


Split = Threshold | NameSets


def between(low: float, high: float) -> float:
    """The threshold between two neighbouring values: near their middle, with few digits.

    Where ``high`` is more than twice ``low``, and both are above 0, the middle is that on a log scale. Between
    integers it is an integer.

    Example:
        >>> between(64.0, 128.0), between(1.0, 2.0), between(16.0, 512.0), between(0.001, 0.1)
        (96.0, 1.0, 91.0, 0.01)
    """
    middle = math.sqrt(low) * math.sqrt(high) if 0.0 < 2.0 * low < high else low + (high - low) / 2.0
    if low == int(low) and high == int(high) and high - low < 1e6:
        return float(math.floor(middle + 0.5) if middle + 0.5 < high else math.floor(middle))
    for digits in range(1, 17):
        rounded = float(f"{middle:.{digits}g}")
        # Rounding moves the middle by little of the way to either value.
        if abs(rounded - middle) <= 0.25 * min(middle - low, high - middle):
            return rounded
    return low


def words(path: Sequence[tuple[Split, Side]]) -> str:
    """Conditions in words.

    Example:
        >>> optimizer = NameSets("opt", (frozenset({"sgd"}), frozenset({"adam", "lamb"})))
        >>> words([(Threshold("size", 96.0), 0), (optimizer, 1), (Threshold("size", 16.0), 1)])
        '16 < size <= 96, opt in {adam, lamb}'

    Args:
        path: splits from the root down, each with the side taken.
    """
    parts: dict[str, str] = {}
    least: dict[str, float] = {}
    most: dict[str, float] = {}
    for split, side in path:
        name = split.feature
        if isinstance(split, NameSets):
            parts[name] = _names(name, sorted(map(_short, split.sides[side])))
            continue
        (most if side == 0 else least)[name] = split.at
        low, high = least.get(name), most.get(name)
        if low is None:
            parts[name] = f"{name} <= {_number(split.at)}"
        elif high is None:
            parts[name] = f"{name} > {_number(low)}"
        else:
            parts[name] = f"{_number(low)} < {name} <= {_number(high)}"
    return ", ".join(parts.values())


def _names(name: str, texts: Sequence[str]) -> str:
    return f"{name} = {texts[0]}" if len(texts) == 1 else f"{name} in {{{', '.join(texts)}}}"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 3]}..."
