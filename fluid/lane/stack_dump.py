"""Stack dumps: at a signal a lane writes the stacks of its threads to a file, also while its code never returns."""

from __future__ import annotations

import faulthandler
import os
import signal

from fluid._private_files import make_folder, open_descriptor

#: A real-time signal near the end of those: libraries and users take SIGUSR2, and the C library the first ones.
DUMP_SIGNAL = signal.SIGRTMAX - 3


def lane_stacks(run_folder: str, lane_id: int) -> str:
    """Returns the file of a lane's stacks."""
    return os.path.join(run_folder, "logs", f"lane-{lane_id}.stacks")


def dump_stacks_at_signal(run_folder: str, lane_id: int) -> None:
    """Makes this process write its stacks to a file of its own at :data:`DUMP_SIGNAL`.

    The C code of the standard library's faulthandler does it, without the interpreter: a thread that never gives the
    interpreter lock back does not keep it from that. It needs a descriptor that stays open, which the trials' own logs
    do not: the driver copies the stacks there (:mod:`fluid.backends.hosts.stack_copies`).
    """
    path = lane_stacks(run_folder, lane_id)
    make_folder(os.path.dirname(path))
    descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(DUMP_SIGNAL, file=descriptor, all_threads=True)
