"""Iterations that were reported and are not in ``results.jsonl``: their lines were lost in a power cut, or damaged."""

from __future__ import annotations

from collections.abc import Mapping

#: Most trials that a sentence names.
_MOST_TRIALS = 8


class IterationGaps:
    """Follows which iterations of each trial there are.

    Example:
        >>> from fluid.results.gaps import IterationGaps
        >>> gaps = IterationGaps()
        >>> for number in (1, 2, 5, 4):
        ...     gaps.take("a", number)
        >>> gaps.of("a", reported=7)
        [(3, 3), (6, 7)]
    """

    def __init__(self) -> None:
        #: The number behind the highest one of each trial, and what is missing below, as first and last numbers.
        self._next: dict[str, int] = {}
        self._missing: dict[str, list[tuple[int, int]]] = {}

    def take(self, trial_id: str, number: int) -> None:
        """Takes an iteration."""
        expected = self._next.get(trial_id, 1)
        if number >= expected:
            self._next[trial_id] = number + 1
            if number > expected:
                self._missing.setdefault(trial_id, []).append((expected, number - 1))
        elif trial_id in self._missing:
            parts = []
            for first, last in self._missing[trial_id]:
                inside = first <= number <= last
                parts += [(first, number - 1), (number + 1, last)] if inside else [(first, last)]
            self._missing[trial_id] = [(first, last) for first, last in parts if first <= last]

    def of(self, trial_id: str, reported: int = 0) -> list[tuple[int, int]]:
        """What is missing of a trial, as first and last numbers.

        Args:
            trial_id: the trial.
            reported: iterations that it has reported, as the journal says; more than there are results of are missing.
        """
        found, expected = list(self._missing.get(trial_id, ())), self._next.get(trial_id, 1)
        return [*found, (expected, reported)] if reported >= expected else found

    def notes(self, reported: Mapping[str, int]) -> list[str]:
        """A sentence that names what is missing of all trials; none if nothing is.

        Args:
            reported: iterations that each trial has reported, as the journal says.
        """
        found = {name: self.of(name, reported.get(name, 0)) for name in dict.fromkeys([*self._missing, *reported])}
        return gap_notes({name: parts for name, parts in found.items() if parts})


def gap_notes(gaps: Mapping[str, list[tuple[int, int]]]) -> list[str]:
    """A sentence that names missing iterations, given by trial as first and last numbers; none if there are none."""
    if not gaps:
        return []
    number = sum(last - first + 1 for parts in gaps.values() for first, last in parts)
    named = [f"{name} ({_ranges(parts)})" for name, parts in list(gaps.items())[:_MOST_TRIALS]]
    rest = f" and {len(gaps) - _MOST_TRIALS} more trials" if len(gaps) > _MOST_TRIALS else ""
    are = "iteration is" if number == 1 else "iterations are"
    return [f"{number:,} {are} missing from results.jsonl, though reported: {', '.join(named)}{rest}."]


def _ranges(parts: list[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
