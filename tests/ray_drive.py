"""What tests on real Ray clusters share: a backend that is driven command by command, and a trainable that tells much.

Lanes on every node import the trainable from here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluid.engine.commands import Command, StartLane, StartTrial
from fluid.engine.events import Checkpoint, Event, IterationDone, LaneReady
from fluid.trainables.payload import payload_of

if TYPE_CHECKING:  # It loads Ray, which lanes are not to load.
    from fluid.backends.ray import RayBackend

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0
#: Addresses of Ray's nodes: this machine's, and of nodes that stand for other machines.
THIS_MACHINE, OTHER_MACHINE, THIRD_MACHINE = "127.0.0.1", "127.0.0.3", "127.0.0.4"
ROOT = str(Path(__file__).resolve().parents[1])


class Counter:
    """Counts, says where it runs, and can be told to kill its process, once."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.count = 0

    def step(self) -> dict[str, Any]:
        self.count += 1
        print("step", self.count)
        once = Path(self.config.get("die_once", "/"))
        if self.count == 3 and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.count == self.config.get("hang_at"):
            threading.Event().wait()
        # A trial takes its time, so that a test can do something meanwhile.
        threading.Event().wait(self.config.get("seconds", 0.0))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {"count": self.count, "pid": os.getpid(), "folder": os.getcwd(), "visible": visible}

    def save_checkpoint(self, folder: str) -> None:
        (Path(folder) / "count").write_text(str(self.count), encoding="utf-8")

    def load_checkpoint(self, folder: str) -> None:
        self.count = int((Path(folder) / "count").read_text(encoding="utf-8"))


class Evaluator:
    """Evaluates the expressions of its configuration in a lane."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def step(self) -> dict[str, Any]:
        return {name: eval(code, {"os": os, "sys": sys}) for name, code in self.config.items()}


class Drive:
    """A backend, and what it has reported so far."""

    def __init__(self, backend: RayBackend) -> None:
        self.backend = backend
        self.seen: list[Event] = []
        self._lanes = 0
        self._evaluations = 0

    def do(self, *commands: Command) -> None:
        self.backend.execute(commands)

    def lanes(self, *device_ids: int) -> list[int]:
        """Starts a lane on each of these devices, and returns their numbers once they are ready."""
        numbers = list(range(self._lanes, self._lanes + len(device_ids)))
        self._lanes += len(device_ids)
        self.do(*(StartLane(number, device) for number, device in zip(numbers, device_ids, strict=True)))
        for number in numbers:
            self.until(LaneReady, lane_id=number)
        return numbers

    def start(self, trial_id: str, lane: int, iterations: int, *checkpoint: Checkpoint, **config: Any) -> None:
        """Starts a :class:`Counter`."""
        self.backend.register(trial_id, payload_of(Counter, config))
        restored = checkpoint[0] if checkpoint else None
        self.do(StartTrial(trial_id, (lane,), iterations=iterations, checkpoint=restored))

    def evaluate(self, lane: int, **expressions: str) -> dict[str, Any]:
        """The values of expressions in a lane."""
        self._evaluations += 1
        trial_id = f"evaluation-{self._evaluations}"
        self.backend.register(trial_id, payload_of(Evaluator, expressions))
        self.do(StartTrial(trial_id, (lane,), iterations=1))
        return dict(self.until(IterationDone, trial_id=trial_id).metrics)

    def until(self, kind: Any, **fields: Any) -> Any:
        """The first event of a kind, with these fields, that was not returned before."""
        from iteration_runs import one_by_one  # Lanes import this file, and are not to load the engine.

        deadline = time.monotonic() + PATIENCE
        while True:
            for index, event in enumerate(self.seen):
                if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                    return self.seen.pop(index)
            left = deadline - time.monotonic()
            assert left > 0, f"no {kind.__name__} came, but {self.seen}"
            new = [each for event in self.backend.poll(left) for each in one_by_one(event)]
            at = [event.at for event in [*self.seen[-1:], *new]]
            assert at == sorted(at)
            self.seen += new


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


def is_hanging(pid: int) -> bool:
    """Whether a process waits for something."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "S"


def in_host_memory(folder: Path) -> list[str]:
    """Folders in host memory of sessions that have theirs on disk below this one."""
    sessions = Path("/dev/shm").glob("fluid-*/.session")
    return [session.parent.name for session in sessions if f'"{folder}' in session.read_text(encoding="utf-8")]
