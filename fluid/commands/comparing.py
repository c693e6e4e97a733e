"""``fluid rehearse --benchmark NAME --algorithms ...``: algorithms compared on a benchmark."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fluid._private_files import replacing
from fluid.commands.inout import is_narrow, make_console, write_json
from fluid.display.format import duration, number, percent
from fluid.errors import InvalidFieldError
from fluid.reports.tables.rehearsal import ValueScale, figures_of, rehearsal_table
from fluid.results.metrics import Goal

if TYPE_CHECKING:
    from fluid.integrations.comparing.compare import Comparison, ComparisonRequest

_ALGORITHMS, _SAMPLES = "random,asha,hyperband", 64


def compare_algorithms(
    arguments: argparse.Namespace, devices: list[int], overheads: Mapping[str, float], folder: Path, jobs: int
) -> None:
    """Compares algorithms as the command line says, and shows what came of it.

    Args:
        arguments: of the command.
        devices: numbers of devices.
        overheads: those that are given, by name.
        folder: for run folders and outputs.
        jobs: processes at once.
    """
    from fluid.integrations.comparing.compare import ComparisonRequest, compare

    request = ComparisonRequest(
        benchmark=arguments.benchmark,
        data=arguments.data,
        algorithms=tuple(part.strip() for part in (arguments.algorithms or _ALGORITHMS).split(",")),
        devices=devices,
        seeds=arguments.seeds,
        samples=_SAMPLES if arguments.samples is None else arguments.samples,
        budget=arguments.budget,
        given=overheads,
        options={} if arguments.planner is None else {"planner": arguments.planner},
    )
    comparison = compare(request, folder, jobs=jobs, progress=_progress)
    if not comparison.outcomes:
        raise InvalidFieldError("algorithms", arguments.algorithms, "; ".join(comparison.problems.values()))
    benchmark = request.source
    scale = ValueScale(Goal(benchmark.metric, benchmark.mode == "min"), benchmark.best_known, benchmark.worst_known)
    title = f"{benchmark.name}: {request.samples} trials, rehearsed on a virtual clock"
    if arguments.png:
        from fluid.reports.figures.rehearsal import save_rehearsal

        save_rehearsal(arguments.png, comparison.outcomes, title, label="algorithm", scale=scale, price=arguments.price)
    if arguments.record:
        content = {name: [each.as_json() for each in of_row] for name, of_row in comparison.outcomes.items()}
        with replacing(folder / "rehearsal.json") as draft:
            draft.write_text(json.dumps({"format": 1, "outcomes": content}, indent=1), encoding="utf-8")
    if arguments.json and write_json(comparison_json(request, comparison, scale, arguments.price), arguments.json):
        return
    console = make_console()
    compact = is_narrow(console) or (console.room < 130 and arguments.seeds > 1)
    table = rehearsal_table(
        comparison.outcomes, title, label="algorithm", scale=scale, price=arguments.price, compact=compact
    )
    console.print(table)
    for line in (_advice(comparison, scale), *_assumptions(request, comparison)):
        console.print(line, soft_wrap=True)
    speed = comparison.virtual_s / max(comparison.wall_s, 1e-9)
    took = f"{duration(comparison.virtual_s)} of sweeps rehearsed in {duration(comparison.wall_s)}, {number(speed)}x"
    console.print(f"{took}; run folders in {folder}", soft_wrap=True)
    for path in filter(None, (arguments.png, arguments.json)):
        console.print(f"wrote {path}", soft_wrap=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r{text} ", end="", file=sys.stderr, flush=True)


def _advice(comparison: Comparison, scale: ValueScale) -> str:
    """Which algorithm to take, with odds over seeds."""
    from fluid.integrations.comparing.compare import TARGET

    value = scale.within(TARGET)
    firsts, seeds = comparison.firsts(value), comparison.common_seeds
    most = max(firsts.values(), default=0.0)
    if not seeds:
        return "No seed was rehearsed with all of them, so that they cannot be compared."
    if most == 0.0:
        regrets = {
            name: median(scale.regret(each.best) for each in of_row if each.best is not None)
            for name, of_row in comparison.outcomes.items()
            if any(each.best is not None for each in of_row)
        }
        if not regrets:
            return f"No trial has reported a value of {scale.goal.metric}."
        least = min(regrets, key=lambda name: regrets[name])
        return f"None comes to {percent(TARGET)} regret; {least} comes nearest, to {percent(regrets[least])}."
    best = [name for name, share in firsts.items() if share == most]
    verb = "is" if len(best) == 1 else "are each"
    said = f"{' and '.join(best)} {verb} the first at {percent(TARGET)} regret"
    return f"{said}." if len(seeds) == 1 else f"{said} in {percent(most)} of {len(seeds)} seeds."


def _assumptions(request: ComparisonRequest, comparison: Comparison) -> list[str]:
    return [
        *(f"{name} was not rehearsed: {problem}" for name, problem in comparison.problems.items()),
        *request.source.describe(),
        f"overheads: {request.overheads.source}",
    ]


def comparison_json(
    request: ComparisonRequest, comparison: Comparison, scale: ValueScale, price: float | None
) -> dict[str, Any]:
    """The output of ``fluid rehearse --benchmark NAME --json``.

    * ``source``, ``assumptions``, ``price_per_device_hour``, ``virtual_s``, ``wall_s``: as of a script
    * ``metric``, ``mode``, and ``best_known`` and ``worst_known``, the values at which the regret is 0 and 1
    * ``first_at_target``: by algorithm, the share of the seeds in which it is first at a regret of 0.05; equal ones
      share it
    * ``problems``: why sweeps could not be played, by row, or by row and seed; ``rows``: one for each algorithm and
      number of devices
    """
    from fluid.integrations.comparing.compare import TARGET

    rows = figures_of(comparison.outcomes, scale=scale, price=price)
    return {
        "source": request.source.name,
        "assumptions": _assumptions(request, comparison),
        "metric": scale.goal.metric,
        "mode": request.source.mode,
        "best_known": scale.best,
        "worst_known": scale.worst,
        "price_per_device_hour": price,
        "first_at_target": comparison.firsts(scale.within(TARGET)),
        "virtual_s": comparison.virtual_s,
        "wall_s": comparison.wall_s,
        "problems": comparison.problems,
        "rows": [each.as_json() for each in rows],
    }
