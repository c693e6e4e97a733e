"""The command line: ``fluid plan``, ``simulate``, ``report``, ``why`` and ``doctor`` (see ``docs/cli.md``).

Each command imports what it needs when it runs, so that ``fluid --help`` is fast.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fluid._version import __version__
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError, require_integer

if TYPE_CHECKING:
    from rich.console import Console

    from fluid.report.run import RecordedRun
    from fluid.simulation.scenario import Scenario
    from fluid.simulation.simulate import SimulationResult

_PLANNERS = "fifo, static, dynamic or portfolio"
#: The width, in characters, from which tables have all their columns.
_ROOM_FOR_TABLES = 76
_LONGEST_ERROR = 600

EXIT_BROKEN_PIPE, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments without the program's name; those of the process if ``None``.

    Returns:
        The exit status: 0, 1 if the reader of the output closed it, 2 for bad input, 130 if interrupted.

    Raises:
        SystemExit: the arguments are invalid (status 2), or ask for help or the version (status 0).

    Example:
        >>> from fluid.cli import main
        >>> main(["plan", "examples/plan_toy.json", "--planner", "fifo", "--json"])
        {
          "planner": "fifo",
          "widths": {
            "a1": 1,
            "a2": 1,
            "a3": 1,
            "a4": 1
          },
          "makespan_s": 30.0,
          "lower_bound_s": 8.2
        }
        0
    """
    arguments = _parser().parse_args(argv)
    try:
        for option in ("plot", "png"):
            if path := getattr(arguments, option, None):
                from fluid.report.gantt import check_plot

                check_plot(path, option)
        arguments.command(arguments)
        sys.stdout.flush()
    except FluidError as error:
        print(f"fluid: error: {_one_line(str(error))}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # Prevents a second error when the interpreter flushes at exit. Under a test stdout may not be a real file.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


# --- The commands


def _plan(arguments: argparse.Namespace) -> None:
    from fluid.planners.by_name import make_planner
    from fluid.planning.instance import Instance
    from fluid.planning.planner import Plan

    planner = make_planner(arguments.planner)
    instance = Instance.from_json(_read(arguments.instance))
    plan = Plan(planner.name, instance, planner.arrange(instance))
    if arguments.plot:
        from fluid.report.gantt import GanttPanel, save_gantt

        save_gantt(arguments.plot, [GanttPanel.of_plan(plan)])
    if arguments.json:
        widths = {trial: round(w) if w >= 1.0 else w for trial, w in plan.widths.items()}
        _print_json(
            {
                "planner": plan.planner,
                "widths": widths,
                "makespan_s": plan.makespan,
                "lower_bound_s": plan.lower_bound,
            }
        )
        return
    from fluid.report.terminal import plan_summary, plan_table
    from fluid.report.text_gantt import TextGantt
    from fluid.report.timeline import Timeline

    fifo = Plan("fifo", instance, make_planner("fifo").arrange(instance))
    console = _console()
    console.print(plan_table(plan, compact=_is_narrow(console)))
    console.print(TextGantt(Timeline.of_plan(plan)))
    console.print()
    # The terminal wraps this line; in a file it stays one line.
    console.print(plan_summary(plan, fifo.makespan), soft_wrap=True)
    _print_plot(console, arguments.plot)


def _simulate(arguments: argparse.Namespace) -> None:
    from fluid.planners.by_name import PLANNERS, make_planner
    from fluid.simulation.scenario import Scenario

    # All arguments are checked before anything runs.
    planners = [make_planner(name).name for name in dict.fromkeys(arguments.planner or PLANNERS)]
    counts = _device_counts(arguments.devices) if arguments.devices is not None else None
    scenario = Scenario.from_json(_read(arguments.scenario))
    if arguments.seed is not None:
        scenario = scenario.with_seed(arguments.seed)
    if counts is None:
        _compare(scenario, planners, arguments)
    else:
        _sweep(scenario, planners, counts, arguments)


def _compare(scenario: Scenario, planners: list[str], arguments: argparse.Namespace) -> None:
    """Runs the planners on the scenario's own devices."""
    from fluid.report.comparison import as_json, comparison_table

    results = _run([(scenario, name) for name in planners], record=bool(arguments.plot))
    title = f"{scenario.name}: {results[0].trials} trials, {len(scenario.cluster)} devices, seed {scenario.seed}"
    if arguments.plot:
        from fluid.report.gantt import GanttPanel, save_gantt

        save_gantt(arguments.plot, [GanttPanel.of_result(result) for result in results], title)
    if arguments.json:
        _print_json({"scenario": scenario.name, "seed": scenario.seed, **as_json(results)})
        return
    known = [result for result in results if result.planner == "fifo"] or _run([(scenario, "fifo")])
    console = _console()
    console.print(comparison_table(results, known[0].makespan, title, compact=_is_narrow(console)))
    _print_plot(console, arguments.plot)


def _sweep(scenario: Scenario, planners: list[str], counts: list[int], arguments: argparse.Namespace) -> None:
    """Runs the planners on several numbers of devices."""
    from fluid.report.comparison import advice_text, advise, as_json, sweep_table

    results = _run([(scenario.with_devices(n), name) for n in counts for name in planners])
    title = f"{scenario.name}: {results[0].trials} trials, seed {scenario.seed}"
    advice = advise(results)
    if arguments.plot:
        from fluid.report.gantt import save_sweep

        save_sweep(arguments.plot, results, title)
    if arguments.json:
        _print_json({"scenario": scenario.name, "seed": scenario.seed, **as_json(results, advice)})
        return
    console = _console()
    console.print(sweep_table(results, title, compact=_is_narrow(console)))
    console.print(advice_text(advice))
    _print_plot(console, arguments.plot)


def _run(runs: list[tuple[Scenario, str]], *, record: bool = False) -> list[SimulationResult]:
    from fluid.planners.by_name import make_planner
    from fluid.report.terminal import track
    from fluid.simulation.simulate import simulate

    return [
        simulate(scenario, make_planner(name, c=scenario.c, d=scenario.d), record=record)
        for scenario, name in track(runs, lambda run: f"{run[1]} on {len(run[0].cluster)} devices")
    ]


def _report(arguments: argparse.Namespace) -> None:
    from fluid.report.loader import load_run
    from fluid.report.run_table import as_json, run_tables

    run = load_run(arguments.run)
    messages = _write_report(run, arguments)
    if arguments.json:
        _print_json(as_json(run))
        return
    console = _console()
    console.print(run_tables(run, compact=_is_narrow(console)))
    for line in messages:
        console.print(line, soft_wrap=True)


def _why(arguments: argparse.Namespace) -> None:
    from fluid.report.loader import load_run
    from fluid.report.why import as_json, find_trials, story_text

    run = load_run(arguments.run)
    trials = find_trials(run, arguments.trial)
    if arguments.json:
        _print_json(as_json(run, trials))
        return
    console = _console()
    for trial in trials:
        console.print(story_text(run, trial))


def _write_report(run: RecordedRun, arguments: argparse.Namespace) -> list[str]:
    """Writes the requested files, by default both into the run folder unless ``--json`` is given; returns messages."""
    html, png, messages = arguments.html, arguments.png, []
    why_not = _why_no_chart(run)
    if png and why_not:
        raise InvalidFieldError("png", png, why_not)
    if not (html or png or arguments.json):
        html = str(run.path / "report.html")
        png = None if why_not else str(run.path / "timeline.png")
        messages += [f"did not draw timeline.png: {why_not}"] if why_not else []
    if html:
        from fluid.report.html import save_html

        save_html(html, run)
    if png:
        from fluid.display.format import count
        from fluid.report.gantt import GanttPanel, save_gantt

        panel = GanttPanel(
            str(run.session.get("planner", "run")), run.timeline, count(run.resizes, "resize") if run.resizes else ""
        )
        save_gantt(png, [panel], run.name, field="png")
    return [f"wrote {path}" for path in (html, png) if path] + messages


def _why_no_chart(run: RecordedRun) -> str:
    """Why ``timeline.png`` cannot be drawn; empty if it can."""
    from fluid.report.gantt import check_plot

    try:
        check_plot(run.path / "timeline.png")
    except MissingDependencyError as error:
        return str(error)
    return "" if run.timeline.segments else "no iteration has finished yet"


def _doctor(arguments: argparse.Namespace) -> None:
    from fluid.report.doctor import advise, examine
    from fluid.report.doctor_report import as_json, machine_report

    machine = examine()
    advice = advise(machine)
    if arguments.json:
        _print_json(as_json(machine, advice))
    else:
        _console().print(machine_report(machine, advice))


# --- In and out


def _read(path: str) -> dict[str, Any]:
    """Reads a JSON object from a file, or from stdin if the path is ``-``."""
    from fluid.planning.json_input import read_json_object

    if path != "-":
        return read_json_object(path)
    try:
        data = json.loads(sys.stdin.read())
    except ValueError as error:
        raise InvalidFieldError("stdin", path, f"is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidFieldError("stdin", path, "must hold one JSON object")
    return data


def _device_counts(text: str) -> list[int]:
    """Parses ``1,2,4,8``; returns distinct numbers in ascending order."""
    try:
        return sorted({require_integer("devices", int(part), at_least=1) for part in text.split(",")})
    except ValueError as error:
        raise InvalidFieldError("devices", text, "must be numbers of devices such as 1,2,4,8") from error


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def _console() -> Console:
    from rich.console import Console

    # The user chose the ids and names, so brackets and colons in them are not markup.
    return Console(markup=False, emoji=False, highlight=False)


def _is_narrow(console: Console) -> bool:
    return console.width < _ROOM_FOR_TABLES


def _print_plot(console: Console, path: str | None) -> None:
    if path:
        console.print(f"wrote {path}", soft_wrap=True)


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    # The field is at the beginning and the reason at the end; the value between them may be long.
    half = _LONGEST_ERROR // 2
    return line if len(line) <= _LONGEST_ERROR else f"{line[:half]} ... {line[-half:]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fluid", description="A hyperparameter tuning execution engine.")
    parser.add_argument("--version", action="version", version=f"fluid {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    plan = commands.add_parser("plan", help="plan the trials of one TrialGroup, without running them")
    plan.add_argument("instance", metavar="INSTANCE", help="JSON file with devices and trials; - for stdin")
    plan.add_argument("--planner", default="portfolio", help=f"{_PLANNERS} (default: portfolio)")
    plan.set_defaults(command=_plan)

    simulate = commands.add_parser("simulate", help="compare planners on a simulated workload")
    simulate.add_argument("scenario", metavar="SCENARIO", help="JSON file with devices and workload; - for stdin")
    simulate.add_argument("--planner", action="append", help=f"{_PLANNERS}; repeatable (default: all)")
    simulate.add_argument("--devices", metavar="N,N,...", help="compare these numbers of devices, such as 1,2,4,8")
    simulate.add_argument("--seed", type=int, help="random seed; replaces the scenario's")
    simulate.set_defaults(command=_simulate)

    report = commands.add_parser("report", help="report on a run: tables, an HTML page and a Gantt chart")
    report.add_argument("run", metavar="RUN", help="the run folder of a session")
    report.add_argument("--html", metavar="FILE", help="write the page to this file (default: RUN/report.html)")
    report.add_argument("--png", metavar="FILE", help="draw the chart to this file (default: RUN/timeline.png)")
    report.set_defaults(command=_report)

    why = commands.add_parser("why", help="tell what happened to one trial of a run, and why")
    why.add_argument("run", metavar="RUN", help="the run folder of a session")
    why.add_argument("trial", metavar="TRIAL", help="a trial, by its id or by the name in reports")
    why.set_defaults(command=_why)

    doctor = commands.add_parser("doctor", help="examine this machine and show what Fluid would use")
    doctor.set_defaults(command=_doctor)

    for command in (plan, simulate, report, why, doctor):
        command.add_argument("--json", action="store_true", help="print only JSON on stdout")
    for command in (plan, simulate):
        command.add_argument("--plot", metavar="FILE", help="also draw a chart to this file, such as out.png")
    return parser


if __name__ == "__main__":
    sys.exit(main())
