"""What a look at a session costs, against how many trials and groups have ended: milliseconds of the session's thread.

The live view looks eight times a second, Prometheus at each scrape, ``repr(handle)`` at each prompt. Trials are
stopped in the engine itself, before they start, as there is no device. One further group waits.

    python benchmarks/status.py [--groups 250 500 1000 2000] [--trials 50] [--looks 20]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from io import StringIO

from rich.console import Console

from fluid import FluidExecutor, TrialGroup
from fluid._clock import thread_seconds
from fluid.display.dashboard import render
from fluid.display.follow import StatusFollower
from fluid.engine.events import PLAIN_TERMS, GroupSubmitted, StopRequested, TrialSpec
from fluid.session.inbox import GroupInbox
from fluid.session.session import Session
from fluid.session.status import Status


def add_group(session: Session, name: str, trials: int, *, ends: bool) -> None:
    """Adds a group whose trials have all ended, or all wait, in the session's thread."""
    session._pump.inboxes[name] = GroupInbox(name, TrialGroup(name=name))
    specs = tuple(TrialSpec(f"{name}: {index}", 10) for index in range(trials))
    session._state.handle(GroupSubmitted(0.0, name, specs, PLAIN_TERMS))
    if ends:
        session._state.handle(*(StopRequested(0.0, spec.trial_id) for spec in specs))


def cost(session: Session, looks: int, look: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the first look in the session's thread, and of the others, their median."""

    def timed() -> float:
        began = thread_seconds()
        look()
        return 1000.0 * (thread_seconds() - began)

    first = session._in_thread(timed)
    return first, statistics.median(session._in_thread(timed) for _ in range(looks))


def draw(status: Status, follower: StatusFollower) -> None:
    """Draws the live view as a terminal of 120 columns and 40 lines has it."""
    follower.take(status)
    board = render(status, 120, 40, follower.numbers, shares=follower.shares(), ends=follower.ends())
    Console(file=StringIO(), force_terminal=True, width=120, height=40).print(board)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, nargs="+", default=[250, 500, 1000, 2000])
    parser.add_argument("--trials", type=int, default=50, help="in each group (default: %(default)s)")
    parser.add_argument("--looks", type=int, default=20, help="at each number (default: %(default)s)")
    arguments = parser.parse_args()
    titles = ("groups", "ended trials", "status, first", "status", "repr(handle)", "drawing")
    print("milliseconds\n" + "  ".join(f"{title:>13}" for title in titles))
    with (
        tempfile.TemporaryDirectory() as place,
        FluidExecutor("local", devices=1, run_dir=place, verbose=0) as executor,
    ):
        session, follower, there = executor._session, StatusFollower(), 0
        executor.remove_device(0)
        session._in_thread(partial(add_group, session, "waits", 8, ends=False))
        for groups in arguments.groups:
            for number in range(there, groups):
                session._in_thread(partial(add_group, session, f"ended {number}", arguments.trials, ends=True))
            there = groups
            first, status = cost(session, arguments.looks, session._status)
            _, handle = cost(session, arguments.looks, lambda: session.group_status("waits"))

            _, both = cost(session, arguments.looks, lambda: draw(session._status(), follower))
            figures = (first, status, handle, max(0.0, both - status))
            print(f"{groups:>13,}  {groups * arguments.trials:>13,}  " + "  ".join(f"{ms:>13.2f}" for ms in figures))


if __name__ == "__main__":
    main()
