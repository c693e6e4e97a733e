"""``fluid rehearse``: a script's sweeps on a virtual clock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.cli import main
from fluid.commands.rehearse import figures_json
from fluid.rehearsal import RehearsalPlan, ReplayedIteration, rehearsing
from fluid.rehearsal.outcome import SweepOutcome
from fluid.reports.tables.rehearsal import RehearsedFigures, calibration_as_json
from tests.json_fields import undescribed

ROOT = Path(__file__).resolve().parents[1]
Captured = pytest.CaptureFixture[str]

MODEL = """
import sys
import fluid
from fluid.rehearsal import ReplayedIteration


class Model:
    def __init__(self, config):
        raise AssertionError("a rehearsal makes no trainable")

    def step(self):
        raise AssertionError

    @staticmethod
    def replay(config, iterations):
        return [ReplayedIteration({"loss": config["lr"] / i}, seconds=360.0) for i in iterations]
"""
SWEEP = (
    MODEL
    + """
samples = int(sys.argv[1]) if len(sys.argv) > 1 else 8
with fluid.FluidExecutor(backend="local", devices=1, run_dir="never", packing="off", max_width=1):
    result = fluid.run(Model, {"lr": fluid.search.uniform(0.1, 1.0)}, metric="loss", samples=samples, budget=9)
print("best", result.best.value)
"""
)
GROUPS = (
    MODEL
    + """
with fluid.FluidExecutor(packing="off", max_width=1, verbose=0) as executor:
    for rung in range(2):
        trials = [fluid.Trial(Model, {"lr": 0.1 * (k + 1)}, budget=2) for k in range(4)]
        executor.submit_trialgroup(fluid.TrialGroup(trials, name=f"rung-{rung}")).wait()
space = {"lr": fluid.search.uniform(0.1, 1.0)}
with fluid.FluidExecutor(packing="off", max_width=1, verbose=0):
    fluid.run(Model, space, metric="loss", samples=int(sys.argv[1]), budget=3, name=sys.argv[2])
"""
)
FUNCTION = """
import fluid
def train(config):
    yield {"loss": config["lr"]}
fluid.run(train, {"lr": fluid.search.uniform(0.1, 1.0)}, metric="loss", samples=3, budget=2)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a script, in the working folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("FLUID_RUNS", str(tmp_path / "fluid_runs"))

    def write(text: str) -> str:
        (tmp_path / "sweep.py").write_text(text)
        return "sweep.py"

    return write


