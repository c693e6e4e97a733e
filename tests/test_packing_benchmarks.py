"""The benchmarks of packing run: all of what they arrange, with the smallest sizes and on CPU cores.

What needs a GPU is arranged too, with CPU cores in its place: the trials find no GPU and compute on the CPU, and the
control program of MPS is a stand-in.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fluid.gpu import mps_support, nvml
from fluid.gpu.nvml import GpuState

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
GPU = GpuState("GPU-1", "a GPU", 8e9, 0.0, 0.0, False, "DEFAULT", (9, 0), ())


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    root = str(BENCHMARKS.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path / "runs"))


def tiny(monkeypatch: pytest.MonkeyPatch, packing: Any) -> None:
    """Measures for an instant."""

    def small(self: Any, gpu: bool, quick: bool, counts: str | None, trials: int | None) -> None:
        self.counts, self.seconds, self.rounds = [1, 2], 0.05, 1
        self.scale, self.steps, self.trials, self.trial_seconds = 1, 1, 2, 0.1

    monkeypatch.setattr(packing.Size, "__init__", small)


FIGURES = {"alpha": 1.1, "measured_packing": 2, "c": 2, "seconds_off": 2.0, "seconds_auto": 1.0}


def packed(packing: Any, options: list[str], written: Path) -> dict[str, Any]:
    """What the benchmark found of one workload."""
    packing.main(["--quick", "--workloads", "input", "--json", str(written), *options])
    found: dict[str, Any] = json.loads(written.read_text())
    assert found["date"] and found["machine"] and found["torch"]
    one: dict[str, Any] = found["workloads"]["input"]
    for way, said in one["fluid"].items():
        assert set(one["throughput"][way]) == {str(k) for k in {1, 2, said["c"]}}
        assert 0.0 < said["against_best"] <= 1.0
    return one


@pytest.mark.long
@pytest.mark.slow
def test_packing_measures_a_core_and_what_fluid_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    import packing

    tiny(monkeypatch, packing)
    found = packed(packing, ["--device", "cpu"], tmp_path / "figures.json")
    assert list(found["throughput"]) == ["one core"]
    said = found["fluid"]["one core"]
    assert said["alpha"] >= 1.0 and said["seconds_off"] > 0.0 and said["seconds_per_iteration"] > 0.03
    assert "Its c reaches" in capsys.readouterr().out


@pytest.mark.long
def test_packing_measures_a_gpu_by_time_slices_and_under_mps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: Any
) -> None:
    pytest.importorskip("torch")
    import packing

    from fluid import mps

    told: list[tuple[str, dict[str, str]]] = []

    def fluid_apart(name: str, options: Any, environment: dict[str, str]) -> dict[str, Any]:
        told.append((name, environment))
        return dict(FIGURES)  # On this machine Fluid would find no GPU.

    monkeypatch.setattr(mps, "MpsDaemon", functools.partial(mps.MpsDaemon, program=str(fake.program)))
    monkeypatch.setattr(mps_support, "unsupported_reason_here", lambda gpus: "")

    tiny(monkeypatch, packing)
    monkeypatch.setattr(packing, "fluid_apart", fluid_apart)
    monkeypatch.setattr(nvml, "describe_gpus", lambda: [GPU])
    found = packed(packing, [], tmp_path / "figures.json")
    assert list(found["throughput"]) == ["time slices", "MPS"]
    (_, slices), (_, under_mps) = told
    assert slices == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    assert under_mps["CUDA_VISIBLE_DEVICES"] == "GPU-1" and "CUDA_MPS_PIPE_DIRECTORY" in under_mps
    assert not Path(under_mps["CUDA_MPS_PIPE_DIRECTORY"]).exists(), "the daemon has ended"


@pytest.mark.parametrize("script", ["packing", "packing_safety"])
def test_a_gpu_that_is_asked_for_and_is_not_there_is_an_error(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "describe_gpus", list)
    module = __import__(script)
    with pytest.raises(SystemExit):
        module.main(["--device", "gpu"])


def test_a_part_of_fluid_that_fails_costs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    import packing

    options = packing.make_parser().parse_args(["--device", "gpu"])
    said = packing.fluid_apart("mlp", options, {"CUDA_VISIBLE_DEVICES": ""})
    assert "no usable GPU was found" in said["failed"]
    assert packing.verdict(said) == "Fluid: its part failed"
    assert "Fluid's part of mlp failed" in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_measured_is_written_before_the_next_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import packing_safety

    def fails(device: Any, sharing: str) -> dict[str, Any]:
        raise RuntimeError("the GPU fell off the bus")

    monkeypatch.setattr(packing_safety, "WAIT_S", 0.03)
    monkeypatch.setattr(packing_safety, "fault", fails)
    written = tmp_path / "figures.json"
    with pytest.raises(RuntimeError, match="fell off"):
        packing_safety.main(["--device", "cpu", "--packings", "1", "--json", str(written)])
    assert json.loads(written.read_text())["timeslice"]["packings"]["packings"] == 1


def test_a_file_of_figures_is_whole_at_any_time(tmp_path: Path) -> None:
    from measuring import write_json

    path = tmp_path / "figures.json"
    write_json(path, {"first": 1})
    with pytest.raises(TypeError):
        write_json(path, {"first": 1, "second": object()})
    assert json.loads(path.read_text()) == {"first": 1}
    write_json(None, {"first": 1})


@pytest.mark.long
def test_random_packings_and_a_fault_cost_nobody_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import packing_safety

    monkeypatch.setattr(packing_safety, "WAIT_S", 0.03)
    written = tmp_path / "figures.json"
    found = packing_safety.main(["--device", "cpu", "--packings", "2", "--seed", "1", "--json", str(written)])
    packings, fault = found["timeslice"]["packings"], found["timeslice"]["fault"]
    assert packings["trials"] >= 4 and packings["wanted_more_than_there_is"] >= 1
    assert max(packings["most_packed"]) >= 2
    assert packings["started_again"] == 0 and packings["failed"] == {}
    assert fault["others_are_whole"] and fault["faulty"] == "FAILED" and fault["most_packed"] >= 2
    assert json.loads(written.read_text())["timeslice"]["fault"] == fault


def test_the_device_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import packing_safety

    monkeypatch.setattr(nvml, "describe_gpus", lambda: [GPU])
    device, name, ways = packing_safety.find_device("auto")
    assert (device.kind, device.memory_bytes) == ("gpu", 8e9)
    assert "a GPU" in name and ways in (["timeslice"], ["timeslice", "mps"])
    assert packing_safety.find_device("cpu")[0].kind == "cpu"


def test_what_a_trial_does_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors on the CPU in place of the GPU's: memory is taken, and the fault is an error."""
    torch = pytest.importorskip("torch")
    import packing_safety

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("ones", "zeros", "tensor"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, real=real, device, **more: real(*args, **more))
    trial = packing_safety.Eater()
    trial.setup({"kept": 10, "taken": 5, "wait": 0.0, "fault_at": 2})
    assert trial.step() == {"bytes": 15}
    with pytest.raises(IndexError):
        trial.step()
