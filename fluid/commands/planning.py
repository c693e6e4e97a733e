"""``fluid plan`` and ``fluid simulate``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fluid.commands.inout import Subparsers, add_json, is_narrow, make_console, print_json, read_object
from fluid.commands.sizing import add_goals, has_goals, simulate_goals
from fluid.errors import InvalidFieldError, require_integer

if TYPE_CHECKING:
    from rich.console import Console

    from fluid.forecasting.scenario import Scenario
    from fluid.planners.planner import Plan
    from fluid.simulation.simulation_result import SimulationResult

_PLANNERS = "fifo, static, dynamic or portfolio"


def add_plan(commands: Subparsers) -> None:
    """Adds ``fluid plan``."""
    plan = commands.add_parser("plan", help="plan the trials of one TrialGroup, without running them")
    plan.add_argument("instance", metavar="INSTANCE", help="JSON file with devices and trials; - for stdin")
    plan.add_argument("--planner", default="portfolio", help=f"{_PLANNERS} (default: portfolio)")
    plan.add_argument("--profile", metavar="FILE", help="what a session measured, such as RUN/profile.json")
    add_json(plan)
    _add_plot(plan)
    plan.set_defaults(command=_plan)


def add_simulate(commands: Subparsers) -> None:
    """Adds ``fluid simulate``."""
    simulate = commands.add_parser("simulate", help="compare planners on a simulated workload")
    simulate.add_argument("scenario", metavar="SCENARIO", help="JSON file with devices and workload; - for stdin")
    simulate.add_argument("--planner", action="append", help=f"{_PLANNERS}; repeatable (default: all)")
    simulate.add_argument("--devices", metavar="N,N,...", help="compare these numbers of devices, such as 1,2,4,8")
    simulate.add_argument("--seed", type=int, help="random seed; replaces the scenario's")
    simulate.add_argument(
        "--group-policy",
        action="append",
        metavar="P",
        help="irs, srsf or fifo, for several workloads; repeatable (default: all)",
    )
    add_goals(simulate)
    add_json(simulate)
    _add_plot(simulate)
    simulate.set_defaults(command=_simulate)


def _plan(arguments: argparse.Namespace) -> None:
    from fluid.measure.profile import Profile
    from fluid.planners.instance import Instance
    from fluid.planners.planner import Plan
    from fluid.planners.portfolio import make_planner

    _check_plot(arguments)
    planner = make_planner(arguments.planner)
    try:
        profile = Profile.load(arguments.profile) if arguments.profile else None
    except OSError as error:
        raise InvalidFieldError("profile", arguments.profile, f"cannot be read: {error.strerror}") from error
    instance = Instance.from_json(read_object(arguments.instance), profile)
    plan = Plan(planner.name, instance, planner.arrange(instance))
    if arguments.plot:
        from fluid.reports.figures.gantt import GanttPanel, save_gantt

        save_gantt(arguments.plot, [GanttPanel.of_plan(plan)])
    if arguments.json:
        print_json(plan_json(plan))
        return
    from fluid.reports.figures.text_gantt import TextGantt
    from fluid.reports.run.timeline import Timeline
    from fluid.reports.tables.terminal import plan_summary, plan_table

    fifo = Plan("fifo", instance, make_planner("fifo").arrange(instance))
    console = make_console()
    console.print(plan_table(plan, compact=is_narrow(console)))
    console.print(TextGantt(Timeline.of_plan(plan)), width=console.room)
    console.print()
    # The terminal wraps this line; in a file it stays one line.
    console.print(plan_summary(plan, fifo.makespan), soft_wrap=True)
    _print_plot(console, arguments.plot)


def plan_json(plan: Plan) -> dict[str, Any]:
    """The output of ``fluid plan --json``.

    * ``planner``: the planner that made the plan
    * ``widths``: of each trial, by its id, the number of devices, or the share of one, when it starts
    * ``makespan_s``: predicted seconds from the first start to the last finish, resizes included
    * ``lower_bound_s``: seconds that no schedule can beat, even if resizes were free
    """
    return {
        "planner": plan.planner,
        "widths": {trial: round(w) if w >= 1.0 else w for trial, w in plan.widths.items()},
        "makespan_s": plan.makespan,
        "lower_bound_s": plan.lower_bound,
    }


def _simulate(arguments: argparse.Namespace) -> None:
    from fluid.forecasting.scenario import Scenario
    from fluid.planners.portfolio import PLANNERS, make_planner

    # All arguments are checked before anything runs.
    _check_plot(arguments)
    planners = [make_planner(name).name for name in dict.fromkeys(arguments.planner or PLANNERS)]
    counts = _device_counts(arguments.devices) if arguments.devices is not None else None
    scenario = Scenario.from_json(read_object(arguments.scenario))
    if arguments.seed is not None:
        scenario = scenario.with_seed(arguments.seed)
    if scenario.workloads:
        _compare_policies(scenario, planners if arguments.planner else ["portfolio"], arguments)
        return
    if arguments.group_policy is not None:
        raise InvalidFieldError("group_policy", ", ".join(arguments.group_policy), "needs a scenario with workloads")
    if has_goals(arguments):
        simulate_goals(scenario, planners if arguments.planner else None, counts, arguments)
    elif counts is None:
        _compare(scenario, planners, arguments)
    else:
        _sweep(scenario, planners, counts, arguments)


def _compare(scenario: Scenario, planners: list[str], arguments: argparse.Namespace) -> None:
    """Runs the planners on the scenario's own devices."""
    from fluid.reports.tables.comparison import as_json, comparison_table

    results = _run([(scenario, name) for name in planners], record=bool(arguments.plot))
    title = f"{scenario.name}: {results[0].trials} trials, {len(scenario.cluster)} devices, seed {scenario.seed}"
    if arguments.plot:
        from fluid.reports.figures.gantt import GanttPanel, save_gantt

        save_gantt(arguments.plot, [GanttPanel.of_result(result) for result in results], title)
    if arguments.json:
        print_json({"scenario": scenario.name, "seed": scenario.seed, **as_json(results)})
        return
    known = [result for result in results if result.planner == "fifo"] or _run([(scenario, "fifo")])
    console = make_console()
    console.print(comparison_table(results, known[0].makespan, title, compact=is_narrow(console)))
    _print_plot(console, arguments.plot)