def refusal(capsys: Captured, *arguments: str) -> str:
    """What is said on stderr when the command is refused."""
    assert main(["rehearse", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.mark.slow
def test_a_sweep_on_several_numbers_of_devices(script: Callable[[str], str], tmp_path: Path, capsys: Captured) -> None:
    asked = ["--devices", "1,4", "--price", "2.5", "--seeds", "2", "--out", "out", "--record"]
    written = ["--json", "a.json", "--png", "a.png"]
    assert main(["rehearse", script(SWEEP), "12", *asked, *written]) == 0
    printed = capsys.readouterr().out
    assert "Model-asha: 12 trials, rehearsed on a virtual clock" in printed
    assert "Knee: adding devices pays up to 4." in printed
    assert "For real, on 4 devices, FluidExecutor(devices=4): python sweep.py 12" in printed
    assert "Trials: the trainable itself" in printed
    assert "overheads: none: scaling and moves cost nothing; trials are not packed" in printed
    assert not (tmp_path / "never").exists()  # Nothing was run for real.
    figures = json.loads((tmp_path / "a.json").read_text())
    (sweep,) = figures["sweeps"]
    fields = {*figures, *sweep, *sweep["rows"][0], *sweep["rows"][0]["seeds"][0]}
    assert undescribed(fields, figures_json, RehearsedFigures.as_json) == set()
    assert (sweep["metric"], sweep["mode"], sweep["knee"]) == ("loss", "min", 4)
    one, four = sweep["rows"]
    assert (one["devices"], four["devices"]) == (1, 4)
    assert len(one["seeds"]) == 2
    assert one["makespan_s"]["median"] > 1.6 * four["makespan_s"]["median"]
    assert one["cost_usd"]["median"] == pytest.approx(2.5 * one["device_hours"]["median"])
    # Another seed draws other configs.
    assert one["seeds"][0]["best"] != one["seeds"][1]["best"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "best" in (tmp_path / "out" / "1-devices-seed-0" / "output.log").read_text()
    recorded = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    outcome = SweepOutcome.from_json(recorded["sweeps"][0]["outcomes"]["4"][0])
    assert (outcome.trials, outcome.devices, outcome.makespan_s) == (12, 4, four["seeds"][0]["makespan_s"])
    # The rehearsal's own run folder is what it predicts: nothing differs.
    capsys.readouterr()
    run = str(tmp_path / "out" / "4-devices-seed-0" / "runs" / "1")
    assert main(["rehearse", "--calibrate", run, "--against", "out", "--json", "-"]) == 0
    (calibration,) = json.loads(capsys.readouterr().out)["calibrations"]
    assert calibration["same_decisions"] == 1.0
    assert undescribed(calibration, calibration_as_json) == set()
    assert all(figure["error"] == 0.0 for figure in calibration["figures"].values() if figure["real"])
    assert main(["rehearse", "--calibrate", run, "--against", "out", "--json", "none/a.json"]) == 2
    assert "json='none/a.json': cannot be written: No such file" in capsys.readouterr().err
    assert main(["rehearse", "--calibrate", run, "--against", "out/rehearsal.json"]) == 0
    assert "Decisions: 12 of 12 trials reached the same iteration (100 %)" in capsys.readouterr().out


def test_several_executors_are_reported_each(script: Callable[[str], str], capsys: Captured) -> None:
    asked = ["--devices", "2", "--json", "-", "--metric", "loss"]
    assert main(["rehearse", script(GROUPS), *asked, "--", "5", "--name"]) == 0
    rungs, sweep = json.loads(capsys.readouterr().out)["sweeps"]
    # Groups that no search submitted are one sweep; the script got its arguments.
    assert (rungs["name"], rungs["rows"][0]["seeds"][0]["trials"]) == ("rung-0, rung-1", 8)
    assert (sweep["name"], sweep["rows"][0]["seeds"][0]["trials"]) == ("--name", 5)
    # Four trials of two iterations of 6 min on two devices, twice.
    assert rungs["rows"][0]["makespan_s"]["median"] == pytest.approx(2 * 1440.0)


@pytest.mark.slow
def test_an_earlier_run_replays_its_trials(script: Callable[[str], str], tmp_path: Path, capsys: Captured) -> None:
    plan = RehearsalPlan(devices=2, source=_Source(), folder=tmp_path / "runs")
    space = {"lr": fluid.search.uniform(0.1, 1.0)}
    with rehearsing(plan):
        fluid.run(_never, space, metric="loss", samples=9, budget=2)
    asked = ["--from", str(tmp_path / "runs" / "1"), "--devices", "1", "--epsilon", "3", "--json", "-"]
    assert main(["rehearse", script(FUNCTION), *asked]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["sweeps"][0]["rows"][0]["best"]["median"] == 1.0
    assert any("epsilon 3" in line and "given" in line for line in figures["assumptions"])
    assert figures["source"] == f"run folder {tmp_path / 'runs' / '1'}"
    assert any("9 trials" in line for line in figures["assumptions"])  # What the source tells of itself.


def test_what_cannot_be_replayed(script: Callable[[str], str], capsys: Captured) -> None:
    said = refusal(capsys, script(FUNCTION), "--devices", "1,2,4")
    assert "cannot be replayed" in said
    assert "give --from RUN or --benchmark NAME" in said


def test_a_script_without_an_executor(script: Callable[[str], str], capsys: Captured) -> None:
    said = refusal(capsys, script("print(sum(range(10)))"))
    assert "has made no FluidExecutor" in said


def test_a_script_that_fails(script: Callable[[str], str], capsys: Captured) -> None:
    said = refusal(capsys, script("raise RuntimeError('no such data')"), "--out", "out")
    assert "  | RuntimeError: no such data" in said
    assert "sweep.py on 1 device failed with exit status 1" in said
    assert "output.log" in said


@pytest.mark.slow
@pytest.mark.parametrize("last", ["result.best.load_checkpoint()", "open(result.best.checkpoint)"])
def test_a_script_that_loads_a_checkpoint_behind_its_sweep(
    script: Callable[[str], str], capsys: Captured, last: str
) -> None:
    assert main(["rehearse", script(f"{SWEEP}\n{last}\n"), "--devices", "1,2", "--json", "-"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [row["seeds"][0]["trials"] for row in figures["sweeps"][0]["rows"]] == [8, 8]
    assert "sweep.py failed after its sweeps on 1 device: " in figures["assumptions"][-1]
    assert "a rehearsal leaves no checkpoints" in figures["assumptions"][-1]


@pytest.mark.parametrize(
    ("script_text", "said"),
    [
        (SWEEP.replace('metric="loss"', 'metric="error"'), "metric"),  # Raised within the sweep.
        (SWEEP.replace('"loss": config["lr"] / i', '"loss": config["rate"] / i'), "SweepFailedError"),
        (
            GROUPS.replace(".wait()", "; next(iter(handle.results())); raise ValueError('mid')").replace(
                "executor.submit", "handle = executor.submit"
            ),
            "ValueError: mid",
        ),
        (f"{SWEEP}\nraise fluid.FluidError('from a future')", "from a future"),  # Raised by another thread of Fluid's.
    ],
    ids=["no such metric", "all trials failed", "broken off", "error of another thread"],
)
def test_a_script_that_fails_in_a_sweep(
    script: Callable[[str], str], capsys: Captured, script_text: str, said: str
) -> None:
    refused = refusal(capsys, script(script_text), "--devices", "1")
    assert "sweep.py on 1 device failed with exit status 1" in refused
    assert said in refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "script=None: must be named"),
        (["none.py"], "is not a file"),
        (["sweep.py", "--devices", "a"], "must be numbers of devices"),
        (["sweep.py", "--devices", "0"], "devices=0"),
        (["sweep.py", "--seeds", "0"], "seeds=0"),
        (["sweep.py", "--jobs", "0"], "jobs=0"),
        (["sweep.py", "--price", "-1"], "price=-1"),
        (["sweep.py", "--planner", "best"], "planner='best'"),
        (["sweep.py", "--mode", "min"], "mode='min'"),
        (["sweep.py", "--png", "a.txt"], "png='a.txt'"),
        (["sweep.py", "--from", "none"], "from='none'"),
        (["sweep.py", "--data", "."], "needs --benchmark"),
        (["sweep.py", "--against", "."], "needs --calibrate"),
        (["sweep.py", "--from", "run", "--benchmark", "lcbench:3"], "cannot be with --from"),
        (["sweep.py", "--out", "."], "holds something already"),
        (["--calibrate", "none", "--against", "none"], "does not exist"),
        (["sweep.py", "--calibrate", "none", "--devices", "2"], "they are those of the run"),
        (["sweep.py", "--calibrate", "none", "--png", "a.png"], "png='a.png': cannot be with --calibrate"),
        (["sweep.py", "--calibrate", "none", "--price", "2"], "price=2.0: cannot be with --calibrate"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    script: Callable[[str], str], capsys: Captured, arguments: list[str], said: str
) -> None:
    script("raise AssertionError")
    assert said in refusal(capsys, *arguments)


def test_an_overhead_that_cannot_be(script: Callable[[str], str], capsys: Captured) -> None:
    assert "alpha=0.5" in refusal(capsys, script(SWEEP), "--alpha", "0.5")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((text, "is not what fluid rehearse --record wrote") for text in ("{}", "[1]", "no JSON")),
        ('{"format": 1, "outcomes": {}}', "compares algorithms on a benchmark: give the rehearsal of a script"),
    ],
)
def test_against_something_else(
    script: Callable[[str], str], tmp_path: Path, capsys: Captured, content: str, why: str
) -> None:
    plan = RehearsalPlan(devices=1, source=_Source(), folder=tmp_path / "runs")
    with rehearsing(plan), fluid.FluidExecutor(verbose=0) as executor:
        executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(_never, {})])).wait()
    (tmp_path / "other.json").write_text(content)
    said = refusal(capsys, "--calibrate", str(tmp_path / "runs" / "1"), "--against", str(tmp_path / "other.json"))
    assert why in said


class _Source:
    def replay(self, config: Any, iterations: range) -> Any:
        return [ReplayedIteration({"loss": 1.0}, 1.0) for _ in iterations]


def _never(config: Any) -> Any:
    raise AssertionError
    yield {}


@pytest.mark.slow
def test_ctrl_c_ends_it_and_its_processes(script: Callable[[str], str], tmp_path: Path) -> None:
    name = script("import os, time\nopen('pid', 'w').write(str(os.getpid()) + ' ')\ntime.sleep(600)\n")
    command = [sys.executable, "-m", "fluid.cli", "rehearse", name]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        pid = tmp_path / "pid"
        try:
            while not (pid.is_file() and pid.read_text().endswith(" ")) and process.poll() is None:
                signal.sigtimedwait([], 0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


@pytest.mark.slow
@pytest.mark.ray
def test_a_tune_script_without_fluid(script: Callable[[str], str], capsys: Captured) -> None:
    said = refusal(capsys, script("from ray import tune\n"))
    assert "has made no FluidExecutor" in said
    assert "fluid.tune.run and fluid.tune.Tuner take what ray.tune's do" in said
