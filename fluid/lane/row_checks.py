"""The self-check of fused trials in a lane: once for each kind of trials and machine, before the first are fused."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from fluid._private_files import make_folder
from fluid.lane.fused_rows import fused_trial_of
from fluid.lane.messages import LaneOptions
from fluid.lane.row_groups import RowGroup
from fluid.lane.work_queue import ResidentTrial

#: The folder, within a run's, of what lanes of this machine have found.
_FOLDER = "fusion"


class RowChecks:
    """Finds out whether trials may be fused.

    The result is kept in a file in the run's folder, so that the other lanes of the machine need no check of their own.

    Args:
        options: the lane's.
        origin: returns what tells the trainable of a resident from others with the same name.
    """

    def __init__(self, options: LaneOptions, origin: Callable[[ResidentTrial], str]) -> None:
        self._folder = os.path.join(options.run_folder, _FOLDER)
        self._kind = options.kind
        self._origin = origin

    def why_not(self, group: RowGroup, one: ResidentTrial, two: ResidentTrial) -> str:
        """Says why trials of a group should not be fused, in one line; empty if they can be.

        Trains new trials of the configs of two of them, alone and together; see :func:`fluid.fused.why_not_fused`.

        Raises:
            Exception: what the user's code raises in a trial that trains alone.
        """
        path = os.path.join(self._folder, f"{group.digest}-{self._origin(one)}-{self._kind}")
        with suppress(OSError, UnicodeDecodeError), open(path, encoding="utf-8") as file:
            return file.read()
        from fluid.fused.check import why_alike_not_fused

        reason = why_alike_not_fused(fused_trial_of(one.body), fused_trial_of(two.body)) or ""
        with suppress(OSError):
            make_folder(self._folder)
            own = f"{path}.{os.getpid()}"
            with open(own, "w", encoding="utf-8", errors="replace") as file:
                file.write(reason)
            os.replace(own, path)
        return reason
