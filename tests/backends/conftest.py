"""Driving a backend from a test: real processes, and no waiting but for events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from iteration_runs import one_by_one

from fluid.backends.local import LocalBackend
from fluid.engine.commands import Command, StartLane
from fluid.engine.events import Event, LaneReady

#: Seconds after which a test gives up. Far more than anything takes, as the machine may be busy.
PATIENCE = 90.0
E = TypeVar("E", bound=Event)


class Drive:
    """A backend, and what it has reported so far.

    Args:
        backend: to drive.
        lanes: number of the first lane; none may be used twice.
    """

    def __init__(self, backend: LocalBackend, lanes: int = 0) -> None:
        self.backend = backend
        self.seen: list[Event] = []
        self.started: list[int] = []
        self._lanes = lanes

    def do(self, *commands: Command) -> None:
        self.backend.execute(commands)

    def lanes(self, *device_ids: int) -> list[int]:
        """Starts a lane on each of these devices, and returns their numbers once they are ready."""
        numbers = list(range(self._lanes, self._lanes + len(device_ids)))
        self._lanes += len(device_ids)
        self.started += numbers
        self.do(*(StartLane(number, device) for number, device in zip(numbers, device_ids, strict=True)))
        for number in numbers:
            self.until(LaneReady, lambda event, number=number: event.lane_id == number)
        return numbers

    def until(self, kind: type[E], matches: Callable[[Any], bool] = lambda event: True) -> E:
        """Returns the first event of a kind that was not returned before; polls until there is one."""
        deadline = self.backend.now() + PATIENCE
        while True:
            for index, event in enumerate(self.seen):
                if isinstance(event, kind) and matches(event):
                    del self.seen[index]
                    return event
            left = deadline - self.backend.now()
            assert left > 0, f"no {kind.__name__} came, but {self.seen}"
            self.seen += [each for event in self.backend.poll(left) for each in one_by_one(event)]

    def of(self, kind: type[E], trial_id: str, **fields: Any) -> E:
        """The next event of a kind about a trial, whose fields have these values."""
        return self.until(
            kind,
            lambda event: (
                event.trial_id == trial_id and all(getattr(event, name) == value for name, value in fields.items())
            ),
        )


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """Two CPU devices."""
    with LocalBackend(2, run_dir=tmp_path / "run", preload=[], grace=0.2) as backend:
        yield Drive(backend)


@pytest.fixture
def drive_on() -> type[Drive]:
    """Drives a backend that is there already."""
    return Drive


@pytest.fixture
def make_drive() -> Iterator[Callable[..., Drive]]:
    """Makes further backends, and closes them."""
    made: list[LocalBackend] = []

    def make(devices: Any = 2, **options: Any) -> Drive:
        made.append(LocalBackend(devices, **{"preload": [], "grace": 0.2, **options}))
        return Drive(made[-1])

    yield make
    for backend in made:
        backend.close()
