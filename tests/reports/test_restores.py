"""From where trials were restored: of journals, and of a real sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fluid
from fluid import FluidExecutor
from fluid.reports.analysis.restores import restores_of, set_up_words
from fluid.reports.page.data import run_summary
from fluid.reports.run.loader import load_run
from fluid.reports.story.history import RunHistory
from fluid.reports.tables.run import as_json
from fluid.results.iterations import FinishedIterations
from fluid.search import uniform


def started(trial: str, at: float, restoring: list[Any] | None, iteration: int = 1) -> dict[str, Any]:
    fields = {"trial_id": trial, "lane_id": 0, "iteration": iteration, "seconds": 1.0}
    return {"what": "TrialStarted", "at": at, **fields, **({} if restoring is None else {"restoring": restoring})}


def placed(trial: str, at: float, *, resident: bool) -> dict[str, Any]:
    fields = {"trial_id": trial, "width": 1.0, "device_ids": [0], "lane_ids": [0], "iteration": 1}
    return {"what": "NotePlaced", "at": at, "resident": resident, **fields}


def submitted(*trials: str) -> dict[str, Any]:
    specs = [{"trial_id": trial, "profile_key": "net"} for trial in trials]
    return {"what": "GroupSubmitted", "at": 0.0, "group_id": "0", "trials": specs}


def history(*entries: dict[str, Any]) -> RunHistory:
    found = RunHistory(FinishedIterations())
    found.extend(entries)
    return found


def test_restores_are_counted_by_source_and_saved_seconds_measured() -> None:
    restores = restores_of(
        history(
            submitted("a", "b"),
            started("a", 1.0, None, iteration=0),  # It began afresh.
            started("a", 2.0, ["disk", 4.0, 100]),
            started("b", 3.0, ["disk", 2.0, 100]),
            started("a", 4.0, ["memory", 0.5, 100]),
            placed("a", 5.0, resident=True),
            placed("b", 6.0, resident=True),  # It was fetched from its lane after all.
            started("b", 7.0, ["host", 1.0, 100]),
        )
    )
    assert {source: each.number for source, each in restores.sources.items()} == {
        "device": 1,
        "memory": 1,
        "disk": 2,
        "host": 1,
    }
    assert restores.hit_rate == pytest.approx(0.4)
    assert restores.saved_s == pytest.approx(3.0 + 2.5) and not restores.is_estimated
    assert restores.text == (
        "5 restores: 1 on the device, 1 in host memory (0.5 s each), 2 on disk (3 s each), 1 on another host"
        " (1 s each); 40 % without a disk, which saved 5.5 s"
    )
    assert restores.bytes == 400


def test_without_a_restore_from_disk_the_bytes_tell() -> None:
    restores = restores_of(history(submitted("a"), started("a", 1.0, ["memory", 0.5, 200_000_000])))
    assert restores.saved_s == pytest.approx(0.5) and restores.text.endswith("as estimated from the bytes")


def test_journals_that_do_not_tell_are_passed_over() -> None:
    restores = restores_of(history(submitted("a"), started("a", 1.0, None), placed("a", 2.0, resident=True)))
    assert restores.unknown == 1 and restores.text == ""
    assert restores_of(history(submitted("a"))).text == ""
    bad = restores_of(history(submitted("a"), started("a", 1.0, ["moon", 1.0, 1]), started("a", 2.0, ["disk", "x", 1])))
    assert bad.unknown == 2


def test_a_story_says_from_where() -> None:
    assert set_up_words(0, {"seconds": 1.0}) == "set up in 1 s"
    assert set_up_words(3, {"seconds": 1.0}) == "restored in 1 s"
    text = set_up_words(3, {"seconds": 1.0, "restoring": ["memory", 0.5, 2**20]})
    assert text == "restored from host memory in 1 s, of which reading 1 MiB took 0.5 s"


class Counter:
    """Its state is its number of steps, and some bytes."""

    def setup(self, config: dict[str, Any]) -> None:
        self.config, self.steps = config, 0

    def step(self) -> dict[str, Any]:
        self.steps += 1
        return {"loss": self.config["x"] + 1.0 / self.steps}

    def save_checkpoint(self, folder: str) -> None:
        Path(folder, "state").write_bytes(self.steps.to_bytes(4, "little") + bytes(10_000))

    def load_checkpoint(self, folder: str) -> None:
        self.steps = int.from_bytes(Path(folder, "state").read_bytes()[:4], "little")


@pytest.mark.slow
def test_a_sweep_finds_promoted_trials_in_memory(tmp_path: Path) -> None:
    # A device whose trials share lanes keeps eight states: the first leave it before some of them are promoted.
    with FluidExecutor("local", 1, run_dir=tmp_path, packing="off", isolation="lane", verbose=0) as executor:
        fluid.run(
            Counter,
            {"x": uniform(0.0, 1.0)},
            metric="loss",
            mode="min",
            algorithm="sha",
            samples=27,
            budget=9,
            seed=1,
            executor=executor,
        )
    run = load_run(tmp_path)
    found = run.restores
    assert found.sources.keys() <= {"device", "memory"} and found.hit_rate == 1.0 and found.unknown == 0
    assert found.sources["memory"].number >= 2 and found.bytes > 10_000
    assert as_json(run)["restores"]["by_source"]["memory"]["number"] == found.sources["memory"].number
    assert ["restores", found.text] in run_summary(run, "run")["facts"]
    assert "restored from host memory" in "".join(line.text for story in run.stories.values() for line in story)