def _compare_policies(scenario: Scenario, planners: list[str], arguments: argparse.Namespace) -> None:
    """Runs several workloads under each of the group policies."""
    from fluid.policies.owners.shares import GROUP_POLICIES
    from fluid.reports.tables.comparison import policies_as_json, policy_tables

    for name in ("devices", "deadline", "budget"):
        if getattr(arguments, name) is not None:
            raise InvalidFieldError(name, getattr(arguments, name), "needs a scenario with one workload")
    has_goals(arguments)
    scenarios = [
        scenario.with_group_policy(policy) for policy in dict.fromkeys(arguments.group_policy or GROUP_POLICIES)
    ]
    results = _run([(each, name) for name in planners for each in scenarios], record=bool(arguments.plot))
    counts = f"{len(scenario.workloads)} workloads, {results[0].trials} trials, {len(scenario.cluster)} devices"
    title = f"{scenario.name}: {counts}, seed {scenario.seed}"
    if arguments.plot:
        from fluid.reports.figures.gantt import GanttPanel, save_gantt

        save_gantt(arguments.plot, [GanttPanel.of_result(result) for result in results], title)
    if arguments.json:
        print_json({"scenario": scenario.name, "seed": scenario.seed, **policies_as_json(results)})
        return
    console = make_console()
    console.print(policy_tables(results, title))
    _print_plot(console, arguments.plot)


def _sweep(scenario: Scenario, planners: list[str], counts: list[int], arguments: argparse.Namespace) -> None:
    """Runs the planners on several numbers of devices."""
    from fluid.reports.tables.comparison import advice_text, advise, as_json, sweep_table

    results = _run([(scenario.with_devices(n), name) for n in counts for name in planners])
    title = f"{scenario.name}: {results[0].trials} trials, seed {scenario.seed}"
    advice = advise(results)
    if arguments.plot:
        from fluid.reports.figures.gantt import save_sweep

        save_sweep(arguments.plot, results, title)
    if arguments.json:
        print_json({"scenario": scenario.name, "seed": scenario.seed, **as_json(results, advice)})
        return
    console = make_console()
    console.print(sweep_table(results, title, compact=is_narrow(console)))
    console.print(advice_text(advice))
    _print_plot(console, arguments.plot)


def _run(runs: list[tuple[Scenario, str]], *, record: bool = False) -> list[SimulationResult]:
    from fluid.planners.portfolio import make_planner
    from fluid.reports.tables.terminal import track
    from fluid.simulation.simulate import simulate

    return [
        simulate(scenario, make_planner(name, c=scenario.c, d=scenario.d), record=record)
        for scenario, name in track(runs, lambda run: f"{run[1]} on {len(run[0].cluster)} devices")
    ]


def _device_counts(text: str) -> list[int]:
    """Parses ``1,2,4,8``; returns distinct numbers in ascending order."""
    from fluid.forecasting.scenario import MOST_SIMULATED

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidFieldError("devices", text, "must be numbers of devices such as 1,2,4,8") from error
    return sorted({require_integer("devices", count, at_least=1, at_most=MOST_SIMULATED) for count in counts})


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE", help="also draw a chart to this file, such as out.png")


def _check_plot(arguments: argparse.Namespace) -> None:
    if arguments.plot:
        from fluid.reports.figures.gantt import check_plot

        check_plot(arguments.plot, "plot")


def _print_plot(console: Console, path: str | None) -> None:
    if path:
        console.print(f"wrote {path}", soft_wrap=True)
