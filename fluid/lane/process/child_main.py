"""What a process that a trial starts by ``spawn`` or ``forkserver`` runs in place of the script."""

from __future__ import annotations

from fluid.lane.process.script import enter_child

if __name__ == "__main__":
    raise SystemExit(
        "the trial's process has no script to run again: fluid.lane.process.child_main is for multiprocessing"
    )
#: Looked up where a name is not there.
__getattr__ = enter_child()
