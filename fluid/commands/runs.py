"""``fluid runs``, and the run that commands show which are given none."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fluid.commands.inout import Subparsers, add_json, make_console, print_json
from fluid.errors import InvalidFieldError, require_integer, require_one_of

#: Runs that are shown by default.
_LIMIT = 50


def add_runs(commands: Subparsers) -> None:
    """Adds ``fluid runs``."""
    runs = commands.add_parser("runs", help="list all runs: state, best value, trials, when, and size")
    runs.add_argument("dir", metavar="DIR", nargs="?", help="the folder with the runs (default: ~/fluid_runs)")
    runs.add_argument("--state", metavar="STATE", help="only runs in this state, such as running, done or interrupted")
    runs.add_argument("--name", metavar="TEXT", help="only runs with this text in the folder's or the sweep's name")
    text = f"show the newest N, 0 for all (default: {_LIMIT}; with --json, all)"
    runs.add_argument("--limit", type=int, metavar="N", help=text)
    add_json(runs)
    runs.set_defaults(command=_runs)


def newest() -> Path:
    """The newest run in the default folder, which stderr names: for commands that are given no RUN.

    Raises:
        InvalidFieldError: there is none.
    """
    from fluid.results.run_files import runs_home
    from fluid.results.runs import newest_run

    found = newest_run(runs_home())
    print(f"the newest run: {found}", file=sys.stderr)
    return found


def _runs(arguments: argparse.Namespace) -> None:
    from fluid.reports.tables.runs import as_json, name_of, runs_table
    from fluid.results.run_files import runs_home
    from fluid.results.runs import STATES, FoundRuns, find_runs, newest_first, size_on_disk, summarize

    if arguments.state is not None:
        require_one_of("state", arguments.state, STATES)
    limit = 0 if arguments.json else _LIMIT
    if arguments.limit is not None:
        limit = require_integer("limit", arguments.limit, at_least=0)
    home = runs_home() if arguments.dir is None else Path(arguments.dir).expanduser()
    try:
        found = find_runs(home)
    except InvalidFieldError:
        if arguments.dir is not None or home.exists():
            raise
        found = FoundRuns((), ())  # No session has made it yet.
    runs = newest_first(map(summarize, found.runs))
    if arguments.state is not None:
        runs = [run for run in runs if run.state == arguments.state]
    if arguments.name is not None:
        text = arguments.name.casefold()
        runs = [run for run in runs if text in name_of(run, home).casefold() or text in run.name.casefold()]
    shown = runs[:limit] if limit else runs
    if arguments.json:
        print_json(as_json(shown, home, size_on_disk, found.others))
        return
    console = make_console()
    left = len(runs) - len(shown)
    console.print(runs_table(shown, home, size_on_disk, width=console.width, left_out=left, others=found.others))
