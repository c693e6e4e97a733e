"""scripts/gpu_day.py on a CPU: all stages but what only a GPU has, how it keeps to its budget, and what it writes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluid.gpu.nvml import Gpu
from fluid.resources import Device

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def gpu_day(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path / "runs"))
    import gpu_day

    return gpu_day


def measured(gpu_day: ModuleType, stage: str, tmp_path: Path, **place: Any) -> dict[str, Any]:
    """The figures of a stage, as its file has them."""
    path = tmp_path / "figures.json"
    gpu_day.FUNCTIONS[stage](gpu_day.Place(**place), gpu_day.Figures(path))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


# --- The stages


def test_the_machine(gpu_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_day_stages import machine

    monkeypatch.setattr(machine, "_COMMANDS", {"said": (sys.executable, "-c", "print(7)"), "lacking": ("/nowhere",)})
    found = measured(gpu_day, "facts", tmp_path)
    assert found["said"] == "7" and found["lacking"].startswith("FileNotFoundError")
    assert found["mps_unsupported"] == "there is no GPU"
    assert found["packages"]["numpy"] and found["find_gpus_ms"] > 0.0


def test_costs(gpu_day: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = measured(gpu_day, "costs", tmp_path)
    assert found["copies_4.0_gib"]["pageable_to_host_gb_per_s"] > 0.0
    assert found["iteration_ms"] > 0.0 and found["meter_us"] > 0.0 and found["list_to_device_behind_work_ms"] > 0.0


def test_costs_of_a_gpu(gpu_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors on the CPU, and stand-ins for NVML and for PyTorch's figures of a GPU."""
    torch = pytest.importorskip("torch")
    from gpu_day_stages import costs

    empty = torch.empty
    monkeypatch.setattr(gpu_day.Place, "kind", "cpu")
    monkeypatch.setattr(gpu_day.Place, "repeats", lambda self, count: 2)
    monkeypatch.setattr(gpu_day.Place, "bytes_of", lambda self, gib: 1 << 20)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    for name, value in {"memory_allocated": 2 << 20, "memory_reserved": 4 << 20, "memory_stats": {}}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "empty_cache", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    used = iter((100 << 20, 504 << 20, 604 << 20, 704 << 20))
    monkeypatch.setattr(costs, "used_bytes", lambda gpu: next(used))
    monkeypatch.setattr(costs, "process_bytes", lambda gpu, pid: 404 << 20)
    monkeypatch.setattr(costs, "_list_to_device", lambda place: 1 / 0)
    found = measured(gpu_day, "costs", tmp_path, gpus=("GPU-1",))
    assert found["device_bytes_after_context_mib"] == found["process_bytes_after_context_mib"] == 400.0
    assert found["device_bytes_after_convolution_mib"] == 600.0
    assert found["scattered_tensors"] == {"tensors": 58, "allocated_mib": 2.0, "reserved_mib": 4.0}
    assert found["copies_1.5_gib"]["pinned_to_device_gb_per_s"] > 0.0
    assert "pinned_bytes_per_byte" in found["copies_0.5_gib"] and found["iteration_after_emptying_ms"] > 0.0
    assert found["list_to_device_behind_work_ms"].startswith("ZeroDivisionError")


