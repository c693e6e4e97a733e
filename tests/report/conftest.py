"""Folders of small sessions, in the format that sessions write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fluid.engine.commands import ReportEnd
from fluid.engine.events import Failure, GroupSubmitted, StopRequested, TrialForgotten, TrialSpec
from fluid.engine.journal import encode
from fluid.planning.profile import Profile
from fluid.session.run_folder import RunFolder
from fluid.trainables.payload import payload_of
from fluid.trialgroup import Search, Trial

#: When sessions begin on their clock; what is read from them begins at 0.
ZERO = 5000.0
#: (trial, iteration, start, end, width, devices, metrics)
Row = tuple[str, int, float, float, float, tuple[int, ...], Any]


def train(config: Mapping[str, Any]) -> Any:
    """Never run here."""


class Session:
    """Writes a session's folder: its groups first, then what happened."""

    def __init__(self, path: Path, groups: Mapping[str, Sequence[Trial]], **facts: Any) -> None:
        self.path = path
        self.group_of: dict[str, str] = {}
        self._folder = RunFolder.create(path)
        began = {"format": 1, "fluid": "0.1.0", "began": "2026-01-31 12:34:56", **facts}
        (path / "session.json").write_text(json.dumps(began), encoding="utf-8")
        self._numbers: dict[str, str] = {}
        for name, trials in groups.items():
            if trials:
                self.submit(name, trials)

    def submit(self, name: str, trials: Sequence[Trial], search: Search | None = None) -> None:
        """Submits a group."""
        group = self._numbers.setdefault(name, str(len(self._numbers)))
        payloads = {each: payload_of(each.trainable, each.config, each.shown and each.shown.config) for each in trials}
        self._folder.write_trials(group, name, payloads, search)
        self.group_of.update((trial.id, group) for trial in trials)
        specs = tuple(TrialSpec(trial.id, trial.budget, profile_key=trial.key) for trial in trials)
        self.happened(GroupSubmitted(0.0, group, specs))

    def happened(self, *items: Any) -> None:
        """Writes events and commands, of which the times begin at 0."""
        for item in items:
            self._write("journal", encode(replace(item, at=ZERO + item.at)))

    def results(self, *rows: Row) -> None:
        """Writes finished iterations."""
        for trial, iteration, start, end, width, devices, metrics in rows:
            fields = {"group": self.group_of[trial], "trial": trial, "iteration": iteration, "metrics": metrics}
            fields.update(seconds=end - start, width=width, devices=devices, at=ZERO + end)
            self._write("results", fields)

    def end(self, trial: str, state: str = "DONE", iteration: int = 1, failure: Failure | None = None) -> None:
        """Writes that a trial ended."""
        self.happened(ReportEnd(trial, self.group_of[trial], state=state, iteration=iteration, at=0.0, failure=failure))

    def stop(self, trial: str, outcome: str | None = None) -> None:
        """Writes that a trial was stopped, and what came of it."""
        self.happened(StopRequested(0.0, trial, outcome))

    def forget(self, trial: str) -> None:
        """Writes that a trial was forgotten."""
        self.happened(TrialForgotten(0.0, trial))

    def close(self, profile: Profile | None = None) -> Path:
        """Ends the session; returns its folder."""
        (profile or Profile()).save(self.path / "profile.json")
        self._folder.close()
        return self.path

    def _write(self, name: str, entry: Mapping[str, Any] | None) -> None:
        with (self.path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


@pytest.fixture
def session(tmp_path: Path) -> Callable[..., Session]:
    """Begins a session, in a folder of the name given."""

    def begin(groups: Mapping[str, Sequence[Trial]], name: str = "run", **facts: Any) -> Session:
        return Session(tmp_path / name, groups, **facts)

    return begin


def trial(trial_id: str, budget: int = 1, **config: Any) -> Trial:
    """A trial that is never run."""
    return Trial(train, config, budget=budget, trial_id=trial_id, profile_key="net")


@pytest.fixture
def small_run(session: Callable[..., Session]) -> Path:
    """Two groups on three devices: packed, wide, resized, stopped and failed trials, and a profile."""
    trials = [trial("a", 3, lr=0.1, act="relu"), trial("b", 2, lr=0.01, act="relu"), trial("c", 2, lr=0.5, act="relu")]
    devices = [{"index": index, "kind": "gpu", "host": "node"} for index in range(3)]
    made = session(
        {"rung 0": trials, "rung 1": [trial("d", 4, lr=0.2, act="relu")]}, planner="portfolio", devices=devices
    )
    made.results(
        ("a", 1, 0.0, 2.0, 0.5, (0,), {"loss": 0.9, "epoch": 1}),
        ("b", 1, 0.0, 3.0, 0.5, (0,), {"loss": 0.8, "epoch": 1, "eval": {"f1": 0.25}}),
        ("c", 1, 0.0, 4.0, 2.0, (1, 2), {"loss": 0.7, "epoch": 1}),
        ("a", 2, 2.0, 4.0, 0.5, (0,), {"loss": 0.5, "epoch": 2}),
        ("b", 2, 3.0, 6.0, 0.5, (0,), {"loss": 0.85, "epoch": 2, "eval": {"f1": 0.5}}),
        ("a", 3, 6.5, 8.0, 2.0, (1, 2), {"loss": 0.4, "epoch": 3, "phase": "last"}),
        ("d", 1, 8.0, 10.0, 3.0, (0, 1, 2), {"loss": 0.3, "epoch": 1}),
    )
    made.end("a", iteration=3)
    made.end("b", iteration=2)
    made.end("c", "FAILED", failure=Failure("error", "ValueError: too <small>"))
    profile = Profile()
    for _ in range(6):
        profile.observe("net", 2.0)
        profile.observe("net", 2.5, co_residents=2)
    return made.close(profile)
