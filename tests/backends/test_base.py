"""What a backend is that has no more than it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fluid import Device, FluidExecutor, InvalidFieldError
from fluid.backends.base import Backend, GpuSharing
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.engine.commands import Command
from fluid.engine.events import Event
from fluid.rehearsal import RehearsalBackend


class Least(Backend):
    """Has the methods that have to be there."""

    def devices(self) -> list[Device]:
        return [Device(0, kind="cpu")]

    def execute(self, commands: Sequence[Command]) -> None:
        pass

    def poll(self, timeout: float | None = None) -> list[Event]:
        return []

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class Alike:
    """Has the same methods, and is no Backend."""

    devices, execute, poll, wake, close = Least.devices, Least.execute, Least.poll, Least.wake, Least.close


def test_what_a_backend_leaves_out_it_cannot_do(tmp_path: Path) -> None:
    backend = Least()
    assert (backend.scaling_limits, backend.can_lend, backend.can_give_back(0)) == (None, False, False)
    assert backend.sharing == GpuSharing("timeslice") and backend.lane_policy is None
    assert not (backend.is_virtual or backend.replays or backend.hold.is_virtual or backend.forwards_output)
    assert (backend.lane_room(), backend.start_program("a:b"), backend.end()) == (None, None, [])
    assert backend.pays_to_pack and backend.facts == {}
    assert backend.now() <= backend.now()
    with pytest.raises(InvalidFieldError, match="Least has those only that it began with"):
        backend.add_devices([Device(1)])
    with pytest.raises(FileNotFoundError, match="/there is on other"):
        backend.fetch_kept("other", "/there", str(tmp_path / "here"))


@pytest.mark.parametrize("missing", ["devices", "execute", "poll", "wake", "close"])
def test_what_it_has_to_have_is_named(missing: str) -> None:
    methods = {name: method for name, method in vars(Least).items() if callable(method) and name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Partial", (Backend,), methods)()


@pytest.mark.parametrize("backend", [Alike(), Least, None, 3, "cloud"])
def test_what_is_no_backend_is_refused(tmp_path: Path, backend: Any) -> None:
    with pytest.raises(
        InvalidFieldError, match=r"^backend=.*auto, local, .* derived from fluid\.backends\.base\.Backend"
    ):
        FluidExecutor(backend, run_dir=tmp_path / "run", verbose=0)
    assert not (tmp_path / "run").exists()


def test_virtual_backends_say_so() -> None:
    simulated = SimulatedBackend(lambda *_: Truth(seconds=1.0), [Device(0)])
    assert simulated.is_virtual and not simulated.replays and not simulated.hold.is_virtual
    replaying = RehearsalBackend(1)
    assert replaying.is_virtual and replaying.replays and replaying.hold.is_virtual
