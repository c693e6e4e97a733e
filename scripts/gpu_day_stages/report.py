"""The results of all stages as Markdown: the goals first, then the figures of each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

#: Longer values are not shown; gpu_day.json has them.
_LONGEST_VALUE = 100


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


def gain_at(figures: Mapping[str, Any], way: str, trials: str) -> float:
    """Returns the throughput of so many small CNNs, relative to one after another in time slices."""
    throughput = figures["packing"]["workloads"]["cnn"]["throughput"]
    return float(throughput[way][trials]["rate"] / throughput["time slices"]["1"]["rate"])


def least_share_of_best(figures: Mapping[str, Any]) -> float:
    """Returns the throughput at Fluid's c relative to that of the best number by hand, where it is least."""
    return min(
        found["against_best"]
        for stage in ("packing", "packing_more")
        for workload in figures.get(stage, {}).get("workloads", {}).values()
        for found in workload["fluid"].values()
    )


def random_packings(figures: Mapping[str, Any]) -> list[Any]:
    """Returns the outcome of the random packings, in time slices and under MPS."""
    return [figures[stage][way]["packings"] for stage, way in (("safety", "timeslice"), ("safety_mps", "mps"))]


def packings_run(figures: Mapping[str, Any]) -> float:
    """Returns how many random packings were run."""
    return float(sum(one["packings"] for one in random_packings(figures)))


def trials_without_memory(figures: Mapping[str, Any]) -> float:
    """Returns how many trials of the random packings started again or failed."""
    return float(sum(one["started_again"] + len(one["failed"]) for one in random_packings(figures)))


GOALS = (
    Goal(
        "eight small CNNs under MPS against one at a time",
        "at least 1.8x",
        lambda figures: gain_at(figures, "MPS", "8"),
        lambda value: value >= 1.8,
        "x",
    ),
    Goal(
        "throughput at Fluid's c against the best by hand",
        "at least 0.9",
        least_share_of_best,
        lambda value: value >= 0.9,
    ),
    Goal("random packings", "at least 200", packings_run, lambda value: value >= 200),
    Goal("trials of random packings that ran out of memory", "0", trials_without_memory, lambda value: value == 0),
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


def markdown(results: Mapping[str, Any], about: Mapping[str, str]) -> str:
    """Returns the results as a page.

    Args:
        results: as in gpu_day.json.
        about: what each stage measures, in order.
    """
    machine, stages = results["machine"], results["stages"]
    figures = {name: stage["figures"] for name, stage in stages.items() if "figures" in stage}
    device = ", ".join(machine["gpus"]) or "CPU: the code was tried, and the figures mean nothing"
    lines = ["# Figures of one GPU", "", f"{device}; {results['date']}", ""]
    lines += _table(("machine", ""), ((name, _text(value)) for name, value in machine.items()))
    lines += _table(("goal", "bound", "measured", "met"), _goals(figures))
    for name, what in about.items():
        stage = stages.get(name)
        if stage is None:
            lines += [f"## {name}: not measured yet", "", f"{what}.", ""]
            continue
        lines += [f"## {name}", "", f"{what}; {stage['date']}, {stage['seconds']} s, {stage['status']}.", ""]
        lines += _table(("figure", "value"), _flat(stage.get("figures", {})))
        if "output" in stage:
            lines += ["```", stage["output"].strip().replace("```", "'''"), "```", ""]
    return "\n".join(lines)


def _goals(figures: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for goal in GOALS:
        try:
            value = goal.figure(figures)
        except (KeyError, ValueError):
            yield goal.text, goal.bound, "not measured", ""
        else:
            yield goal.text, goal.bound, f"{value:.3g}{goal.unit}", "yes" if goal.is_met(value) else "no"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of nested dicts that fit in a table, by their path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{path}.{name}" if path else str(name))
    elif len(text := _text(value)) <= _LONGEST_VALUE and "\n" not in text:
        yield path, text


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return [*lines, ""] if len(lines) > 2 else []
