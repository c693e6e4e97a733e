"""The options of an executor: what the engine and the backend are made of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluid import Device, FluidExecutor, InvalidFieldError, Trial, TrialGroup
from fluid.backends.local import LocalBackend
from fluid.session import options as module
from fluid.session.options import ExecutorOptions


class Engine:
    """Notes what an engine would be made with."""

    def __init__(self, planner: Any, profile: Any, **bounds: Any) -> None:
        self.bounds = bounds
        self.lanes = type("Lanes", (), {"most_per_device": None})()


def bounds_of(options: ExecutorOptions, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the engine is told for these options."""
    monkeypatch.setattr(module, "EngineState", Engine)
    with LocalBackend([Device(0, kind="cpu")], preload=[]) as backend:
        engine: Any = options.make_engine(None, backend)
    return {name: engine.bounds[name] for name in ("max_packing", "max_fused", "insists_on_fusing")}


@pytest.mark.parametrize(
    ("packing", "max_packing", "max_fused", "insists"),
    [
        ("auto", 4, 128, False),
        ("fused", 1, 128, True),
        ("mps", 4, 1, False),
        ("timeslice", 4, 1, False),
        ("off", 1, 1, False),
    ],
)
def test_the_engine_is_told_how_trials_share_a_device(
    monkeypatch: pytest.MonkeyPatch, packing: str, max_packing: int, max_fused: int, insists: bool
) -> None:
    told = bounds_of(ExecutorOptions.in_force(packing=packing), monkeypatch)
    assert told == {"max_packing": max_packing, "max_fused": max_fused, "insists_on_fusing": insists}


def test_each_bound_holds_for_its_own_mechanism(monkeypatch: pytest.MonkeyPatch) -> None:
    told = bounds_of(ExecutorOptions.in_force(max_packing=1, max_fused=48), monkeypatch)
    assert told == {"max_packing": 1, "max_fused": 48, "insists_on_fusing": False}
    told = bounds_of(ExecutorOptions.in_force(max_packing=2, max_fused=1), monkeypatch)
    assert told == {"max_packing": 2, "max_fused": 1, "insists_on_fusing": False}


@pytest.mark.parametrize("value", [0, -3, 2.5, True, "8", None, float("nan")])
def test_a_number_of_rows_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidFieldError, match="max_fused="):
        FluidExecutor("local", 1, max_fused=value, run_dir=tmp_path, verbose=0)
    assert not list(tmp_path.iterdir()), "nothing was made"


def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"loss": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["fused", "auto"])
def test_one_line_says_that_no_trial_can_be_fused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, packing: str
) -> None:
    with FluidExecutor("local", 1, packing=packing, run_dir=tmp_path / "run", verbose=0) as executor:
        handles = [executor.submit_trialgroup(TrialGroup([Trial(train)], name=name)) for name in ("one", "two")]
        assert all(handle.wait(60.0) for handle in handles)
    told = [message for message in caplog.messages if "can be fused" in message]
    text = (
        "packing='fused', and no trial of 'one' can be fused: train is no FusedTrainable; each runs alone on a device"
    )
    assert told == ([text] if packing == "fused" else [])


def test_fusing_is_not_insisted_on_and_switched_off_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"max_fused=1: must be at least 2 with packing=\"fused\""):
        FluidExecutor("local", 1, packing="fused", max_fused=1, run_dir=tmp_path, verbose=0)


def test_a_module_of_the_users_that_is_called_ray_is_not_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray", "A tracer of rays."))
    with ExecutorOptions.in_force().make_backend(tmp_path) as backend:
        assert isinstance(backend, LocalBackend)


@pytest.mark.parametrize(
    ("packing", "max_packing", "sharing"),
    [("fused", None, "timeslice"), ("auto", 1, "timeslice"), ("auto", None, "auto"), ("mps", 1, "mps")],
)
def test_no_mps_is_started_for_one_process_per_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, packing: str, max_packing: int | None, sharing: str
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(module, "make_backend", lambda *args, **more: made.append(args))
    ExecutorOptions.in_force(packing=packing, max_packing=max_packing).make_backend(tmp_path)
    assert made[0][3].name == sharing
