"""``fluid simulate --deadline`` and ``--budget``: what goals cost on fixed numbers of devices, and on sized ones."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fluid.commands.inout import is_narrow, make_console, print_json
from fluid.errors import InvalidFieldError, parse_duration, require_integer, require_number

if TYPE_CHECKING:
    from fluid.forecasting.scenario import Scenario

#: Arguments that mean something only beside a deadline or a budget.
_BESIDE = ("price", "spot", "preempt_every", "provision", "seeds", "unmeasured")
_SEEDS = 10
_PREEMPT_EVERY = "4h"


def add_goals(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of deadlines and budgets to ``fluid simulate``."""
    parser.add_argument("--deadline", metavar="TIME", help="size the devices for an end by then, such as 2h or 1h30m")
    parser.add_argument("--budget", type=float, metavar="USD", help="size the devices for this cost at most")
    parser.add_argument("--price", type=float, metavar="USD", help="US dollars for a device-hour")
    parser.add_argument(
        "--spot", type=float, metavar="SHARE", help="also on preemptible devices, at this share of the price"
    )
    parser.add_argument(
        "--preempt-every",
        metavar="TIME",
        help=f"mean time until a preemptible device is taken back (default: {_PREEMPT_EVERY})",
    )
    parser.add_argument("--provision", metavar="TIME", help="until a device that is asked for comes (default: 60s)")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"runs, with a seed each (default: {_SEEDS})")
    parser.add_argument(
        "--unmeasured", action="store_true", default=None, help="no runtime is known before trials have run"
    )


def has_goals(arguments: argparse.Namespace) -> bool:
    """Whether ``fluid simulate`` is to size the devices.

    Raises:
        InvalidFieldError: an argument is given that needs a deadline or a budget, and there is neither.
    """
    if arguments.deadline is not None or arguments.budget is not None:
        return True
    for name in _BESIDE:
        if getattr(arguments, name) is not None:
            raise InvalidFieldError(name, getattr(arguments, name), "needs --deadline or --budget")
    return False


def simulate_goals(
    scenario: Scenario, planners: list[str] | None, counts: list[int] | None, arguments: argparse.Namespace
) -> None:
    """Runs the comparison and prints it.

    Args:
        scenario: what to run.
        planners: as given; at most one.
        counts: fixed numbers of devices, the largest of which is the most that can be had; ``None`` for powers of 2 up
            to the scenario's number of devices.
        arguments: of the command line.
    """
    from fluid.planners.portfolio import make_planner
    from fluid.reports.tables.comparison import unit_name
    from fluid.reports.tables.size import held_line, size_table, size_text, sizes_as_json
    from fluid.reports.tables.terminal import track
    from fluid.simulation.size_comparison import compare_sizes
    from fluid.simulation.sized import Terms
    from fluid.sizing.goals import Goals

    if planners is not None and len(planners) > 1:
        raise InvalidFieldError("planner", ", ".join(planners), "must be one planner with a deadline or a budget")
    planner = planners[0] if planners else "portfolio"
    goals = Goals(arguments.deadline, budget_usd=arguments.budget, price_per_device_hour=arguments.price)
    if arguments.spot is not None and not 0.0 < require_number("spot", arguments.spot, at_least=0.0) <= 1.0:
        raise InvalidFieldError("spot", arguments.spot, "must be above 0 and at most 1, a share of the price")
    if arguments.spot is not None and arguments.price is None:
        raise InvalidFieldError("spot", arguments.spot, "needs --price, as it is a share of that")
    if arguments.preempt_every is not None and arguments.spot is None:
        raise InvalidFieldError("preempt_every", arguments.preempt_every, "needs --spot")
    if scenario.fused is not None:
        raise InvalidFieldError("fused", scenario.fused.stretches, "cannot be combined with a deadline or a budget")
    seeds = require_integer("seeds", _SEEDS if arguments.seeds is None else arguments.seeds, at_least=1, at_most=10_000)
    if counts is None:
        most = len(scenario.cluster)
        counts = sorted({most, *(2**power for power in range(most.bit_length()))})
    every = _PREEMPT_EVERY if arguments.preempt_every is None else arguments.preempt_every
    terms = Terms(
        most=counts[-1],
        provision_s=60.0 if arguments.provision is None else parse_duration("provision", arguments.provision),
        preempt_every_s=None if arguments.spot is None else parse_duration("preempt_every", every),
        profiled=not arguments.unmeasured,
    )
    comparison = compare_sizes(
        scenario,
        lambda: make_planner(planner, c=scenario.c, d=scenario.d),
        goals,
        terms,
        counts,
        seeds=seeds,
        spot=arguments.spot,
        track=lambda runs: track(runs, lambda run: f"{run[0]}, seed {run[1]}"),
    )
    if arguments.plot:
        from fluid.reports.figures.held import save_held

        runs = {"preemptible" if row.preemptible else "sized": row.runs[0] for row in comparison.sized}
        save_held(arguments.plot, runs, f"{scenario.name}, seed {scenario.seed}", goals.deadline_s)
    if arguments.json:
        about = {"scenario": scenario.name, "seed": scenario.seed, "seeds": seeds, "planner": planner}
        print_json({**about, **sizes_as_json(comparison)})
        return
    unit = unit_name([comparison.fixed[0].runs[0].simulation])
    last = scenario.seed + seeds - 1
    which = f"seed {scenario.seed}" if seeds == 1 else f"seeds {scenario.seed} to {last}"
    title = f"{scenario.name}: {comparison.fixed[0].runs[0].simulation.trials} trials, {which}, planner {planner}"
    console = make_console()
    console.print(size_table(comparison, title, unit, compact=is_narrow(console)))
    console.print(size_text(comparison, unit, terms.most))
    console.print(held_line(comparison.sized[0].runs[0], unit, scenario.seed))
    if arguments.plot:
        console.print(f"wrote {arguments.plot}", soft_wrap=True)
