"""A lane as a process of its own, which leads a process group."""

from __future__ import annotations

import faulthandler
import os
import signal
from multiprocessing import current_process
from typing import NoReturn

from fluid.lane.channel import Connection
from fluid.lane.messages import LaneOptions
from fluid.lane.process_exit import ProcessExit
from fluid.lane.serve import serve
from fluid.lane.stack_dump import dump_stacks_at_signal
from fluid.trainables.shared_place import SharedPlace, set_shared_place
from fluid.trainables.trial_code import inherit_trials


def run_as_process(connection: Connection, options: LaneOptions) -> NoReturn:
    """Runs a lane, and ends this process."""
    faulthandler.enable()
    dump_stacks_at_signal(options.run_folder, options.lane_id)
    set_shared_place(SharedPlace(options.payload_folders, options.reserved_bytes))
    if options.authkey:
        current_process().authkey = options.authkey
    inherit_trials()
    serve(connection, options, _end_with_group, ProcessExit())
    os._exit(0)


def _end_with_group() -> None:
    """Kills the process and those that its trials started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
