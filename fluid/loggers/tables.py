"""One table of trials and one of iterations, with the columns of ``SweepResult.dataframe``; as CSV.

:mod:`fluid.loggers.parquet` writes them as Parquet.
"""

from __future__ import annotations

import csv
import io
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fluid._clock import Clock, MonotonicClock
from fluid.engine.events import Failure
from fluid.errors import InvalidFieldError
from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
from fluid.loggers.logger_files import Files, is_claimed
from fluid.loggers.values import text_of
from fluid.results.iterations import flat
from fluid.results.records import Result
from fluid.results.run_files import price_in, read_facts

#: The columns that come first, and those that come last.
TRIAL, ITERATION, LAST = ("trial", "group", "state"), ("trial", "group"), ("error",)
#: Least seconds between two writings of a table, and the share of the time that writing may take.
_EVERY_S, _SHARE = 1.0, 0.05

Row = dict[str, Any]


class Tables(TrialLogger):
    """The tables in memory, which a subclass writes.

    The tables of a resumed session are made anew, of all its results.
    """

    begins_anew = True
    _suffix = ""
    _files: Files

    def __init__(self, folder: str | Path | None, clock: Clock | None = None) -> None:
        self.destination = "" if folder is None else str(Path(folder).expanduser().absolute())
        self._folder = Path(self.destination)
        self._clock = clock or MonotonicClock()
        self._trials: dict[str, Row] = {}
        #: Iterations that are not written yet.
        self._iterations: list[Row] = []
        self._is_written = True
        self._next_at = 0.0
        self._run_dir = Path()

    def on_session(self, session: LoggedSession) -> None:
        if not self.destination:
            self._folder = session.run_dir / type(self).__name__.lower()
        self._files = Files(self._folder, session.run_dir)
        if not is_claimed(self._folder, session.session_id, self._files):
            raise InvalidFieldError("folder", str(self._folder), "has the tables of another session; give another one")
        self._run_dir = session.run_dir
        self._begin()

    def on_trial(self, trial: LoggedTrial) -> None:
        row = self._trials.setdefault(
            trial.trial_id, {"trial": trial.trial_id, "group": trial.group, "state": "UNFINISHED"}
        )
        row.update({"iteration": 0, "seconds": 0.0, "device_seconds": 0.0, **row, **_prefixed("config", trial.config)})
        row.update(trial.start_facts)
        self._is_written = False

    def on_start(self, trial_id: str) -> None:
        self._trials[trial_id]["state"] = "UNFINISHED"

    def on_result(self, result: Result) -> None:
        row = self._trials[result.trial_id]
        metrics = _prefixed("metrics", result.metrics)
        took, used = result.seconds, result.device_seconds
        row.update(metrics, iteration=result.iteration, seconds=row["seconds"] + (0.0 if result.source else took))
        row["device_seconds"] += used
        config = {name: value for name, value in row.items() if name.startswith("config/")}
        own = {"trial": result.trial_id, "group": row["group"], "iteration": result.iteration}
        took_of = {"seconds": took, "device_seconds": used, **({"source": result.source} if result.source else {})}
        self._iterations.append({**own, **took_of, **config, **metrics})
        self._is_written = False

    def on_end(self, trial_id: str, state: str, failure: Failure | None) -> None:
        error = None if failure is None else failure.message
        self._trials[trial_id].update(state=state, error=error)
        self._is_written = False

    def on_broken(self, error: BaseException) -> None:
        self._write_all()
        self._is_written = True

    def flush(self) -> bool:
        began = self._clock.now()
        if not self._is_written and began >= self._next_at:
            self._write_all()
            self._is_written = True
            took = self._clock.now() - began
            self._next_at = began + max(_EVERY_S, took / _SHARE)
        return self._is_written

    def _write_all(self) -> None:
        price = price_in(read_facts(self._run_dir))  # Which the session may not have written when it called this one.
        for row in (*self._trials.values(), *self._iterations) if price is not None else ():
            row["cost_usd"] = price * row["device_seconds"] / 3600.0
        self._write()

    def _begin(self) -> None:
        """Removes the tables of an earlier session of this run folder, and drafts of them."""
        for name in ("trials", "iterations"):
            for path in (self._folder / f"{name}.{self._suffix}", *self._folder.glob(f".{name}.*.{self._suffix}")):
                path.unlink(missing_ok=True)

    @abstractmethod
    def _write(self) -> None:
        """Writes what is new."""


class CSV(Tables):
    """Writes ``trials.csv``, with a row per trial, and ``iterations.csv``, with a row per iteration.

    The columns are those of :meth:`fluid.SweepResult.dataframe`: nested names are joined by ``/``. They are up to date
    within a second or so while trials run. What is neither a number nor a text is JSON.

    Example:
        >>> import csv
        >>> from pathlib import Path
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> from fluid.loggers import CSV
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> with FluidExecutor(backend="local", devices=1, verbose=0, loggers=[CSV("tables")]) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, trial_id="a")], name="sweep")
        ...     ended = executor.submit_trialgroup(group).wait()
        >>> (row,) = csv.DictReader(Path("tables/trials.csv").read_text().splitlines())
        >>> row["trial"], row["state"], row["config/lr"], row["metrics/loss"]
        ('a', 'DONE', '0.5', '0.25')

    Args:
        folder: where the tables go; of one session only. ``None``, the default, for ``csv`` in the run folder.
    """

    _suffix = "csv"

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(folder)
        self._columns: list[str] = []

    def _write(self) -> None:
        rows, self._iterations = self._iterations, []
        path = self._folder / "iterations.csv"
        columns = ordered([dict.fromkeys(self._columns), *rows], ITERATION)
        if columns != self._columns:
            earlier = []
            if self._columns:
                with path.open(newline="", encoding="utf-8") as file, _long_fields():
                    earlier = list(csv.DictReader(file))
            self._columns = columns
            self._replace(path, _csv(columns, [*earlier, *rows], header=True))
        elif rows:
            with self._files.open(path, "a", newline="", encoding="utf-8") as file:
                file.write(_csv(columns, rows, header=False))
        trials = list(self._trials.values())
        self._replace(self._folder / "trials.csv", _csv(ordered(trials, TRIAL, LAST), trials, header=True))

    def _replace(self, path: Path, text: str) -> None:
        with self._files.replacing(path) as draft:
            draft.write_bytes(text.encode())


def _prefixed(prefix: str, content: object) -> Row:
    return {
        f"{prefix}/{name}": value if value is None or isinstance(value, (int, float)) else text_of(value)
        for name, value in flat(content).items()
    }


def ordered(rows: Iterable[Mapping[str, Any]], first: Iterable[str], last: Iterable[str] = ()) -> list[str]:
    """The columns of some rows: the given ones, the config's, the metrics'."""
    names = dict.fromkeys(name for row in rows for name in row)
    own = [*first, "iteration", "seconds", "device_seconds"]
    own += [name for name in ("cost_usd", "parent", "at", "source") if name in names]
    config = [name for name in names if name.startswith("config/")]
    return [*own, *config, *(name for name in names if name.startswith("metrics/")), *last]


def _csv(columns: list[str], rows: Iterable[Mapping[str, Any]], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lets fields of any length be read: the module's limit of 131,072 characters is the whole process's."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)
