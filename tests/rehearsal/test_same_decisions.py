"""A rehearsal decides as the run from which it is: widths, packs, and how many devices are held when."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid.rehearsal import (
    FusedRates,
    Overheads,
    RehearsalBackend,
    RehearsalPlan,
    ReplayedFusion,
    ReplayedIteration,
    recorded,
    rehearsing,
)
from fluid.rehearsal.outcome import outcome_of
from fluid.results.run_files import JsonLines

RATES = FusedRates((1, 2, 4, 8), (1.0, 1.1, 1.3, 2.2))


class Shaped:
    """Its trials are fused by width; wide ones take longer."""

    fluid_elastic = fluid_fusible = True

    @staticmethod
    def replay(config: Mapping[str, Any], iterations: range) -> list[ReplayedIteration]:
        return [ReplayedIteration({"loss": config["lr"] / i}, float(config["width"])) for i in iterations]

    @staticmethod
    def fusion(config: Mapping[str, Any]) -> ReplayedFusion:
        return ReplayedFusion(f"width {config['width']}", RATES)


class Unknown:
    """The same trainable without what tells how it is replayed: a run does."""

    fluid_elastic = fluid_fusible = True

    def step(self) -> dict[str, float]:
        raise AssertionError("it is replayed, not run")

    def save_checkpoint(self, folder: str) -> None: ...

    def load_checkpoint(self, folder: str) -> None: ...


class Alone(Shaped):
    fluid_fusible = False


class Narrow:
    """Says nothing of whether it is elastic."""

    replay = staticmethod(Shaped.replay)


class Fusible(Narrow):
    fluid_fusible = True
    fusion = staticmethod(Shaped.fusion)


class Rigid(Narrow):
    fluid_elastic = False


def group(trainable: Any, trials: int = 16, budget: int = 40) -> fluid.TrialGroup:
    made = [
        fluid.Trial(trainable, {"lr": 0.1 * i, "width": 32 * (1 + i % 2)}, budget=budget, trial_id=f"t{i}")
        for i in range(trials)
    ]
    return fluid.TrialGroup(made)


def decisions(run_dir: Path) -> list[tuple[str, int, int, float, tuple[int, ...]]]:
    """Of each iteration, in order: the trial, its number, the trials in its step, its width and its devices."""
    lines = [json.loads(line) for line in (run_dir / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        (one["trial"], one["iteration"], one.get("rows", 1), one["width"], tuple(one["devices"]))
        for one in lines
        if "iteration" in one
    ]


def held(run_dir: Path) -> list[tuple[str, int, float]]:
    """Devices that came, were told to retire and left: what, which and when, seconds."""
    entries = [line.entry for line in JsonLines(run_dir / "journal.jsonl").there()]
    return [
        (entry["what"], entry.get("device_id", (entry.get("device") or {}).get("index")), round(entry["at"], 3))
        for entry in entries
        if entry["what"] in ("DeviceAdded", "DeviceRetiring", "NoteDeviceLost")
    ]


def run(run_dir: Path, trials: fluid.TrialGroup, devices: int = 2, **options: Any) -> fluid.FluidExecutor:
    backend = RehearsalBackend(devices, overheads=options.pop("overheads", Overheads()))
    with fluid.FluidExecutor(backend, run_dir=run_dir, verbose=0, **options) as executor:
        executor.submit_trialgroup(trials).wait()
    return executor


def rehearse(run_dir: Path, source: Any, trials: fluid.TrialGroup, devices: int = 2, **options: Any) -> None:
    plan = RehearsalPlan(devices=devices, source=source, overheads=source.overheads)
    with rehearsing(plan), fluid.FluidExecutor(run_dir=run_dir, verbose=0, **options) as executor:
        executor.submit_trialgroup(trials).wait()


def test_a_rehearsal_fuses_the_trials_that_the_run_has_fused(tmp_path: Path) -> None:
    run(tmp_path / "run", group(Shaped), max_width=1)
    source = recorded(tmp_path / "run", metric="loss")
    rehearse(tmp_path / "again", source, group(Unknown), max_width=1)
    first, second = decisions(tmp_path / "run"), decisions(tmp_path / "again")
    assert max(rows for _, _, rows, _, _ in first) == 8
    assert second == first
    assert outcome_of(tmp_path / "again").makespan_s == pytest.approx(outcome_of(tmp_path / "run").makespan_s, rel=0.02)
    said = "fused trials take, in times of the seconds of one alone: 2 rows 1.1, 4 rows 1.3, "
    assert any(line.startswith(said) and line.endswith(", 8 rows 2.2") for line in source.describe())
    # Alone, each trial takes its own seconds, whatever pack it was recorded in.
    assert [one.seconds for one in source.replay({"lr": 0.0, "width": 32}, range(1, 41))] == pytest.approx([32.0] * 40)


def test_a_config_that_was_not_run_fuses_with_those_of_its_shape(tmp_path: Path) -> None:
    run(tmp_path / "run", group(Shaped), max_width=1)
    source = recorded(tmp_path / "run", metric="loss")
    known, like, unlike = (source.fusion({"lr": lr, "width": width}) for lr, width in ((0.1, 64), (9.0, 64), (9.0, 96)))
    assert known is not None and like is not None and unlike is not None
    assert like == known
    assert unlike.key != known.key
    assert unlike.rates.stretch(8) == pytest.approx(2.2)


def test_what_fusing_takes_is_not_known_from_a_run_without_packs(tmp_path: Path) -> None:
    run(tmp_path / "run", group(Shaped), max_width=1, max_fused=1)
    source = recorded(tmp_path / "run", metric="loss")
    assert source.fusion({"lr": 0.1, "width": 64}) is None
    assert any("not fused" in line for line in source.describe())
    rehearse(tmp_path / "again", source, group(Unknown), max_width=1)
    assert {rows for _, _, rows, _, _ in decisions(tmp_path / "again")} == {1}


def test_trials_that_cannot_be_fused_are_not_whatever_the_run_did(tmp_path: Path) -> None:
    run(tmp_path / "run", group(Shaped), max_width=1)
    rehearse(tmp_path / "again", recorded(tmp_path / "run", metric="loss"), group(Alone), max_width=1)
    assert {rows for _, _, rows, _, _ in decisions(tmp_path / "again")} == {1}


def test_trials_that_are_only_replayed_are_fused_without_being_elastic(tmp_path: Path) -> None:
    run(tmp_path / "run", group(Fusible), packing="fused")
    assert all(width <= 1.0 for _, _, _, width, _ in decisions(tmp_path / "run"))
    assert max(rows for _, _, rows, _, _ in decisions(tmp_path / "run")) == 8


def test_fusion_that_is_none_fails_the_trial(tmp_path: Path) -> None:
    class Wrong(Shaped):
        @staticmethod
        def fusion(config: Mapping[str, Any]) -> Any:
            return "width"

    with fluid.FluidExecutor(backend="simulated", run_dir=tmp_path / "run", verbose=0, max_failures=0) as executor:
        handle = executor.submit_trialgroup(group(Wrong, trials=1))
        handle.wait()
    (failure,) = handle.failures.values()
    assert failure.message == "InvalidFieldError: fusion='width': must return a ReplayedFusion or None"


@pytest.mark.parametrize(
    ("trainable", "options", "wide"),
    [
        (Narrow, {"max_width": 4}, True),
        (Narrow, {}, False),
        (Narrow, {"max_width": 1}, False),
        (Rigid, {"max_width": 4}, False),
        (Alone, {}, True),
        (Alone, {"max_width": 1}, False),
    ],
)
def test_what_a_replayed_trainable_says_or_the_user_gives_decides_on_widths(
    tmp_path: Path, trainable: Any, options: dict[str, Any], wide: bool
) -> None:
    overheads = Overheads(beta=1.05, epsilon=1.0)
    run(tmp_path / "run", group(trainable, trials=1), 4, overheads=overheads, **options)
    assert (max(width for *_, width, _ in decisions(tmp_path / "run")) > 1.0) is wide


def test_a_rehearsal_widens_as_the_run_did(tmp_path: Path) -> None:
    overheads = Overheads(beta=1.05, epsilon=1.0)
    run(tmp_path / "run", group(Alone, trials=3), 4, overheads=overheads)
    source = recorded(tmp_path / "run", metric="loss")
    assert (source.overheads.beta, source.overheads.epsilon) == pytest.approx((1.05, 1.0))
    rehearse(tmp_path / "again", source, group(Alone, trials=3), 4)
    assert max(width for *_, width, _ in decisions(tmp_path / "run")) == 4.0
    assert decisions(tmp_path / "again") == decisions(tmp_path / "run")


@pytest.mark.parametrize(
    "goals",
    [
        {"deadline": "2h"},
        {"deadline": "3h", "price_per_device_hour": 2.0},
        {"budget_usd": 4.0, "price_per_device_hour": 2.0},
    ],
    ids=["deadline", "price", "budget"],
)
def test_a_rehearsal_gives_devices_back_when_the_run_did(tmp_path: Path, goals: dict[str, Any]) -> None:
    run(tmp_path / "run", group(Alone, trials=5, budget=30), 4, max_width=1, **goals)
    rehearse(
        tmp_path / "again", recorded(tmp_path / "run", metric="loss"), group(Alone, 5, 30), 4, max_width=1, **goals
    )
    first = held(tmp_path / "run")
    assert any(what == "NoteDeviceLost" for what, _, _ in first)
    assert held(tmp_path / "again") == first
    real, rehearsed = outcome_of(tmp_path / "run"), outcome_of(tmp_path / "again")
    assert rehearsed.device_hours == pytest.approx(real.device_hours)
    assert rehearsed.device_hours < 4 * rehearsed.makespan_s / 3600.0  # Fewer than all of them, all of the time.
