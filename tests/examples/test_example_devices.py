"""Examples train on the GPU that their trial holds; those that train on the CPU anyway do not hold one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import fluid

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_first_sweep_trains_on_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch without a GPU refuses the move there, which shows that the trial asks for it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    if torch.cuda.is_available():
        pytest.skip("the move succeeds")
    script = (EXAMPLES / "first_sweep" / "pytorch_after.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(script.partition("\nresult = ")[0], names)
    assert next(names["train"]({"lr": 0.1}, None))[0]["accuracy"] > 0.1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        next(names["train"]({"lr": 0.1}, None))


def test_elastic_training_is_on_the_device_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from elastic_training import Circles

    monkeypatch.setattr(Circles, "device", torch.device("meta"))
    trial = Circles()
    trial.setup({"seed": 0, "lr": 0.01, "iterations": 3})
    found = trial.train_batch((torch.zeros(3, 2), torch.zeros(3, dtype=torch.long)))
    assert found["loss"].is_meta


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
@pytest.mark.parametrize(("options", "devices"), [([], "cpu"), (["--devices", "2"], 2)])
def test_boosting_takes_cores(library: str, options: list[str], devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(library)
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(EXAMPLES / "frameworks")
    module = __import__(f"{library}_sweep")
    asked: list[Any] = []

    def executor(devices: Any) -> Any:
        asked.append(devices)
        raise InterruptedError

    monkeypatch.setattr(fluid, "FluidExecutor", executor)
    monkeypatch.setattr(sys, "argv", ["sweep", *options])
    with pytest.raises(InterruptedError):
        module.main()
    assert asked == [devices]
