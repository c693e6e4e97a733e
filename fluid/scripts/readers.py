"""Readers of metrics: lines of output, TensorBoard's event files, a file store of MLflow.

Each gives mappings of names and values, one for each thing that the script has said, in its order.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.scripts.command import require_placeholders, value_of

with try_import("tensorboard", extra="tensorboard") as _imports:
    from importlib.util import find_spec

    if find_spec("tensorboard") is None:
        raise ModuleNotFoundError("No module named 'tensorboard'", name="tensorboard")

#: How reports may come, besides lines that match a regular expression.
KINDS = ("fluid", "json", "wandb", "tensorboard", "mlflow")
#: Those that are read if the user says nothing.
DEFAULT_KINDS = ("fluid", "json", "wandb")
#: Kinds that are files of a folder, which is looked at again and again.
POLLED = ("tensorboard", "mlflow")
#: Longest line that is looked at, bytes.
_LONGEST_LINE = 1 << 20


class Origin(NamedTuple):
    """One way in which reports come.

    Attributes:
        kind: one of :data:`KINDS`.
        folder: of files; may have placeholders. Empty for other kinds.
    """

    kind: str
    folder: str = ""


def parse_origins(given: Sequence[str], known: Sequence[str], *, own_folder: bool) -> tuple[Origin, ...]:
    """Reads what the user gives as ``--metric-from``.

    Args:
        given: the texts; none for the default.
        known: names of placeholders.
        own_folder: whether the script runs in the trial's own folder.

    Raises:
        InvalidFieldError: there is no such kind, its folder is missing, or it is one for all trials.
    """
    found = []
    for text in given:
        kind, _, folder = text.partition(":")
        if kind not in KINDS or bool(folder) != (kind in POLLED):
            reason = "must be fluid, json, wandb, tensorboard:DIR or mlflow:DIR"
            raise InvalidFieldError("metric_from", text, reason)
        require_placeholders("metric_from", [folder], known)
        if folder and "{" not in folder and not (own_folder and not os.path.isabs(folder)):
            reason = "is one folder for all trials: name the trial's, as in tensorboard:{trial_dir}/logs"
            raise InvalidFieldError("metric_from", text, reason)
        if kind == "tensorboard":
            _imports.check()
        found.append(Origin(kind, folder))
    return tuple(found) or tuple(map(Origin, DEFAULT_KINDS))


def compile_patterns(given: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    """Compiles what the user gives as ``--metric-regex``.

    Raises:
        InvalidFieldError: one is no regular expression, or has no named group.
    """
    patterns = []
    for text in given:
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise InvalidFieldError("metric_regex", text, f"is no regular expression: {error}") from error
        if not pattern.groupindex:
            reason = r"has no named group, which names the metric, as in 'loss=(?P<val_loss>\S+)'"
            raise InvalidFieldError("metric_regex", text, reason)
        patterns.append(pattern)
    return tuple(patterns)


class LineReader:
    """Reads lines of a stream of bytes: JSON objects, and what matches a regular expression.

    Example:
        >>> import re
        >>> from fluid.scripts.readers import LineReader
        >>> reader = LineReader(True, [re.compile(r"acc (?P<acc>\\\\S+)")])
        >>> list(reader.feed(b'noise\\\\n{"loss": 0.5}\\\\nacc 0')), list(reader.feed(b".75\\\\n"))
        ([{'loss': 0.5}], [{'acc': 0.75}])

    Args:
        takes_json: whether lines may be JSON objects.
        patterns: whose named groups are metrics.
    """

    def __init__(self, takes_json: bool, patterns: Sequence[re.Pattern[str]]) -> None:
        self._takes_json = takes_json
        self._patterns = patterns
        self._rest = b""
        self._is_too_long = False

    def feed(self, data: bytes, *, ends: bool = False) -> Iterator[dict[str, Any]]:
        """Takes further bytes, and yields what the lines that they end say.

        Args:
            data: the bytes.
            ends: whether there are no more, so that a last line without its end counts.
        """
        if not self._takes_json and not self._patterns:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if ends:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            if not self._is_too_long:
                yield from self._read(line.strip().rpartition(b"\r")[2])  # Behind a bar of progress.
            self._is_too_long = False
        if len(self._rest) > _LONGEST_LINE:
            self._rest, self._is_too_long = b"", True

    def _read(self, line: bytes) -> Iterator[dict[str, Any]]:
        if self._takes_json and line[:1] == b"{" and line[-1:] == b"}":
            with suppress(ValueError, RecursionError):
                yield dict(json.loads(line))
                return
        for pattern in self._patterns:
            if (found := pattern.search(line.decode(errors="replace"))) is not None:
                yield {name: _number(text) for name, text in found.groupdict().items() if text is not None}


def _number(text: str) -> Any:
    with suppress(ValueError):
        return float(text) if text.strip().lower().lstrip("+-") in ("nan", "inf", "infinity") else value_of(text)
    return text


class MetricPoller(Protocol):
    """Looks at files for metrics."""

    def poll(self) -> list[dict[str, Any]]:
        """Returns what was written since the last call."""
        ...


class _BySteps:
    """Makes one mapping of all that was written of one step, once the metric of that step was."""

    def __init__(self) -> None:
        self._steps: dict[Any, dict[str, Any]] = {}

    def add(self, rows: list[tuple[int, str, Any]], metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Takes rows of step, name and value; yields the steps that have all metrics, in their order."""

        def is_whole(step: int) -> bool:
            return all(name in self._steps[step] for name in metrics)

        for step, name, value in rows:
            if name in self._steps.setdefault(step, {}) and is_whole(step):
                # A script that names no steps writes all as the same one: what comes again is the next.
                yield {**self._steps[step], "step": step}
                self._steps[step] = {}
            self._steps[step][name] = value
        for step in sorted(self._steps):
            if is_whole(step):
                yield {**self._steps.pop(step), "step": step}