def test_the_device_of_lanes_is_the_gpu(gpu_day: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_day_stages import lanes

    monkeypatch.setattr(lanes, "find_gpus", lambda: [Gpu("GPU-0", 1e9, "A"), Gpu("GPU-1", 2e9, "B")])
    assert lanes.device_of(gpu_day.Place(gpus=("GPU-1",))) == Device(1, kind="gpu", memory_bytes=2e9, model="B")
    assert lanes.device_of(gpu_day.Place()) == Device(0, kind="cpu")
    assert lanes.config_of(gpu_day.Place(gpus=("GPU-1",))) == {"device": "cuda", "empty": False}


@pytest.mark.slow
def test_the_daemon(gpu_day: ModuleType, tmp_path: Path, fake: Any) -> None:
    """With the stand-in for the control program, and clients that wait."""
    found = measured(gpu_day, "mps", tmp_path, mps_program=str(fake.program))
    assert found["alone_client"] == found["client_after_restart"] == "ok"
    assert found["neighbour_of_a_killed_client"] == "ok" and found["problem_after_a_kill"] == ""
    assert found["faulting_client"] == "status 1" and len(found["client_pids"]) == 2
    assert found["problem_after_a_fault"][-1][1] == "" and found["end_s"] >= 0.0


def test_a_trial_of_the_stage_of_lanes(gpu_day: ModuleType) -> None:
    pytest.importorskip("torch")
    from gpu_day_stages.lanes import Small, config_of

    place = gpu_day.Place()
    trial = Small()
    trial.setup(config_of(place))
    before = trial.step()["loss"]
    assert trial.step()["loss"] < before
    trial.setup(config_of(place, empty=True))
    assert trial.step() == {"loss": 0.0}


@pytest.mark.slow
def test_lanes(gpu_day: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = measured(gpu_day, "lanes", tmp_path)
    for name in ("bare_iteration_ms", "iteration_ms", "first_result_s", "second_lane_s", "slowest_pause_and_resume_ms"):
        assert found[name] > 0.0, name
    assert found["pause_and_resume_ms"] >= 0.0 and found["empty_iteration_ms"] >= 0.0


@pytest.mark.slow
def test_elastic(gpu_day: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = measured(gpu_day, "elastic", tmp_path)
    assert found["group_of_one"]["all_reduce_s"] > 0.0
    assert found["resize_1_to_2_s_0"] > 0.0 and found["resize_2_to_1_s_1"] > 0.0


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_every_stage_has_a_command_that_its_program_takes(gpu_day: ModuleType, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("torch")
    import fusion
    import lanes
    import packing
    import packing_safety

    run = gpu_day.Run(gpu_day.Place(), tmp_path, 1.0)
    run._place = gpu_day.Place(gpus=("GPU-1",) if kind == "gpu" else (), mps_program="program")
    for name in gpu_day.STAGES:
        _, *arguments = run.command(name, tmp_path / "figures.json")
        if name in gpu_day.FUNCTIONS:
            assert arguments[0].endswith("gpu_day.py") and arguments[1:3] == ["--stage", name]
            assert ("--cpu" in arguments) == (kind == "cpu")
            continue
        if name == "tests":
            assert {Path(path).parent.name for path in arguments[7:]} >= {"gpu", "local", "elastic"}
            continue
        modules = {"packing.py": packing, "packing_safety.py": packing_safety, "fusion.py": fusion, "lanes.py": lanes}
        module = modules[Path(arguments[0]).name]
        options = module.make_parser().parse_args(arguments[1:])
        assert options.device == kind and str(options.json) == str(tmp_path / "figures.json")


# --- The run


def of_code(gpu_day: ModuleType, monkeypatch: pytest.MonkeyPatch, **codes: str) -> None:
    """Makes stages of Python code, whose variable ``written`` is the path for the figures."""

    def command(self: Any, name: str, written: Path) -> list[str]:
        return [sys.executable, "-c", f"written = {str(written)!r}\n{codes[name]}"]

    monkeypatch.setattr(gpu_day, "STAGES", {name: gpu_day.Stage(60.0, f"about {name}") for name in codes})
    monkeypatch.setattr(gpu_day.Run, "command", command)


WRITES = "open(written, 'w').write('{\"value\": 3.0}')"


def test_results_are_kept_and_a_second_run_goes_on_with_what_is_left(
    gpu_day: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_code(gpu_day, monkeypatch, good=WRITES, bad=f"{WRITES}; print('why it failed'); raise SystemExit(3)")
    gpu_day.main(["--cpu", "--out", str(tmp_path)])
    stages = json.loads((tmp_path / "gpu_day.json").read_text())["stages"]
    assert (stages["good"]["status"], stages["good"]["figures"]) == ("done", {"value": 3.0})
    assert (stages["bad"]["status"], stages["bad"]["figures"]) == ("status 3", {"value": 3.0}), "those it had"
    assert stages["bad"]["output"] == "why it failed\n" and "output" not in stages["good"]
    page = (tmp_path / "gpu_day.md").read_text()
    assert "about good" in page and "| value | 3 |" in page and "why it failed" in page
    capsys.readouterr()
    gpu_day.main(["--cpu", "--out", str(tmp_path)])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["bad", "written"]
    gpu_day.main(["--cpu", "--out", str(tmp_path), "--stages", "good"])
    assert capsys.readouterr().out.startswith("good")


def test_figures_of_another_machine_are_not_gone_on_with(gpu_day: ModuleType, tmp_path: Path) -> None:
    run = gpu_day.Run(gpu_day.Place(), tmp_path, 60.0)
    run.results["stages"]["costs"] = {"status": "done", "seconds": 1.0, "date": "2026-01-01"}
    run._write()
    assert not gpu_day.Run(gpu_day.Place(), tmp_path, 60.0).is_left("costs")
    run.results["machine"]["driver"] = "another"
    run._write()
    assert gpu_day.Run(gpu_day.Place(), tmp_path, 60.0).is_left("costs")


def test_a_stage_that_hangs_is_interrupted_and_what_does_not_fit_is_told(
    gpu_day: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cleans_up = f"import time\ntry:\n  time.sleep(600)\nfinally:\n  {WRITES}"
    of_code(gpu_day, monkeypatch, hangs=cleans_up, late=WRITES)
    monkeypatch.setattr(gpu_day, "END_S", 30.0)
    monkeypatch.setattr(gpu_day, "LEAST_S", 29.0)
    gpu_day.main(["--cpu", "--out", str(tmp_path), "--budget", "30"])
    stages = json.loads((tmp_path / "gpu_day.json").read_text())["stages"]
    assert stages["hangs"]["status"] == "timed out" and stages["hangs"]["figures"] == {"value": 3.0}
    assert "late" not in stages and "left for the next run: late" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--stages", "nothing", "--cpu"], []])
def test_what_cannot_be_measured_is_an_error(gpu_day: ModuleType, tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_day.main([*arguments, "--out", str(tmp_path)])


# --- The page


def test_goals_are_held_against_what_was_measured() -> None:
    from gpu_day_stages.report import markdown

    throughput = {"time slices": {"1": {"rate": 10.0}}, "MPS": {"8": {"rate": 19.0}}}
    none = {"packings": {"packings": 90, "started_again": 0, "failed": {}}}
    figures = {
        "packing": {"workloads": {"cnn": {"throughput": throughput, "fluid": {"MPS": {"against_best": 0.85}}}}},
        "safety": {"timeslice": none},
        "safety_mps": {"mps": none},
        "lanes": {"pause_and_resume_ms": 2.0},
        "lanes_memory": {"memory": {"lane_over_processes": 0.2}},
    }
    stages = {
        name: {"status": "done", "seconds": 1.0, "date": "2026-01-01", "figures": one} for name, one in figures.items()
    }
    machine = {"kind": "gpu", "gpus": ["H200"]}
    page = markdown({"machine": machine, "date": "2026-01-01", "stages": stages}, dict.fromkeys(stages, "it"))
    assert "| eight small CNNs under MPS against one at a time | at least 1.8x | 1.9x | yes |" in page
    assert "| throughput at Fluid's c against the best by hand | at least 0.9 | 0.85 | no |" in page
    assert "| random packings | at least 200 | 180 | no |" in page
    assert "| trials of random packings that ran out of memory | 0 | 0 | yes |" in page
    assert (
        "| memory of 64 small trials in one lane over that of a process each | at most a quarter | 0.2 | yes |" in page
    )
    assert "| pause and resume of resident trials | below 5 ms | 2 ms | yes |" in page
    assert "| an iteration of an empty trial in a lane | below 0.1 ms | not measured |  |" in page
