"""Folders of small sessions, in the format that sessions write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fluid.engine.commands import NoteMeasured, NotePlaced, NoteQueued, NoteResize, NoteWaiting, ReportEnd, WaitReason
from fluid.engine.events import (
    PLAIN_TERMS,
    Checkpoint,
    DeviceAdded,
    Failure,
    GroupSubmitted,
    StopRequested,
    TrialForgotten,
    TrialsAdded,
    TrialSaved,
    TrialSpec,
    TrialStarted,
)
from fluid.measure.profile import Profile
from fluid.resources import Device
from fluid.results.journal import encode
from fluid.results.submitted import GroupLine
from fluid.session.folder.folder import RunFolder
from fluid.trainables.payload import payload_of
from fluid.trialgroup import Search, Trial, TrialState

#: When sessions begin on their clock; what is read from them begins at 0.
ZERO = 5000.0
#: What session.json says of that clock.
CLOCK = {"at": ZERO - 1.0, "time": "2026-01-31 12:34:56"}
TRACEBACK = """Traceback (most recent call last):
  File "/lib/fluid/trainables/resident.py", line 60, in step
    metrics = next(self._results)
  File "train.py", line 31, in train
    raise ValueError("loss is nan")
ValueError: loss is nan
"""
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
        began = {"format": 1, "fluid": "0.2.0", "began": "2026-01-31 12:34:56", **facts}
        (path / "session.json").write_text(json.dumps(began), encoding="utf-8")
        self._numbers: dict[str, str] = {}
        for name, trials in groups.items():
            if trials:
                self.submit(name, trials)

    def submit(
        self, name: str, trials: Sequence[Trial], search: Search | None = None, at: float = 0.0, **said: Any
    ) -> None:
        """Submits a group; ``said`` has what its line says besides: ``terms`` and ``requires``."""
        self._numbers.setdefault(name, str(len(self._numbers)))
        group, specs = self._write_trials(name, GroupLine(name, search, **said), trials)
        self.happened(GroupSubmitted(at, group, specs, said.get("terms", PLAIN_TERMS)))

    def add(self, name: str, trials: Sequence[Trial]) -> None:
        """Adds trials to a group."""
        group, specs = self._write_trials(name, GroupLine(name), trials)
        self.happened(TrialsAdded(at=0.0, group_id=group, trials=specs))

    def _write_trials(self, name: str, line: GroupLine, trials: Sequence[Trial]) -> tuple[str, tuple[TrialSpec, ...]]:
        group = self._numbers[name]
        payloads = {each: payload_of(each.trainable, each.config, each.shown and each.shown.config) for each in trials}
        self._folder.write_trials(group, line, payloads)
        self.group_of.update((trial.id, group) for trial in trials)
        return group, tuple(TrialSpec(trial.id, trial.budget, profile_key=trial.key) for trial in trials)

    def happened(self, *items: Any) -> None:
        """Writes events and commands, of which the times begin at 0."""
        for item in items:
            self._write("journal", encode(structs.replace(item, at=ZERO + item.at)))

    def results(self, *rows: Row) -> None:
        """Writes finished iterations."""
        for trial, iteration, start, end, width, devices, metrics in rows:
            fields = {"group": self.group_of[trial], "trial": trial, "iteration": iteration, "metrics": metrics}
            fields.update(seconds=end - start, width=width, devices=devices, at=ZERO + end)
            self._write("results", fields)

    def step(self, trials: Sequence[str], iteration: int, start: float, end: float, device: int = 0) -> None:
        """Writes an iteration that fused trials did in one step, alone on their device."""
        for trial in trials:
            fields = {"group": self.group_of[trial], "trial": trial, "iteration": iteration, "metrics": {"loss": 1.0}}
            fields.update(seconds=end - start, width=1.0 / len(trials), devices=[device], at=ZERO + end)
            self._write("results", {**fields, "rows": len(trials)})

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


@pytest.fixture
def told_run(session: Callable[..., Session]) -> Path:
    """Three trials on two devices: one is widened, one fails twice, one waits and is stopped. The journal tells all."""
    made = session({}, devices=[{"index": index, "kind": "gpu"} for index in range(2)], clock=CLOCK)
    made.happened(*(DeviceAdded(-1.0, Device(index, "localhost", "gpu")) for index in range(2)))
    made.submit("sweep", [trial("a", 6), trial("b", 3), trial("c", 9)], at=-1.0)
    made.happened(
        NotePlaced("a", at=-1.0, width=1.0, device_ids=(0,), lane_ids=(0,)),
        NotePlaced("b", at=-1.0, width=1.0, device_ids=(1,), lane_ids=(1,)),
        NoteWaiting(0, at=-1.0, trial_ids=("c",), width=1.0, reason=WaitReason.DEVICES),
        TrialStarted(0.0, "a", 0, iteration=0, seconds=0.2),
        TrialStarted(0.1, "b", 1, iteration=0, seconds=0.3),
        NoteMeasured("net", at=2.0, seconds=2.0, packing=1, width=2, alpha=1.0, beta=1.0),
        TrialSaved(2.0, "a", 0, Checkpoint(1, "a/1", in_memory=True), seconds=0.004),
        NoteQueued("b", at=3.1, iteration=0, why="failure 1 of 2: ValueError: loss is <nan>", kind="error", failures=1),
        NotePlaced("c", at=3.1, width=1.0, device_ids=(1,), lane_ids=(1,)),
        NoteWaiting(0, at=3.1, trial_ids=("b",), width=1.0, reason=WaitReason.DEVICES),
        TrialStarted(3.2, "c", 1, iteration=0, seconds=0.1),
        StopRequested(5.2, "c"),
        ReportEnd("c", "0", state=TrialState.STOPPED, iteration=1, at=5.3),
        NotePlaced("b", at=5.3, width=1.0, device_ids=(1,), lane_ids=(1,)),
        TrialStarted(5.4, "b", 1, iteration=0, seconds=0.1),
        ReportEnd(
            "b",
            "0",
            state=TrialState.FAILED,
            iteration=0,
            at=6.0,
            failure=Failure("error", "ValueError: loss is <nan>", "Traceback ..."),
        ),
        NoteResize(
            "a", at=8.1, width=2.0, device_ids=(0, 1), seconds=0.1, old_width=1.0, begun_at=ZERO + 6.0, gain=1.9
        ),
        ReportEnd("a", "0", state=TrialState.DONE, iteration=6, at=10.3),
    )
    made.results(
        *(("a", number, 2.0 * number - 2.0, 2.0 * number, 1.0, (0,), {"loss": 1.0 / number}) for number in range(1, 5)),
        ("b", 1, 0.1, 2.1, 1.0, (1,), {"loss": 0.9}),
        ("c", 1, 3.2, 5.2, 1.0, (1,), {"loss": 0.8}),
        ("a", 5, 8.1, 9.2, 2.0, (0, 1), {"loss": 0.2}),
        ("a", 6, 9.2, 10.3, 2.0, (0, 1), {"loss": 0.1}),
    )
    return made.close()


@pytest.fixture
def two_sweeps(session: Callable[..., Session]) -> tuple[Path, Path]:
    """Two sweeps of one space: ``random`` runs 9 trials to their end, ``asha`` stops half of 12 early and one fails."""
    paths = []
    for name, trials, devices in (("asha", 12, 2), ("random", 9, 3)):
        made = session({}, name=name, devices=[{"index": k} for k in range(devices)], clock=CLOCK, closed=ZERO + 30.0)
        largest = 0.1 if name == "asha" else 0.11
        configs = [
            {"lr": round(largest / place, 4), "optimizer": {"name": ("sgd", "adam")[place % 2]}, "data": "digits"}
            for place in range(1, trials + 1)
        ]
        listed = [trial(f"{name}-{place}", 4, **config) for place, config in enumerate(configs)]
        made.submit(name, listed, Search("loss", "min", trials), at=-1.0)
        for place, config in enumerate(configs):
            start, device = 4.0 * (place // devices), place % devices
            done = 2 if name == "asha" and place % 2 else 4
            goal = abs(config["lr"] - 0.02) + (0.01 if name == "random" else 0.0)
            made.results(
                *(
                    (
                        f"{name}-{place}",
                        k,
                        start + k - 1,
                        start + k,
                        1.0,
                        (device,),
                        {"loss": goal + 1.0 / k, "step": k},
                    )
                    for k in range(1, done + 1)
                )
            )
            if (name, place) == ("asha", 3):
                failure = Failure("error", "ValueError: loss is nan", TRACEBACK)
                made.end(f"{name}-{place}", "FAILED", iteration=done, failure=failure)
            else:
                made.end(f"{name}-{place}", "DONE" if done == 4 else "STOPPED", iteration=done)
                made.stop(f"{name}-{place}", TrialState.DONE if done == 4 else TrialState.STOPPED)
        paths.append(made.close())
    return paths[0], paths[1]