class EventFiles:
    """Polls the event files of a folder, and of those below it."""

    def __init__(self, folder: str, metrics: Sequence[str]) -> None:
        self._folder = folder
        self._metrics = metrics
        self._loaders: dict[str, Any] = {}
        self._steps = _BySteps()

    def poll(self) -> list[dict[str, Any]]:
        """Returns what was written since the last call."""
        _imports.check()
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray

        rows: list[tuple[int, str, Any]] = []
        for path in sorted(Path(self._folder).rglob("*tfevents*")):
            loader = self._loaders.get(str(path))
            if loader is None:
                loader = self._loaders[str(path)] = EventFileLoader(str(path))
            for event in loader.Load():
                for value in event.summary.value:
                    with suppress(Exception):  # An image, a histogram.
                        rows.append((event.step, value.tag, float(make_ndarray(value.tensor).item())))
        return list(self._steps.add(rows, self._metrics))


class MetricFiles:
    """Polls the metrics of a file store of MLflow: ``EXPERIMENT/RUN/metrics/NAME``, lines of time, value and step."""

    def __init__(self, folder: str, metrics: Sequence[str]) -> None:
        self._folder = folder
        self._metrics = metrics
        self._read: dict[Path, int] = {}
        self._steps = _BySteps()

    def poll(self) -> list[dict[str, Any]]:
        """Returns what was written since the last call."""
        rows: list[tuple[int, int, str, Any]] = []
        for folder in Path(self._folder).glob("*/*/metrics"):
            for path in sorted(found for found in folder.rglob("*") if found.is_file()):
                data = path.read_bytes()
                begin = self._read.get(path, 0)
                end = data.rfind(b"\n") + 1
                self._read[path] = max(begin, end)
                for line in data[begin:end].decode(errors="replace").splitlines():
                    with suppress(ValueError, IndexError):
                        parts = line.split()
                        name = path.relative_to(folder).as_posix()
                        rows.append((int(parts[0]), int(parts[2]), name, float(parts[1])))
        rows.sort(key=lambda row: row[0])  # By time: each file has one metric of all steps.
        return list(self._steps.add([row[1:] for row in rows], self._metrics))


FILES: dict[str, Callable[[str, Sequence[str]], MetricPoller]] = {"tensorboard": EventFiles, "mlflow": MetricFiles}
