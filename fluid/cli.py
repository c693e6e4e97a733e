"""The command line: ``fluid run``, ``report``, ``view`` and so on (see ``docs/cli.md``; of ``plan`` and ``simulate``,
``docs/extending.md``).

:mod:`fluid.commands` has a module for each command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from fluid._version import __version__
from fluid.commands.doctor import add_doctor
from fluid.commands.export import add_export
from fluid.commands.planning import add_plan, add_simulate
from fluid.commands.rehearse import add_rehearse, split_arguments
from fluid.commands.report import add_report, add_why
from fluid.commands.run import add_run
from fluid.commands.runs import add_runs
from fluid.commands.view import add_view
from fluid.errors import FluidError

_LONGEST_ERROR = 600

EXIT_BROKEN_PIPE, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments without the program's name; those of the process if ``None``.

    Returns:
        The exit status: 0, 1 if the reader of the output closed it, all trials of ``fluid run`` failed or ``fluid
        doctor --shared`` found a folder that drivers cannot share, 2 for bad input, 130 if interrupted.

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
    given, after = split_arguments(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(given)
    arguments.after = after
    try:
        status = arguments.command(arguments)
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
    return status or 0


def _one_line(message: str) -> str:
    line = " ".join(message.split())
    # The field is at the beginning and the reason at the end; the value between them may be long.
    half = _LONGEST_ERROR // 2
    return line if len(line) <= _LONGEST_ERROR else f"{line[:half]} ... {line[-half:]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fluid", description="A hyperparameter tuning execution engine.")
    parser.add_argument("--version", action="version", version=f"fluid {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    adders = (add_run, add_plan, add_simulate, add_rehearse, add_runs, add_report, add_view, add_why, add_export)
    for add in (*adders, add_doctor):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
