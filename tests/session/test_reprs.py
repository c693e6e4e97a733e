from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.executor import FluidExecutor
from fluid.resources import Device
from fluid.session.handle import executor_facts
from fluid.trialgroup import Search, Trial, TrialGroup


def train(config: dict[str, Any]) -> Iterator[dict[str, float]]:
    for step in range(1, config.get("steps", 3) + 1):
        yield {"loss": config["lr"] / step}


def test_a_handle_shows_its_group(tmp_path: Path) -> None:
    with FluidExecutor("local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        trials = [Trial(train, {"lr": lr}, budget=2, trial_id=f"t{lr}") for lr in (0.5, 0.2)]
        group = TrialGroup(trials, name="<sweep>", search=Search("loss", "min", extends=False))
        handle = executor.submit_trialgroup(group)
        handle.wait()
        facts = f"2 trials: 2 done; best loss 0.1 (less is better), t0.2, iteration 2; run folder {tmp_path}/run"
        shown = f"<TrialGroupHandle '<sweep>'; {facts}>"
        assert repr(handle) == shown
        assert repr(executor) == f"<FluidExecutor devices: cpu 0; groups: <sweep>; run folder: {tmp_path}/run>"
        html = handle._repr_html_()
        assert "&lt;sweep&gt;" in html and "<sweep>" not in html
        assert "{&#x27;lr&#x27;: 0.2}" in html and "loss 0.1 (less is better), t0.2, iteration 2" in html
        assert ">4<" in html, "iterations; those of a search are known at its end only"
    assert repr(handle) == shown, "also once the executor is closed"
    assert repr(executor) == f"<FluidExecutor devices: closed; groups: <sweep>; run folder: {tmp_path}/run>"
    assert f"{tmp_path}/run" in executor._repr_html_()


@pytest.mark.slow
def test_trials_that_a_closed_executor_has_dropped_are_interrupted(tmp_path: Path) -> None:
    with FluidExecutor("local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, {"lr": 1.0, "steps": 10**9}, budget=10**9)]))
        next(handle.results())
        assert "1 trial: 1 running; best loss " in repr(handle)
    assert "1 trial: 1 interrupted; best loss " in repr(handle)


def test_of_many_groups_and_devices_the_first_are_named() -> None:
    devices = [Device(index, kind="gpu") for index in range(100)]
    facts = executor_facts(devices, [f"rung-{number}" for number in range(9)], Path("run"))
    assert facts["devices"] == "gpu 0, gpu 1, gpu 2, gpu 3, gpu 4, gpu 5, gpu 6, gpu 7, and 92 more"
    assert facts["groups"].endswith("rung-7, and 1 more")
    assert executor_facts([], [], Path("run"))["groups"] == "none"
