"""The folder of one session: its journal, its results, and what is needed to resume it after a crash.

session.json      what the session is: version, planner, devices, when it began
journal.jsonl     one line per event and decision, as fluid.engine.journal encodes it, in order
results.jsonl     one line per finished iteration: group, trial, iteration, metrics, seconds, width, devices, at
trials.jsonl      one line per group: group, name, search; one per trial: group, trial, config (as JSON where
                  possible), and the name by which reports show it
payloads.pkl      trainables and configs, pickled, for resuming
profile.json      measured overheads and paces, written at the end
logs/             what trials printed
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fluid._clock import timestamp
from fluid._version import __version__
from fluid.engine.commands import Command, Report
from fluid.engine.events import Event
from fluid.engine.journal import encode
from fluid.errors import InvalidFieldError
from fluid.planning.profile import Profile
from fluid.trainables.json_form import json_form
from fluid.trainables.payload import TrialPayload
from fluid.trainables.pickling import plain_metrics
from fluid.trialgroup import Search, Trial

DEFAULT_HOME = "~/fluid_runs"
FORMAT = 1
_PAYLOADS = "payloads.pkl"


class RunFolder:
    """Writes a session's files. Lines are written whole, and flushed before the engine's commands are executed.

    Args:
        path: the folder; it exists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = timestamp()
        (path / "logs").mkdir(exist_ok=True)
        self._journal = _open(path / "journal.jsonl")
        self._results = _open(path / "results.jsonl")
        self._trials = _open(path / "trials.jsonl")
        self._payloads: IO[bytes] = (path / _PAYLOADS).open("ab")
        #: Trainables written so far, by their pickles: each is written once, before the first trial that has it.
        self._trainables: dict[bytes, int] = {}
        #: Groups whose line was written.
        self._groups: set[str] = set()

    @classmethod
    def create(cls, path: str | Path | None) -> RunFolder:
        """Makes the folder; ``None`` for a new one in ``$FLUID_RUNS`` or ``~/fluid_runs``."""
        if path is None:
            home = Path(os.environ.get("FLUID_RUNS", DEFAULT_HOME)).expanduser()
            path = home / f"{timestamp().replace(':', '').replace(' ', '-')}-{secrets.token_hex(3)}"
        folder = Path(path).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder)

    def write_session(self, **facts: Any) -> None:
        """Writes what the session is, in place of what was written before."""
        content = {"format": FORMAT, "fluid": __version__, "began": self._began, "pid": os.getpid(), **facts}
        (self.path / "session.json").write_text(json.dumps(content, indent=1, default=repr), encoding="utf-8")

    def write_trials(
        self, group_id: str, name: str, trials: Mapping[Trial, TrialPayload], search: Search | None = None
    ) -> None:
        """Writes submitted trials, and the line of their group before the first of them.

        Args:
            group_id: the group's id.
            name: its name.
            trials: the trials, each with its pickles.
            search: what its search algorithm said of it.
        """
        frames = [frame for trial, payload in trials.items() for frame in self._frames(group_id, name, trial, payload)]
        self._payloads.write(b"".join(map(pickle.dumps, frames)))
        self._payloads.flush()
        if group_id not in self._groups:
            self._groups.add(group_id)
            self._trials.write(_line({"group": group_id, "name": name, **({} if search is None else asdict(search))}))
        for trial, payload in trials.items():
            self._trials.write(_line({"group": group_id, "trial": trial.id, **_facts(trial, payload)}))
        self._trials.flush()

    def journal(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Writes what happened and what the engine decided."""
        items: list[Event | Command] = [*events, *commands]
        entries = [entry for item in items if (entry := encode(item)) is not None]
        if entries:
            self._journal.write("".join(map(_line, entries)))
            self._journal.flush()
        reports = [command for command in commands if isinstance(command, Report)]
        if reports:
            self._results.write("".join(_line(_result(report)) for report in reports))
            self._results.flush()

    def write_profile(self, profile: Profile) -> None:
        """Writes what was measured."""
        profile.save(self.path / "profile.json")

    def close(self) -> None:
        """Closes the files."""
        for file in (self._journal, self._results, self._trials, self._payloads):
            file.close()

    def _frames(self, group_id: str, name: str, trial: Trial, payload: TrialPayload) -> Iterator[dict[str, Any]]:
        """What ``payloads.pkl`` gets for a trial: the trainable, if it is new, then the trial."""
        pickled = payload.trainable.pickled
        if pickled not in self._trainables:
            self._trainables[pickled] = len(self._trainables)
            yield {"trainable": self._trainables[pickled], "pickled": pickled}
        fields = {
            "budget": trial.budget,
            "priority": trial.priority,
            "trial_id": trial.id,
            "profile_key": trial.key,
            "max_width": trial.max_width,
            "memory": trial.memory,
            "retry_errors": trial.retry_errors,
            "follow_up_iterations": trial.follow_up_iterations,
        }
        yield {
            "group": group_id,
            "name": name,
            "uses": self._trainables[pickled],
            "config": payload.config,
            "fields": fields,
        }


def read_trials(folder: Path) -> Iterator[tuple[str, str, Trial]]:
    """Gives (group id, group name, trial) in the order written; a last entry that was cut off is skipped.

    Raises:
        InvalidFieldError: the folder has no such file.
    """
    path = folder / _PAYLOADS
    if not path.is_file():
        raise InvalidFieldError("run_dir", str(folder), f"has no {_PAYLOADS}, so it cannot be resumed")
    trainables: dict[int, Any] = {}
    with path.open("rb") as file:
        while True:
            try:
                frame = pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return
            if "pickled" in frame:
                trainables[frame["trainable"]] = pickle.loads(frame["pickled"])
            else:
                trial = Trial(trainables[frame["uses"]], pickle.loads(frame["config"]), **frame["fields"])
                yield frame["group"], frame["name"], trial


def _facts(trial: Trial, payload: TrialPayload) -> dict[str, Any]:
    """What reports show of a trial."""
    facts = {"config": payload.shown_config, "key": trial.key}
    if trial.shown is None:
        return facts
    shown = {"shown": trial.shown.trial_id, "iterations": trial.shown.iterations, "metrics": trial.shown.metrics}
    return {**facts, **shown}


def _result(report: Report) -> dict[str, Any]:
    return {
        "group": report.group_id,
        "trial": report.trial_id,
        "iteration": report.iteration,
        "metrics": plain_metrics(report.metrics),
        "seconds": report.seconds,
        "width": report.width,
        "devices": report.device_ids,
        "at": report.at,
    }


def _open(path: Path) -> IO[str]:
    return path.open("a", encoding="utf-8")


def _line(entry: dict[str, Any]) -> str:
    """An entry as one line of JSON; what JSON cannot hold is written as its text."""
    try:
        return json.dumps(entry) + "\n"
    except Exception:
        return json.dumps(json_form(entry)) + "\n"
