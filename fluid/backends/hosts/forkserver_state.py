"""What a fork server is told by its host."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from fluid.backends.hosts.listener import is_reachable

#: The program, whose argument the state is.
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
        run_folder: folder of the run.
        memory_folder: folder of the checkpoints in host memory; empty if there is none.
        temporary: whether both folders are deleted after the driver's death.
        driver_address: where the driver listens, if the host is another process; ``None`` otherwise.
        guardian: the guardian's process; 0 before it was forked.
    """

    control: int
    guard: int
    host: int
    mark: str
    run_folder: str
    memory_folder: str
    temporary: bool
    driver_address: tuple[str, int] | None = None
    guardian: int = 0

    @classmethod
    def from_json(cls, text: str) -> ForkServerState:
        """Reads what :meth:`to_json` returned."""
        state = cls(**json.loads(text))
        if state.driver_address is not None:
            state.driver_address = state.driver_address[0], state.driver_address[1]
        return state

    def is_session_over(self) -> bool:
        """Whether the driver has ended too, to be asked when the host has; may wait a second for an answer."""
        return self.driver_address is None or not is_reachable(self.driver_address, _DRIVER_S)

    def to_json(self) -> str:
        """Returns the state as text."""
        return json.dumps(asdict(self))
