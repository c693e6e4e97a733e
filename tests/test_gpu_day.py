"""scripts/gpu_day.py on a CPU: its stages but for what only a GPU has, and that nothing measured is ever lost."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import eventually

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
    from gpu_day_stages.place import Place

    file = tmp_path / gpu_day.FILE
    gpu_day.append(file, {"stage": stage, "status": gpu_day.BEGUN, "date": "2026-01-01"})
    module = importlib.import_module(f"gpu_day_stages.{gpu_day.STAGES[stage].module}")
    getattr(module, stage)(Place(**place), gpu_day.Figures(file, stage))
    found: dict[str, Any] = gpu_day.Day.of(file).stages[stage]["figures"]
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
    from gpu_day_stages.place import Place

    empty = torch.empty
    monkeypatch.setattr(Place, "kind", "cpu")
    monkeypatch.setattr(Place, "repeats", lambda self, count: 2)
    monkeypatch.setattr(Place, "bytes_of", lambda self, gib: 1 << 20)
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


def test_the_device_is_the_gpu(gpu_day: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_day_stages import lanes, place

    monkeypatch.setattr(place, "find_gpus", lambda: [Gpu("GPU-0", 1e9, "A"), Gpu("GPU-1", 2e9, "B")])
    assert place.Place(gpus=("GPU-1",)).device() == Device(1, kind="gpu", memory_bytes=2e9, model="B")
    assert place.Place().device() == Device(0, kind="cpu")
    assert lanes.config_of(place.Place(gpus=("GPU-1",))) == {"device": "cuda", "empty": False}


@pytest.mark.slow
def test_the_daemon(gpu_day: ModuleType, tmp_path: Path, fake: Any) -> None:
    """With the stand-in for the control program, and clients that wait."""
    found = measured(gpu_day, "mps", tmp_path, mps_program=str(fake.program))
    assert found["alone_client"] == found["client_after_restart"] == "ok"
    assert found["neighbour_of_a_killed_client"] == "ok" and found["problem_after_a_kill"] == ""
    assert found["faulting_client"] == "status 1" and len(found["client_pids"]) == 2
    assert found["problem_after_a_fault"][-1][1] == "" and found["end_s"] >= 0.0
    assert found["neighbour_of_a_terminated_client"] == "ok" and found["terminate_client_s"] >= 0.0
    assert found["words, idle"]["get_server_status"] == "ACTIVE" and "ACTIVE" in found["words, idle"]["as read"]


def test_a_trial_of_the_stage_of_lanes(gpu_day: ModuleType) -> None:
    pytest.importorskip("torch")
    from gpu_day_stages.lanes import Small, config_of
    from gpu_day_stages.place import Place

    place = Place()
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


def test_every_stage_is_a_function(gpu_day: ModuleType) -> None:
    pytest.importorskip("torch")
    for name, stage in gpu_day.STAGES.items():
        assert callable(getattr(importlib.import_module(f"gpu_day_stages.{stage.module}"), name))


@pytest.mark.slow
def test_the_tests_marked_gpu(gpu_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU they are skipped, and told so; a file that cannot be run is an error."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("FLUID_REQUIRE_GPU", raising=False)
    options = gpu_day.gpu_tests()[: gpu_day.gpu_tests().index("gpu") + 1]
    monkeypatch.setattr(gpu_day, "gpu_tests", lambda: (*options, "tests/lane/test_allocator.py"))
    found = measured(gpu_day, "tests", tmp_path)
    assert {name: one["outcome"] for name, one in found.items()} == {
        "tests/lane/test_allocator.py::test_segments_expand_on_this_gpu": "skipped"
    }
    monkeypatch.setattr(gpu_day, "gpu_tests", lambda: (*options, "tests/nothing.py"))
    with pytest.raises(SystemExit, match="pytest ended with status"):
        measured(gpu_day, "tests", tmp_path)


@pytest.mark.long
def test_no_test_marked_gpu_is_forgotten(gpu_day: ModuleType) -> None:
    """pytest finds no others in all of tests/."""
    ray = [f"--ignore={path.relative_to(ROOT)}" for path in (ROOT / "tests").rglob("ray_tune")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        *ray,
        "tests",
    ]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = {line.partition("::")[0] for line in said.splitlines() if "::" in line}
    assert len(found) > 5 and found <= {os.path.relpath(file, ROOT) for file in gpu_day.gpu_tests()}


@pytest.mark.slow
def test_whole_stages(gpu_day: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a user runs them: sweeps in all ways have the same results, packs train, packings and faults harm nobody."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    stages = "sweeps,by_hand,alpha,fusion,fusible,safety"
    gpu_day.main(["--cpu", "--out", str(tmp_path), "--stages", stages, "--budget", "600"])
    day = gpu_day.Day.of(tmp_path / gpu_day.FILE)
    assert {name: day.status(name) for name in stages.split(",")} == dict.fromkeys(stages.split(","), "done")
    figures = {name: stage["figures"] for name, stage in day.stages.items()}
    for way in ("off", "timeslice", "fused", "lane", "auto"):
        found = figures["sweeps"][way]
        assert (found["results"], found["failures"]) == (found["wanted"], ""), way
        assert found["worst_difference"] < 1e-4, way
    for way in ("off", "fused", "auto"):
        assert figures["sweeps"][f"asha, {way}"]["compared"] >= 4
        assert figures["sweeps"][f"asha, {way}"]["worst_difference"] < 1e-4
    assert figures["by_hand"]["one core, wide, gain"]["1"] == 1.0
    assert figures["alpha"]["cnn, timeslice"]["c"] >= 1
    assert figures["fusion"]["MLP, width 32, k = 2"]["per_s"] > 0.0
    assert all("step_ms" in found for found in figures["fusible"].values()), "all of these nets fuse"
    assert figures["safety"]["fault, timeslice"]["others_are_whole"]
    assert figures["safety"]["packings, timeslice"]["failed"] == {}
    page = (tmp_path / "gpu_day.md").read_text()
    assert "| results of the sweeps, in each way to share | all | 1 | yes |" in page
    assert "written to" in capsys.readouterr().out


# --- The run

#: Stages that are quick, and fail in all ways.
MADE_UP = """
import os, signal, subprocess, sys, time

