"""What is observed of a sweep: all that Tune's user can see of it, in plain values that two sweeps can be compared by.

Values that differ between any two runs are left out. Each of these is named, with the reason, in ``EXCLUDED``.
"""

from __future__ import annotations

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fluid import tune


@dataclass(frozen=True)
class Excluded:
    """Columns of results that are not compared.

    Attributes:
        columns: their names.
        reason: why.
    """

    columns: frozenset[str]
    reason: str


TIMES = Excluded(
    frozenset(
        [
            "date",
            "hostname",
            "node_ip",
            "pid",
            "process",
            "time_since_restore",
            "time_this_iter_s",
            "time_total_s",
            "timestamp",
        ]
    ),
    "the clock and the process: two runs of stock Tune differ in them, too; that the columns exist is compared",
)
ORDER = Excluded(
    frozenset(
        [
            "checkpoint_dir_name",
            "done",
            "experiment_tag",
            "iterations_since_restore",
            "should_checkpoint",
            "time_since_restore",
        ]
    ),
    "a scheduler that pauses all trials but the last one to come: which one that is depends on the order of results",
)
#: Excluded of every sweep, by what is left out.
EXCLUDED = {
    "times": TIMES.reason,
    "names made of times and random numbers": "trial ids, dates in names, process ids and addresses in texts become "
    "placeholders; their places and numbers are compared",
    "on_step_begin, on_step_end": "the number of the controller's turns depends on the clock; that each is called, in "
    "turn, is compared",
    "the number of a sweep's state files": "Tune makes one per second in which a sweep was begun or resumed",
    "the logs of a trial that was paused": "Tune may replace them by an earlier upload when the trial continues; the "
    "results that it logged are compared",
    "line numbers of Ray's code": "an error shows where Ray first looked at a value",
    "order among trials": "of results of trials that run at once; the order within each trial is compared",
    "events.out.tfevents.*": "contains times; that each trial has the file is compared",
    "*.pkl": "pickles of the driver's objects, which hold Fluid's scheduler; that they exist is compared, and the "
    "restored sweeps read them",
    "the process in the first line of an error": "its id, its address, the id of the actor and its repr; the method is "
    "compared",
    "Ray's frames of a traceback": "where Ray called the trainable; the user's frames, the type and the text are "
    "compared",
}

_NAMES = [
    (re.compile(r"(?<![0-9a-f])[0-9a-f]{5}_(\d{5})"), r"ID_\1"),
    (re.compile(r"(?<![0-9a-zA-Z])(?=[0-9a-f]*\d)[0-9a-f]{8}(?![0-9a-zA-Z-])"), "ID"),
    # Four digits are added to the name of a trial's folder where another trial took it in the same second.
    (re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_[0-9a-f]{4}\b)?(-\d+(?=/))?"), "DATE"),
    (re.compile(r"\(pid=\d+, ip=.*\)"), "PROCESS"),
    (re.compile(r"\(pid=\d+\)|pid=\d+"), "PROCESS"),
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r'(site-packages/ray/.*", line )\d+'), r"\1N"),
    (re.compile(r"events\.out\.tfevents\..*"), "events"),
]


