"""The fork server's state: how its host hands it over, and how it survives an ``exec`` of the server."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from fluid.backends.hosts.listener import is_reachable

#: Environment variable that holds the state; not an argument, which would clutter every list of processes.
STATE_VARIABLE = "FLUID_FORK_SERVER"
#: The program, for ``python -m``.
PROGRAM = "fluid.backends.hosts.forkserver_main"
#: Seconds in which a driver that is alive answers.
_DRIVER_S = 1.0
#: Why a lane cannot be started.
NO_DESCRIPTORS = "too many open files; see `ulimit -n`"


@dataclass(kw_only=True)
class ForkServerState:
    """What a fork server knows.

    Attributes:
        control: descriptor of the server's socket to its host.
        guard: descriptor of the pipe from the host to the guardian.
        host: the host's process; the driver itself, unless the driver is on another node.
        mark: the session's; see :mod:`fluid.processes.session_mark`.
        python_path: the host's ``PYTHONPATH``; the server's own may differ.
        sys_path: the host's ``sys.path``.
        run_folder: folder of the run.
        memory_folder: folder of the checkpoints in host memory; empty if there is none.
        temporary: whether both folders are deleted after the driver's death.
        driver_address: where the driver listens, if the host is another process; ``None`` otherwise.
        guardian: the guardian's process; 0 before it was forked.
        loaded: modules to load.
        refused: modules not to load, with the reason.
        lanes: lane by process, of the lanes there are.
        waiting: lanes to fork: their options, pickled, as hexadecimal digits, and the descriptor of their end of the
            connection.
    """

    control: int
    guard: int
    host: int
    mark: str
    python_path: str | None
    sys_path: list[str]
    run_folder: str
    memory_folder: str
    temporary: bool
    driver_address: tuple[str, int] | None = None
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
        if state.driver_address is not None:
            state.driver_address = state.driver_address[0], state.driver_address[1]
        state.waiting = [(options, descriptor) for options, descriptor in state.waiting]
        return state

    def is_session_over(self) -> bool:
        """Whether the driver has ended too, to be asked when the host has; may wait a second for an answer."""
        return self.driver_address is None or not is_reachable(self.driver_address, _DRIVER_S)

    def to_json(self) -> str:
        """Returns the state as text."""
        return json.dumps(asdict(self))
