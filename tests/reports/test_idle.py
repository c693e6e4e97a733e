"""The device time in which nothing ran, by its cause."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluid import Device, FluidExecutor, TrialGroup
from fluid.backends.simulated import SimulatedBackend, Truth
from fluid.cli import main
from fluid.engine.commands import NoteMeasured, NotePlaced, NoteWaiting, ReportEnd, WaitReason
from fluid.engine.events import DeviceAdded
from fluid.reports.analysis.idle import IdleTime
from fluid.reports.page.data import page_data
from fluid.reports.run.loader import load_run
from fluid.trialgroup import Trial, TrialState

Sessions = Callable[..., Any]
DEVICES = [{"index": index} for index in range(2)]


def trial(trial_id: str, budget: int = 1) -> Trial:
    return Trial(print, budget=budget, trial_id=trial_id, profile_key="net")


def idle(path: Path) -> IdleTime:
    found = load_run(path).idle
    assert found is not None
    return found


def test_each_cause_has_its_own_figure(told_run: Path) -> None:
    found = idle(told_run)
    assert found.start == pytest.approx(1.0 + 1.1), "until the first iterations of the two devices"
    assert found.hand_over == pytest.approx(0.1 + 0.1), "c and b are set up on device 1"
    assert found.unreported == pytest.approx(1.0 + 0.1 + 0.6), "b fails twice, and c is stopped"
    assert found.no_trial == pytest.approx(2.0), "device 1 is free until a goes there"
    assert (found.waited, found.ramp_up) == (0.0, 0.0)
    assert found.total == pytest.approx(2 * 10.3)


def test_a_device_that_idles_while_a_trial_waits_is_found(session: Sessions) -> None:
    made = session({"g": [trial("a", 2), trial("b"), trial("wide"), trial("large")]}, devices=DEVICES)
    made.happened(
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        NoteWaiting(0, at=0.0, trial_ids=("b",), width=1.0, reason=WaitReason.DEVICES),
        NoteWaiting(1, at=0.0, trial_ids=("wide",), width=2.0, reason=WaitReason.DEVICES),
        NoteWaiting(2, at=0.0, trial_ids=("large",), width=1.0, reason=WaitReason.MEMORY),
        NotePlaced("b", at=3.0, width=1.0, device_ids=(1,), lane_ids=(1,)),
        ReportEnd("b", "0", state=TrialState.DONE, iteration=1, at=4.0),
    )
    made.results(("a", 1, 0.0, 5.0, 1.0, (0,), {}), ("b", 1, 3.0, 4.0, 1.0, (1,), {}))
    found = idle(made.close())
    assert found.waited == pytest.approx(3.0), "b could have run on device 1 at once"
    assert found.waited_share == pytest.approx(0.3)
    assert found.no_trial == pytest.approx(1.0), "the others do not fit on one device"


def test_packing_that_is_being_measured_is_ramp_up(session: Sessions) -> None:
    made = session({"g": [trial("a", 9), trial("b", 9)]}, devices=DEVICES[:1])
    made.happened(
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        NoteWaiting(0, at=0.0, trial_ids=("b",), width=1.0, reason=WaitReason.DEVICES),
        NoteMeasured("net", at=1.0, seconds=1.0, packing=1, width=1, alpha=1.0, beta=1.0),
        NoteMeasured("net", at=2.0, seconds=1.0, packing=2, width=1, alpha=1.0, beta=1.0),
        NotePlaced("b", at=2.0, width=0.5, device_ids=(0,), lane_ids=(1,)),
    )
    made.results(("a", 1, 0.0, 3.0, 1.0, (0,), {}), ("b", 1, 2.0, 3.0, 0.5, (0,), {}))
    found = idle(made.close())
    assert (found.ramp_up, found.waited) == (pytest.approx(2.0), 0.0)


def test_journals_that_do_not_say_on_which_model_packing_was_measured(session: Sessions) -> None:
    made = session({"g": [trial("a", 9), trial("b", 9)]}, devices=DEVICES[:1])
    made.happened(
        DeviceAdded(0.0, Device(0, model="A100")),
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        NoteWaiting(0, at=0.0, trial_ids=("b",), width=1.0, reason=WaitReason.DEVICES),
        NoteMeasured("net", at=1.0, seconds=1.0, packing=1, width=1, alpha=1.0, beta=1.0),
        NoteMeasured("net", at=2.0, seconds=1.0, packing=2, width=1, alpha=1.0, beta=1.0),
        NotePlaced("b", at=2.0, width=0.5, device_ids=(0,), lane_ids=(1,)),
    )
    made.results(("a", 1, 0.0, 3.0, 1.0, (0,), {}), ("b", 1, 2.0, 3.0, 0.5, (0,), {}))
    assert idle(made.close()).ramp_up == pytest.approx(2.0)


def test_packing_is_being_measured_on_each_model(session: Sessions, capsys: pytest.CaptureFixture[str]) -> None:
    made = session({"g": [trial(name, 9) for name in "abc"]}, devices=DEVICES)
    made.happened(
        *(DeviceAdded(0.0, Device(index, model=model)) for index, model in enumerate(("A100", "H200"))),
        NotePlaced("a", at=0.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        NotePlaced("b", at=0.0, width=1.0, device_ids=(1,), lane_ids=(1,)),
        NoteWaiting(0, at=0.0, trial_ids=("c",), width=1.0, reason=WaitReason.DEVICES),
        NoteMeasured("net", at=1.0, seconds=1.0, packing=1, width=1, alpha=1.0, beta=1.0, model="A100"),
        NoteMeasured("net", at=2.0, seconds=1.0, packing=2, width=1, alpha=1.0, beta=1.0, model="H200"),
        NotePlaced("c", at=3.0, width=0.5, device_ids=(1,), lane_ids=(2,)),
    )
    ran = [
        (name, 1, start, 4.0, 1.0, (device,), {})
        for name, start, device in (("a", 0.0, 0), ("b", 0.0, 1), ("c", 3.0, 1))
    ]
    made.results(*ran)
    path = made.close()
    assert idle(path).ramp_up == pytest.approx(2.0), "on the H200 only; there is room for one on the A100"
    assert main(["why", str(path), "c", "--json"]) == 0
    assert "packing was being measured on H200, up to 2 from 2 s on" in capsys.readouterr().out


def test_no_device_idles_in_the_simulator_while_a_trial_waits(tmp_path: Path) -> None:
    """Twelve trials of four lengths on three devices, on a virtual clock, with the engine that runs real trials."""
    backend = SimulatedBackend(lambda name, config: Truth(seconds=1.0 + config["n"] % 4), [Device(k) for k in range(3)])
    with FluidExecutor(backend=backend, run_dir=tmp_path / "run", packing="off", verbose=0) as executor:
        trials = [Trial(_never_run, {"n": n}, budget=3, trial_id=f"t{n}") for n in range(12)]
        assert executor.submit_trialgroup(TrialGroup(trials)).wait(timeout=60.0)
    run = load_run(tmp_path / "run")
    assert run.idle is not None
    assert (run.idle.waited, run.idle.hand_over, run.idle.start) == (0.0, pytest.approx(0.0), 0.0)
    assert all(run.story_of(each)[-1].text == "done after 3 iterations" for each in run.trials)
    assert sum(line.what == "waited" for each in run.trials for line in run.story_of(each)) >= 9


def _never_run(config: dict[str, Any]) -> Any:
    yield {}


def test_reports_show_the_figures(
    told_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["report", str(told_run)]) == 0
    assert re.search(r"idle while a trial waited +0 s +0\.00 % of the sweep", capsys.readouterr().out)
    assert main(["report", str(told_run), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["idle"]["no_trial_s"] == pytest.approx(2.0)
    assert data["trials"][0]["story"][0]["what"] == "submitted"
    (run,) = page_data([load_run(told_run)])["runs"]
    assert ["idle while a trial waited", "0 s (0.00 %)"] in run["idle"]