def good(place, figures):
    figures["value"] = 3.0

def bad(place, figures):
    figures["value"] = 3.0
    print("why it failed")
    raise SystemExit(3)

def killed(place, figures):
    figures["value"] = 3.0
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(place, figures):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(sleep, start_new_session=new) for new in (False, True)]
    figures["pids"] = [os.getpid(), *(child.pid for child in children)]
    time.sleep(600)

def stops(place, figures):
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        figures["cleaned up"] = place.left() < 0.0

def counts(place, figures):
    figures["pid"] = os.getpid()
    number = 0
    while True:
        figures[f"number {number}"] = "x" * (number * 37 % 9000)
        number += 1
"""
#: The program with these stages.
PROGRAM = """
import sys
sys.path[:0] = [{scripts!r}, {root!r}]
import gpu_day, gpu_day_stages
gpu_day_stages.__path__.append({folder!r})
gpu_day.__file__ = __file__
gpu_day.END_S, gpu_day.LEFT_S, gpu_day.LEAST_S, gpu_day.PATIENCE_ON_CPU = 2.0, 0.3, {least}, 1.0
gpu_day.NEEDED = {{}}
gpu_day.STAGES = {{name: gpu_day.Stage(limit, "made_up", f"about {{name}}") for name, limit in {stages!r}.items()}}
gpu_day.main()
"""


class Program:
    """The program with other stages, by their limits in seconds."""

    def __init__(self, folder: Path, gpu_day: ModuleType, least: float = 0.0, **stages: float) -> None:
        (folder / "made_up.py").write_text(MADE_UP)
        text = PROGRAM.format(
            scripts=str(ROOT / "scripts"), root=str(ROOT), folder=str(folder), least=least, stages=stages
        )
        (folder / "program.py").write_text(text)
        self.folder, self.file = folder, folder / gpu_day.FILE
        self._day = gpu_day.Day

    def start(self, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(self.folder / "program.py"), "--cpu", "--out", str(self.folder), *options]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *options: str) -> list[str]:
        """Runs it; returns the first word of each line that it prints."""
        said, _ = self.start(*options).communicate(timeout=60)
        return [line.split()[0] for line in said.splitlines()]

    @property
    def stages(self) -> dict[str, dict[str, Any]]:
        stages: dict[str, dict[str, Any]] = self._day.of(self.file).stages
        return stages


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_stage_that_fails_keeps_its_figures_and_the_next_run_goes_on(gpu_day: ModuleType, tmp_path: Path) -> None:
    program = Program(tmp_path, gpu_day, bad=20.0, good=20.0, killed=20.0)
    assert program.run() == ["bad", "good", "killed", "written"]
    stages = program.stages
    assert {name: stage["figures"] for name, stage in stages.items()} == {name: {"value": 3.0} for name in stages}
    assert {name: stage["status"] for name, stage in stages.items()} == {
        "bad": "status 3",
        "good": "done",
        "killed": "status -9",
    }
    assert stages["bad"]["output"] == "why it failed\n" and "output" not in stages["good"]
    page = (tmp_path / "gpu_day.md").read_text()
    assert "about good" in page and "| value | 3 |" in page and "why it failed" in page
    assert "why it failed" in (tmp_path / "gpu_day.log").read_text()
    # What was never begun comes first.
    program = Program(tmp_path, gpu_day, bad=20.0, good=20.0, stops=3.0)
    assert program.run() == ["stops", "bad", "written"]
    assert program.stages["stops"] | {"seconds": 0.0, "date": ""} == {
        **{"stage": "stops", "status": "timed out", "figures": {"cleaned up": True}},
        **{"output": "", "seconds": 0.0, "date": ""},
    }
    assert program.run("--stages", "good") == ["good", "written"]


def test_a_stage_that_hangs_ends_at_its_limit_with_its_children(gpu_day: ModuleType, tmp_path: Path) -> None:
    program = Program(tmp_path, gpu_day, least=4.0, hangs=4.0, late=60.0)
    said, _ = program.start("--budget", "5").communicate(timeout=60)
    assert "left for the next run: late" in said
    stage = program.stages["hangs"]
    assert stage["status"] == "timed out" and len(stage["figures"]["pids"]) == 3
    assert not any(map(is_alive, stage["figures"]["pids"]))
    assert len(stage["figures"]["left behind"]) == 1, "the child in a session of its own"


def test_a_program_that_is_killed_loses_nothing_and_leaves_nothing(gpu_day: ModuleType, tmp_path: Path) -> None:
    program = Program(tmp_path, gpu_day, counts=60.0)
    running = program.start()
    eventually(lambda: "counts" in program.stages and len(program.stages["counts"]["figures"]) > random.randint(9, 99))
    running.kill()
    running.communicate()
    figures = program.stages["counts"]["figures"]
    pid = figures["pid"]
    eventually(lambda: not is_alive(pid))
    figures = program.stages["counts"]["figures"]
    assert list(figures) == ["pid", *(f"number {number}" for number in range(len(figures) - 1))]
    assert all(figures[f"number {n}"] == "x" * (n * 37 % 9000) for n in range(len(figures) - 1))
    # The next run adds to the file, and tells what there is of the stage.
    with program.file.open("a") as file:
        file.write('{"stage": "counts", "figure": "torn')
    assert Program(tmp_path, gpu_day, counts=60.0, good=20.0).run("--stages", "good") == ["good", "written"]
    assert program.stages["counts"]["figures"] == figures and program.stages["good"]["figures"] == {"value": 3.0}
    page = (tmp_path / "gpu_day.md").read_text()
    assert "about counts" in page and "s, killed." in page


def test_a_file_that_is_cut_anywhere_has_all_lines_before(gpu_day: ModuleType, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    records = [
        {"stage": "s", "status": gpu_day.BEGUN},
        *({"stage": "s", "figure": str(n), "value": n, "at_s": 1.0} for n in range(5)),
    ]
    for record in records:
        gpu_day.append(whole, record)
    content = whole.read_bytes()
    from gpu_day_stages.results import read

    for length in range(len(content)):
        cut.write_bytes(content[:length])
        gpu_day.append(cut, {"stage": "t", "status": gpu_day.BEGUN})
        # A line whose end alone is missing is whole.
        kept = (content[:length] + b"\n").count(b"}\n")
        assert list(read(cut)) == [*records[:kept], {"stage": "t", "status": gpu_day.BEGUN}]


def test_figures_of_another_machine_are_not_gone_on_with(gpu_day: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from gpu_day_stages.place import Place

    run = gpu_day.Run(Place(), tmp_path, 60.0)
    gpu_day.append(run.file, {"stage": "costs", "status": gpu_day.BEGUN, "date": "2026-01-01"})
    gpu_day.append(run.file, {"stage": "costs", "status": gpu_day.DONE, "seconds": 1.0})
    assert "costs" not in gpu_day.Run(Place(), tmp_path, 60.0).left()
    gpu_day.append(run.file, {"machine": {"driver": "another"}, "date": "2026-01-01"})
    assert "costs" in gpu_day.Run(Place(), tmp_path, 60.0).left()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--stages", "nothing", "--cpu"], "nothing is not among facts, sweeps"),
        ([], "--cpu tries the code without a GPU"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    gpu_day: ModuleType, tmp_path: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    with pytest.raises(SystemExit):
        gpu_day.main([*arguments, "--out", str(tmp_path)])
    assert why in capsys.readouterr().err


def test_packages_that_are_missing_are_named_and_may_come_from_wheels(gpu_day: ModuleType, tmp_path: Path) -> None:
    """In an interpreter without any package."""
    command = [sys.executable, "-S", str(ROOT / "scripts" / "gpu_day.py"), "--cpu", "--out", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "install cloudpickle, msgspec, numpy, nvidia-ml-py, rich, torch, or put their wheels" in done.stderr
    with zipfile.ZipFile(tmp_path / "msgspec-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("msgspec/__init__.py", "")
    done = subprocess.run(
        [*command, "--wheels", str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert "install cloudpickle, numpy, nvidia-ml-py, rich, torch, or put" in done.stderr


# --- The page


def test_goals_are_held_against_what_was_measured(gpu_day: ModuleType) -> None:
    sweep = {"results": 48, "wanted": 48, "worst_difference": 2e-6}
    packings = {"packings": 5, "started_again": 0, "failed": {"a": "no memory"}}
    figures: dict[str, Any] = {
        "sweeps": {"off": sweep, "mps": {**sweep, "results": 36}, "asha, off": {**sweep, "wanted": None}},
        "by_hand": {"MPS, cnn": {"1": 10.0, "4": 40.0, "8": 80.0, "16": 90.0}, "MPS, cnn, gain": {"8": 8.0}},
        "alpha": {"cnn, mps": {"c": 7}},
        "safety": {"packings, mps": packings, "fault, mps": {"others_are_whole": True}},
        "tests": {"a": {"outcome": "passed"}, "b": {"outcome": "failed"}},
        "lanes": {"pause_and_resume_ms": 2.0},
        "lanes_memory": {"memory": "RuntimeError: no GPU"},
    }
    figures["facts"] = {"doctor": "Fluid 0.1\nGPUs  H200", "user": 0}
    day = gpu_day.Day({"kind": "gpu", "gpus": ["H200"]}, "2026-01-01")
    for name, one in figures.items():
        day.stages[name] = {"status": "done", "seconds": 1.0, "date": "2026-01-01", "figures": one}
    page = gpu_day.markdown(day, dict.fromkeys([*figures, "mps"], "it"))
    assert "| results of the sweeps, in each way to share | all | 0.75 | no |" in page
    assert "| largest difference of their losses, relative | below 1e-4 | 2e-06 | yes |" in page
    assert "| eight small CNNs under MPS against one, by hand | at least 1.8x | 8x | yes |" in page
    assert "| throughput at Fluid's c against the best by hand | at least 0.9 | 0.875 | no |" in page
    assert "| trials of random packings that ran out of memory | 0 | 1 | no |" in page
    assert "| ways in which a fault left the other trials whole | all | 1 | yes |" in page
    assert "| tests marked gpu that failed | 0 | 1 | no |" in page
    assert (
        "| memory of 64 small trials in one lane over that of a process each | at most a quarter | not measured |  |"
        in page
    )
    assert "| pause and resume of resident trials | below 5 ms | 2 ms | yes |" in page
    assert "| an iteration of an empty trial in a lane | below 0.1 ms | not measured |  |" in page
    assert "## mps: not measured yet" in page
    assert "| user | 0 |" in page and "doctor:\n\n```\nFluid 0.1\nGPUs  H200\n```\n" in page
    # Figures with several values by the same names are rows of a table.
    assert "| off | 48 | 48 | 2e-06 |" in page and "| mps | 36 | 48 | 2e-06 |" in page