class Names:
    """Replaces in texts what differs between two runs.

    Args:
        folder: the side's own, which becomes FOLDER.
        prefix: of the names of its sweeps, which becomes SWEEP.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = str(folder), prefix

    def __call__(self, text: str) -> str:
        text = text.replace(self._folder, "FOLDER").replace(self._prefix, "SWEEP")
        for pattern, name in _NAMES:
            text = pattern.sub(name, text)
        return text

    def plain(self, value: Any) -> Any:
        """A value as nested dictionaries, lists and texts, with the type of all that is not of JSON."""
        if isinstance(value, dict):
            return {self(str(key)): self.plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [type(value).__name__, *map(self.plain, value)]
        if isinstance(value, str):
            return self(value)
        if isinstance(value, float) and value != value:
            return f"{type(value).__name__} nan"
        if value is None or type(value) in (bool, int, float):
            return value
        if isinstance(value, (np.generic, np.ndarray)):
            return [type(value).__name__, str(value.dtype), repr(value.tolist())]
        return self(f"{type(value).__name__} {value!r}")


class Recorder(tune.Callback):
    """Records every call of a callback, and the results as they came, by trial."""

    def __init__(self) -> None:
        self.results: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.hooks: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self.sweep: list[str] = []
        self.trials: list[Any] = []

    def _note(self, what: str, trial: Any) -> None:
        self.hooks[trial.trial_id].append((what, (trial.last_result or {}).get("training_iteration", 0)))

    def setup(self, stop: Any = None, num_samples: Any = None, total_num_samples: Any = None, **info: Any) -> None:
        self.sweep.append(f"setup {sorted(info)} {type(stop).__name__} {num_samples} {total_num_samples}")

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self.trials = trials
        if "step" not in self.sweep:
            self.sweep.append("step")

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if "step end" not in self.sweep:
            self.sweep.append("step end")

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note("start", trial)

    def on_trial_restore(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note("restore", trial)

    def on_trial_save(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note("save", trial)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.hooks[trial.trial_id].append(("result", result["training_iteration"]))
        self.results[trial.trial_id].append(dict(result))

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note("complete", trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note("recover", trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._note("error", trial)

    def on_checkpoint(self, iteration: int, trials: list[Any], trial: Any, checkpoint: Any, **info: Any) -> None:
        self._note(f"checkpoint {type(checkpoint).__name__}", trial)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self.trials = trials
        self.sweep.append("end")


# --- A sweep and its trials


def observed_sweep(recorder: Recorder, experiment: Path | None, names: Names, without: Iterable[str]) -> dict[str, Any]:
    """All that is compared of a sweep.

    Args:
        recorder: a callback of the sweep.
        experiment: its folder; ``None`` if it never began.
        names: replaces what differs.
        without: columns of results of which only the presence is compared.
    """
    dropped = set(without)
    seen: dict[str, Any] = {"callbacks": recorder.sweep}
    seen["trials"] = {
        trial_number(trial): _observed_trial(trial, recorder, names, dropped) for trial in recorder.trials
    }
    folders = {Path(trial.path).name for trial in recorder.trials if trial.storage}
    if experiment is not None and experiment.exists():
        # Tune may be writing one of its state files, under another name.
        found = [path.name for path in experiment.iterdir() if "-tmp-" not in path.name]
        seen["files"] = sorted({names(name) for name in found if name not in folders})
        seen["trial folders"] = sorted(names(path.name) for path in experiment.iterdir() if path.name in folders)
    return seen


def trial_number(trial: Any) -> int:
    """The number of a trial in the order of creation: its tag or its id tells."""
    found = re.match(r"(\d+)(_|$)", str(trial.experiment_tag)) or re.search(r"_(\d+)$", trial.trial_id)
    return int(found[1]) if found else 0


def _observed_trial(trial: Any, recorder: Recorder, names: Names, dropped: set[str]) -> dict[str, Any]:
    folder = Path(trial.path)
    manager = trial.run_metadata.checkpoint_manager
    return {
        "name": names(str(trial)),
        "folder": names(folder.name),
        "tag": names(str(trial.experiment_tag)),
        "config": names.plain(trial.config),
        "status": trial.status,
        "failures": trial.num_failures,
        "error": error_of(trial.get_error(), names),
        "results": [_row(row, names, dropped) for row in recorder.results[trial.trial_id]],
        "last result": _row(trial.last_result or {}, names, dropped),
        "hooks": recorder.hooks[trial.trial_id],
        "checkpoints": [
            (Path(kept.checkpoint.path).name, (kept.metrics or {}).get("training_iteration"))
            for kept in manager.best_checkpoint_results
        ],
        "latest checkpoint": getattr(trial.checkpoint, "path", None) and Path(trial.checkpoint.path).name,
        "resources": repr(trial.placement_group_factory.bundles),
        "files": _files(folder, names, dropped),
    }


def _row(row: dict[str, Any], names: Names, dropped: set[str]) -> dict[str, Any]:
    return {name: "..." if name in dropped else names.plain(value) for name, value in row.items()}


def _files(folder: Path, names: Names, dropped: set[str]) -> dict[str, Any]:
    """The contents of a trial's files, by path; of those that cannot be compared, that they exist."""
    return {
        names(str(path.relative_to(folder))): _content(path, names, dropped)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _content(path: Path, names: Names, dropped: set[str]) -> Any:
    if path.suffix == ".pkl" or "tfevents" in path.name:
        return "exists"
    if path.name == "result.json":
        return [_row(json.loads(line), names, dropped) for line in path.read_text().splitlines()]
    if path.name == "progress.csv":
        with path.open(newline="") as file:
            return [_row(row, names, dropped) for row in csv.DictReader(file)]
    if path.name == "error.txt":
        return user_frames(path.read_text(), names)
    try:
        return names(path.read_text()).splitlines()
    except UnicodeDecodeError:
        return path.stat().st_size


# --- Errors


def error_of(error: BaseException | None, names: Names) -> list[str] | None:
    """The types and the texts of an error and of its cause, as far as they are the user's."""
    if error is None:
        return None
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ not in ("cls", "RayTaskError", "object")]
    cause = getattr(error, "cause", None)
    return [
        *kinds,
        f"cause {type(cause).__name__} {names(str(cause)).splitlines()[:1]}",
        *user_frames(str(error), names),
    ]


_FRAME = re.compile(r'^\s*File "(.+)", line \d+, in (\w+)')


def user_frames(text: str, names: Names) -> list[str]:
    """A traceback without the frames of Ray, of Fluid and of Python."""
    kept: list[str] = []
    skips = False
    for line in names(text).splitlines():
        if frame := _FRAME.match(line):
            skips = "site-packages" in frame[1] or "fluid/" in frame[1] or "/lib/python" in frame[1]
            if not skips:
                kept.append(f"{Path(frame[1]).name} {frame[2]}")
        elif not line.startswith("    "):
            skips = False
            kept.append(line.rstrip())
        elif not skips and not set(line) <= set(" ^~"):
            kept.append(line.strip())
    return kept
