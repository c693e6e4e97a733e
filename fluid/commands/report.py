"""``fluid report`` and ``fluid why``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fluid.commands.inout import Subparsers, add_json, is_narrow, make_console, print_json
from fluid.errors import InvalidFieldError, MissingDependencyError

if TYPE_CHECKING:
    from fluid.report.run import RecordedRun


def add_report(commands: Subparsers) -> None:
    """Adds ``fluid report``."""
    report = commands.add_parser("report", help="report on a run: tables, an HTML page and a Gantt chart")
    report.add_argument("run", metavar="RUN", help="the run folder of a session")
    report.add_argument("--html", metavar="FILE", help="write the page to this file (default: RUN/report.html)")
    report.add_argument("--png", metavar="FILE", help="draw the chart to this file (default: RUN/timeline.png)")
    add_json(report)
    report.set_defaults(command=_report)


def add_why(commands: Subparsers) -> None:
    """Adds ``fluid why``."""
    why = commands.add_parser("why", help="tell what happened to one trial of a run, and why")
    why.add_argument("run", metavar="RUN", help="the run folder of a session")
    why.add_argument("trial", metavar="TRIAL", help="a trial, by its id or by the name in reports")
    add_json(why)
    why.set_defaults(command=_why)


def _report(arguments: argparse.Namespace) -> None:
    from fluid.report.loader import load_run
    from fluid.report.run_table import as_json, run_tables

    if arguments.png:
        from fluid.report.gantt import check_plot

        check_plot(arguments.png, "png")
    run = load_run(arguments.run)
    messages = _write(run, arguments)
    if arguments.json:
        print_json(as_json(run))
        return
    console = make_console()
    console.print(run_tables(run, compact=is_narrow(console)))
    for line in messages:
        console.print(line, soft_wrap=True)


def _why(arguments: argparse.Namespace) -> None:
    from fluid.report.loader import load_run
    from fluid.report.why import as_json, find_trials, story_text

    run = load_run(arguments.run)
    trials = find_trials(run, arguments.trial)
    if arguments.json:
        print_json(as_json(run, trials))
        return
    console = make_console()
    for trial in trials:
        console.print(story_text(run, trial))


def _write(run: RecordedRun, arguments: argparse.Namespace) -> list[str]:
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

        save_html(html, [run])
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
