"""The folder of one session: what was decided, what came of it, and what is needed to go on after a crash.

session.json      what the session is: version, planner, devices, when it began
journal.jsonl     one line per thing that happened, as fluid.engine.journal encodes it, in order
results.jsonl     one line per finished iteration: group, trial, iteration, metrics, seconds, width, devices, at
trials.jsonl      one line per group: group, name, what it is about; one per trial: group, trial, config (as JSON where
                  it can be), and by what name reports show it
payloads.pkl      trainables and configs, pickled, for resuming
profile.json      what was measured, written at the end
logs/             what trials printed
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fluid._clock import timestamp
from fluid._version import __version__
from fluid.engine.commands import Command, Report
from fluid.engine.events import Event
from fluid.engine.journal import encode
from fluid.planning.profile import Profile
from fluid.session.payloads import PayloadWriter
from fluid.trialgroup import Search, Trial

DEFAULT_HOME = "~/fluid_runs"
FORMAT = 1


class RunFolder:
    """Writes a session's files. Lines are written whole, and flushed before the commands they tell of take effect.

    Args:
        path: the folder; it exists and is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._began = timestamp()
        (path / "logs").mkdir(exist_ok=True)
        self._journal = _open(path / "journal.jsonl")
        self._results = _open(path / "results.jsonl")
        self._trials = _open(path / "trials.jsonl")
        self._payloads = PayloadWriter(path)
        #: Groups whose trials were written.
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
        """Writes what the session is; what was written before is replaced."""
        content = {"format": FORMAT, "fluid": __version__, "began": self._began, "pid": os.getpid(), **facts}
        (self.path / "session.json").write_text(json.dumps(content, indent=1, default=repr), encoding="utf-8")

    def write_trials(self, group_id: str, name: str, trials: list[Trial], search: Search | None = None) -> None:
        """Writes trials as they were submitted, and once what their group is.

        Raises:
            InvalidFieldError: a trainable or config cannot be pickled; nothing is written then.
        """
        self._payloads.write(group_id, name, trials)
        if group_id not in self._groups:
            self._groups.add(group_id)
            self._trials.write(_line({"group": group_id, "name": name, **({} if search is None else asdict(search))}))
        for trial in trials:
            self._trials.write(_line({"group": group_id, "trial": trial.id, **_facts(trial)}))
        self._trials.flush()

    def journal(self, events: Sequence[Event], commands: Sequence[Command]) -> None:
        """Writes what happened and what was decided."""
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


def _facts(trial: Trial) -> dict[str, Any]:
    """What reports tell of a trial."""
    if trial.shown is None:
        return {"config": dict(trial.config), "key": trial.key}
    shown = {"shown": trial.shown.trial_id, "iterations": trial.shown.iterations, "metrics": trial.shown.metrics}
    return {"config": dict(trial.shown.config), "key": trial.key, **shown}


def _result(report: Report) -> dict[str, Any]:
    return {
        "group": report.group_id,
        "trial": report.trial_id,
        "iteration": report.iteration,
        "metrics": report.metrics,
        "seconds": report.seconds,
        "width": report.width,
        "devices": report.device_ids,
        "at": report.at,
    }


def _open(path: Path) -> IO[str]:
    return path.open("a", encoding="utf-8")


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch as numbers, anything else as its text."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            return item()
        except (TypeError, ValueError, RuntimeError):
            return repr(value)
    return repr(value)
