"""``fluid report`` and ``fluid why``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fluid.commands.inout import Subparsers, add_json, add_price, make_console, print_json
from fluid.commands.runs import newest
from fluid.errors import InvalidFieldError, MissingDependencyError

if TYPE_CHECKING:
    from fluid.reports.analysis.importance import Importances
    from fluid.reports.run.run import RecordedRun
    from fluid.results.metrics import Goal

#: The name of stdout where a file is named.
STDOUT = "-"


def add_report(commands: Subparsers) -> None:
    """Adds ``fluid report``."""
    report = commands.add_parser("report", help="report on a run, or compare several: tables, a page and a Gantt chart")
    help_text = "the run folder of a session; several are compared (default: the newest run)"
    report.add_argument("runs", metavar="RUN", nargs="*", help=help_text)
    report.add_argument("--metric", metavar="NAME", help="judge trials by this metric (default: the search's)")
    report.add_argument("--mode", metavar="MODE", help="min or max (default: the search's, else what the name says)")
    report.add_argument("--columns", metavar="NAME,NAME,...", help="columns of the table of trials, such as lr,loss")
    report.add_argument("--html", metavar="FILE", help="write the page to this file (default: RUN/report.html)")
    report.add_argument("--png", metavar="FILE", help="draw the chart to this file (default: RUN/timeline.png)")
    add_price(report)
    add_json(report)
    report.set_defaults(command=_report)


def add_why(commands: Subparsers) -> None:
    """Adds ``fluid why``."""
    why = commands.add_parser("why", help="tell what happened to one trial of a run, and why")
    why.add_argument("run", metavar="RUN", nargs="?", help="the run folder of a session (default: the newest run)")
    why.add_argument("trial", metavar="TRIAL", help="a trial, by its id or by the name in reports")
    add_json(why)
    why.set_defaults(command=_why)


def _report(arguments: argparse.Namespace) -> None:
    from fluid.reports.analysis.importance import importances
    from fluid.reports.run.loader import load_run
    from fluid.reports.tables.ranking import goal_of
    from fluid.reports.tables.run import as_json, run_tables

    _check(arguments)
    columns = None if arguments.columns is None else arguments.columns.split(",")
    if len(arguments.runs) > 1:
        _compare(arguments)
        return
    run = load_run(arguments.runs[0] if arguments.runs else newest(), arguments.price)
    goal = goal_of(run, arguments.metric, arguments.mode)
    found = None if goal is None else importances(run.trials, goal)
    console = make_console()
    tables = run_tables(run, goal=goal, importances=found, width=console.room, columns=columns)
    messages = _write(run, goal, found, arguments)
    if arguments.json:
        print_json(as_json(run, goal, found))
    elif arguments.html != STDOUT:
        console.print(tables, crop=False)  # A path that is cut cannot be copied.
        for line in messages:
            console.print(line, soft_wrap=True)


def _check(arguments: argparse.Namespace) -> None:
    """Refuses options that contradict one another, before anything is read or written."""
    if arguments.html == STDOUT and arguments.json:
        raise InvalidFieldError("html", STDOUT, "the page and --json cannot both go to stdout; name a file")
    if arguments.json and arguments.columns is not None:
        raise InvalidFieldError("columns", arguments.columns, "does not apply to --json, which has everything")
    if arguments.png:
        from fluid.reports.figures.gantt import check_plot

        if len(arguments.runs) > 1:
            raise InvalidFieldError("png", arguments.png, "shows one run; give one RUN")
        check_plot(arguments.png, "png")


def _compare(arguments: argparse.Namespace) -> None:
    from fluid.reports.run.loader import load_run
    from fluid.reports.tables.run_comparison import as_json, compare, comparison_tables

    if arguments.columns is not None:
        raise InvalidFieldError("columns", arguments.columns, "applies to the trials of one run; give one RUN")
    runs = [load_run(path, arguments.price) for path in arguments.runs]
    comparison = compare(runs, arguments.metric, arguments.mode)
    if arguments.html:
        _write_page(arguments.html, runs, comparison.goal)
    if arguments.json:
        print_json(as_json(comparison))
    elif arguments.html != STDOUT:
        console = make_console()
        console.print(comparison_tables(comparison, width=console.room))
        if arguments.html:
            console.print(f"wrote {arguments.html}", soft_wrap=True)


def _why(arguments: argparse.Namespace) -> None:
    from fluid.reports.run.loader import load_run
    from fluid.reports.tables.why import as_json, find_trials, story_text
    from fluid.results.run_files import is_used

    if arguments.run is None and is_used(Path(arguments.trial).expanduser()):
        reason = "is a run folder: name one of its trials, too, as in fluid why RUN TRIAL; fluid report RUN lists them"
        raise InvalidFieldError("trial", arguments.trial, reason)
    run = load_run(newest() if arguments.run is None else arguments.run)
    trials = find_trials(run, arguments.trial)
    if arguments.json:
        print_json(as_json(run, trials))
        return
    console = make_console()
    for trial in trials:
        console.print(story_text(run, trial))


def _write_page(path: str, runs: Sequence[RecordedRun], goal: Goal | None, found: Importances | None = None) -> None:
    """Writes the page of some runs, with their importances, of which those ``found`` are known already."""
    from fluid.reports.analysis.importance import by_metric
    from fluid.reports.page.html import html_page, save_html

    importances = [by_metric(run, found) for run in runs]
    if path == STDOUT:
        sys.stdout.write(html_page(runs, goal=goal, importances=importances))
    else:
        save_html(path, runs, goal=goal, importances=importances)


def _write(run: RecordedRun, goal: Goal | None, found: Importances | None, arguments: argparse.Namespace) -> list[str]:
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
        _write_page(html, [run], goal, found)
    if png:
        from fluid.display.format import count
        from fluid.reports.figures.gantt import GanttPanel, save_gantt

        panel = GanttPanel(
            str(run.session.get("planner", "run")), run.timeline, count(run.resizes, "resize") if run.resizes else ""
        )
        save_gantt(png, [panel], run.name, field="png")
    return [f"wrote {path}" for path in (html, png) if path and path != STDOUT] + messages


def _why_no_chart(run: RecordedRun) -> str:
    """Why ``timeline.png`` cannot be drawn; empty if it can."""
    from fluid.reports.figures.gantt import check_plot

    try:
        check_plot(run.path / "timeline.png")
    except MissingDependencyError as error:
        return str(error)
    return "" if run.timeline.segments else "no iteration has finished yet"
