"""The results of all stages as Markdown: the goals first, then the figures of each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from gpu_day_stages.results import BEGUN, Day

#: Longer values are not shown, or cut short in tables of several values; gpu_day.jsonl has them.
_LONGEST_VALUE, _LONGEST_CELL = 160, 120
#: Characters that are shown of what a program says.
_LONGEST_OUTPUT = 3000


class Goal(NamedTuple):
    """What a figure should be.

    Attributes:
        text: what the figure is.
        bound: the goal, in words.
        figure: takes the figures of all stages by name and returns the measured value; raises ``KeyError`` or
            ``ValueError`` if it was not measured.
        is_met: whether a value is as it should be.
        unit: of the value.
    """

    text: str
    bound: str
    figure: Callable[[Mapping[str, Any]], float]
    is_met: Callable[[float], bool]
    unit: str = ""


def worst_of_sweeps(figures: Mapping[str, Any]) -> float:
    """Returns the largest difference between the losses of a sweep in two ways of sharing, relative."""
    found = [one["worst_difference"] for one in figures["sweeps"].values() if isinstance(one, Mapping)]
    return max(float(value) for value in found if value is not None)


def results_of_sweeps(figures: Mapping[str, Any]) -> float:
    """Returns the part of the results that sweeps gave, where it is least; 0 if one raised an error."""
    ways = [one for name, one in figures["sweeps"].items() if not name.startswith("asha")]
    return min((one["results"] / one["wanted"] if isinstance(one, Mapping) else 0.0) for one in ways)


def share_of_best(figures: Mapping[str, Any]) -> float:
    """Returns the throughput by hand of Fluid's c for CNNs under MPS, relative to the best number that it may pack.

    Between the numbers that were measured by hand it is interpolated.
    """
    found = figures["alpha"]["cnn, mps"]
    rates = {int(k): float(rate) for k, rate in figures["by_hand"]["MPS, cnn"].items()}
    c = int(found["c"])
    below, above = max(k for k in rates if k <= c), min(k for k in rates if k >= c)
    part = (c - below) / (above - below) if above > below else 0.0
    return (rates[below] + part * (rates[above] - rates[below])) / max(rate for k, rate in rates.items() if k <= 8)


def gain_of_pack(figures: Mapping[str, Any], one: str) -> float:
    """Returns the samples per second of a pack of 64 small MLPs, relative to one that trains in this way."""
    fusion = figures["fusion"]
    return float(fusion["MLP, width 32, k = 64"]["per_s"] / fusion[f"MLP, width 32, {one}"]["per_s"])


def trials_without_memory(figures: Mapping[str, Any]) -> float:
    """Returns how many trials of the random packings started again or failed."""
    found = [one for name, one in figures["safety"].items() if name.startswith("packings")]
    return float(sum(one["started_again"] + len(one["failed"]) for one in found))


def whole_after_faults(figures: Mapping[str, Any]) -> float:
    """Returns in how many of the ways to share, in parts, a fault left the other trials whole."""
    found = [one for name, one in figures["safety"].items() if name.startswith("fault")]
    return sum(bool(one["others_are_whole"]) for one in found) / len(found)


def failed_tests(figures: Mapping[str, Any]) -> float:
    """Returns how many tests marked gpu failed."""
    outcomes = [one["outcome"] for one in figures["tests"].values()]
    if "passed" not in outcomes:
        raise KeyError("passed")
    return float(outcomes.count("failed"))


GOALS = (
    Goal("results of the sweeps, in each way to share", "all", results_of_sweeps, lambda value: value == 1.0),
    Goal("largest difference of their losses, relative", "below 1e-4", worst_of_sweeps, lambda value: value < 1e-4),
    Goal(
        "eight small CNNs under MPS against one, by hand",
        "at least 1.8x",
        lambda figures: float(figures["by_hand"]["MPS, cnn, gain"]["8"]),
        lambda value: value >= 1.8,
        "x",
    ),
    Goal("throughput at Fluid's c against the best by hand", "at least 0.9", share_of_best, lambda value: value >= 0.9),
    Goal(
        "a pack of 64 small MLPs against one alone, eager",
        "at least 10x",
        lambda figures: gain_of_pack(figures, "alone"),
        lambda value: value >= 10.0,
        "x",
    ),
    Goal(
        "a pack of 64 small MLPs against one whose step is a CUDA graph",
        "at least 3x",
        lambda figures: gain_of_pack(figures, "CUDA graph alone"),
        lambda value: value >= 3.0,
        "x",
    ),
    Goal("trials of random packings that ran out of memory", "0", trials_without_memory, lambda value: value == 0),
    Goal("ways in which a fault left the other trials whole", "all", whole_after_faults, lambda value: value == 1.0),
    Goal("tests marked gpu that failed", "0", failed_tests, lambda value: value == 0),
    Goal(
        "memory of 64 small trials in one lane over that of a process each",
        "at most a quarter",
        lambda figures: float(figures["lanes_memory"]["memory"]["lane_over_processes"]),
        lambda value: value <= 0.25,
    ),
    Goal(
        "pause and resume of resident trials",
        "below 5 ms",
        lambda figures: float(figures["lanes"]["pause_and_resume_ms"]),
        lambda value: value < 5.0,
        " ms",
    ),
    Goal(
        "an iteration of an empty trial in a lane",
        "below 0.1 ms",
        lambda figures: float(figures["lanes"]["empty_iteration_ms"]),
        lambda value: value < 0.1,
        " ms",
    ),
)


def markdown(day: Day, about: Mapping[str, str]) -> str:
    """Returns the results as a page.

    Args:
        day: the results.
        about: what each stage measures, in order.
    """
    figures = {name: stage["figures"] for name, stage in day.stages.items()}
    device = ", ".join(day.machine["gpus"]) or "CPU: the code was tried, and the figures mean nothing"
    lines = ["# Figures of one GPU", "", f"{device}; {day.date}", ""]
    lines += _table(("machine", ""), [(name, _text(value)) for name, value in day.machine.items()])
    lines += _table(("goal", "bound", "measured", "met"), list(_goals(figures)))
    for name, what in about.items():
        stage = day.stages.get(name)
        if stage is None:
            lines += [f"## {name}: not measured yet", "", f"{what}.", ""]
            continue
        said = f"{stage.get('seconds', 0.0)} s, {'killed' if stage['status'] == BEGUN else stage['status']}"
        lines += [f"## {name}", "", f"{what}; {stage['date']}, {said}.", "", *_figures(stage["figures"])]
        if output := stage.get("output"):
            lines += ["```", output.strip().replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def _goals(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for goal in GOALS:
        try:
            value = goal.figure(figures)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):  # An error stands in a figure's place.
            yield goal.text, goal.bound, "not measured", ""
        else:
            yield goal.text, goal.bound, f"{value:.3g}{goal.unit}", "yes" if goal.is_met(value) else "no"


def _figures(figures: Mapping[str, Any]) -> list[str]:
    """One table of single values, tables of figures that have several values by the same names, and what was said."""
    flat: list[tuple[str, str]] = []
    said: list[str] = []
    tables: list[tuple[list[str], dict[str, Mapping[str, Any]]]] = []
    for name, value in figures.items():
        if not isinstance(value, Mapping) or not value:
            text = _text(value)
            if "\n" in text:
                said += [f"{name}:", "", "```", text.replace("```", "'''")[:_LONGEST_OUTPUT], "```", ""]
            elif len(text) <= _LONGEST_VALUE:
                flat.append((name, text))
            continue
        for columns, rows in tables:
            if set(columns) & set(value):
                columns += [column for column in value if column not in columns]
                rows[name] = value
                break
        else:
            tables.append((list(value), {name: value}))
    lines = _table(("figure", "value"), flat)
    for columns, rows in tables:
        cells = [
            (name, *(_text(row.get(column, ""), most=_LONGEST_CELL) for column in columns))
            for name, row in rows.items()
        ]
        lines += _table(("", *columns), cells)
    return lines + said


def _text(value: Any, most: int | None = None) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split())[:most] if most else text


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*lines, ""] if rows else []
