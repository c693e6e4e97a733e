"""Writes what the engine decides in random sessions, as one digest per session: to show that a change alters no plan.

    python scripts/command_streams.py 2000 --out after.txt [--seed S] [--steps N] [--several-owners]
    git worktree add ../before COMMIT; cp scripts/command_streams.py ../before/scripts/
    python ../before/scripts/command_streams.py 2000 --out before.txt
    diff before.txt after.txt

A digest is of all commands of a session of ``fluid.testing.random_sessions``, in order. All groups have one owner, so
that nothing is shared out between owners, unless ``--several-owners`` is given.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def prepare(several: bool) -> None:
    """Makes a worker process ready; unless there are ``several`` owners, all groups of its sessions have the same."""
    sys.path.insert(0, str(_ROOT))
    if several:
        return
    from dataclasses import replace

    from msgspec import structs

    from fluid.engine.events import GroupSubmitted
    from fluid.testing.random_sessions import RandomSession

    handle = RandomSession.handle

    def handle_of_one(session: RandomSession, *events: object) -> None:
        handle(session, *(of_one(event) if isinstance(event, GroupSubmitted) else event for event in events))

    def of_one(event: GroupSubmitted) -> GroupSubmitted:
        return structs.replace(event, terms=replace(event.terms, owner="all"))

    RandomSession.handle = handle_of_one


def digest(steps: int, seed: int) -> str:
    """One session's line: its seed, and the digest of its commands."""
    from fluid.testing.random_sessions import random_session

    session = random_session(seed, steps)
    commands = hashlib.sha256("\n".join(repr(command) for _, said in session.told for command in said).encode())
    return f"{seed} {commands.hexdigest()[:24]}\n"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sessions", type=int, help="how many to run")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0, help="of the first session (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=250, help="random steps of each (default: %(default)s)")
    parser.add_argument("--several-owners", action="store_true", help="groups have the owners that are drawn")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # Dictionaries that are made of sets are written in the order of these.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    seeds = range(options.seed, options.seed + options.sessions)
    with ProcessPoolExecutor(2, initializer=prepare, initargs=(options.several_owners,)) as pool:
        lines = pool.map(partial(digest, options.steps), seeds, chunksize=20)
        options.out.write_text("".join(lines))


if __name__ == "__main__":
    main()
