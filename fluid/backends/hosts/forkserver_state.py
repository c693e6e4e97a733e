"""The fork server's state: how its driver hands it over, and how it survives an ``exec`` of the server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

#: Environment variable that holds the state; not an argument, which would clutter every list of processes.
STATE_VARIABLE = "FLUID_FORK_SERVER"
#: The program, for ``python -m``.
PROGRAM = "fluid.backends.hosts.forkserver_main"
#: Why a lane cannot be started.
NO_DESCRIPTORS = "too many open files; see `ulimit -n`"


@dataclass(kw_only=True)
class ForkServerState:
    """What a fork server knows.

    Attributes:
        control: descriptor of the server's socket to the driver.
        guard: descriptor of the pipe from the driver to the guardian.
        driver: the driver's process.
        mark: the session's; see :mod:`fluid.processes.session_mark`.
        python_path: the driver's ``PYTHONPATH``; the server's own may differ.
        sys_path: the driver's ``sys.path``.
        run_folder: folder of the run.
        memory_folder: folder of the checkpoints in host memory; empty if there is none.
        temporary: whether both folders are deleted after the driver's death.
        guardian: the guardian's process; 0 before it was forked.
        loaded: modules to load.
        refused: modules not to load, with the reason.
        lanes: lane by process, of the lanes there are.
        waiting: lanes to fork: their options, pickled, as hexadecimal digits, and the descriptor of their end of the
            connection.
    """

    control: int
    guard: int
    driver: int
    mark: str
    python_path: str | None
    sys_path: list[str]
    run_folder: str
    memory_folder: str
    temporary: bool
    guardian: int = 0
    loaded: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[str, int]] = field(default_factory=list)

    @classmethod
    def from_json(cls, text: str) -> ForkServerState:
        """Reads what :meth:`to_json` returned."""
        state = cls(**json.loads(text))
        state.lanes = {int(process): lane_id for process, lane_id in state.lanes.items()}  # JSON's keys are strings.
        state.waiting = [(options, descriptor) for options, descriptor in state.waiting]
        return state

    def to_json(self) -> str:
        """Returns the state as text."""
        return json.dumps(asdict(self))
