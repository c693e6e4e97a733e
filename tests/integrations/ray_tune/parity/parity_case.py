"""A case of the parity suite: a small sweep that runs on either side, stock Tune or Fluid."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray.tune
from parity_observation import TIMES, Excluded, Names, Recorder, error_of, observed_sweep

from fluid import FluidExecutor, tune


@dataclass(frozen=True)
class Case:
    """A case.

    Attributes:
        name: the function's.
        function: runs the sweeps on a :class:`Side`; what it returns is compared, too.
        covers: what of Tune's surface it is about, as ``"run.stop"`` or ``"RunConfig.stop"``.
        telling: whether CI runs it.
        without: columns that are not compared, beside those of times.
        defect: why it fails for now; empty if it passes.
        hangs: whether it cannot even be tried for now.
    """

    name: str
    function: Callable[[Side], Any]
    covers: tuple[str, ...]
    telling: bool
    without: tuple[Excluded, ...]
    defect: str
    hangs: bool


CASES: list[Case] = []


def case(
    *covers: str, telling: bool = False, without: tuple[Excluded, ...] = (), defect: str = "", hangs: bool = False
) -> Callable[[Callable[[Side], Any]], Callable[[Side], Any]]:
    """Adds a function to the cases."""

    def add(function: Callable[[Side], Any]) -> Callable[[Side], Any]:
        CASES.append(Case(function.__name__, function, covers, telling, without, defect, hangs))
        return function

    return add


class Side:
    """Where a case runs: under stock Tune or under Fluid.

    Args:
        name: ``"stock"`` or ``"fluid"``.
        folder: its own; ``storage``, where sweeps store, and ``notes``, which trials can write to, are in it.
        executor: runs the trials under Fluid.
        without: columns that are not compared.

    Attributes:
        seen: what was observed of each sweep.
        is_stock: whether trials run under stock Tune.
        used: the arguments and settings that were used, as ``"run.stop"``.
    """

    def __init__(self, name: str, folder: Path, executor: FluidExecutor, without: tuple[Excluded, ...]) -> None:
        #: What its sweeps' names begin with: those of one name that start in one second share a folder of Ray's.
        self.prefix = f"{folder.parent.name}-{name}"
        self.executor = executor
        self.is_stock = name == "stock"
        self.storage, self.notes = folder / "storage", folder / "notes"
        self.notes.mkdir(parents=True)
        self.seen: list[dict[str, Any]] = []
        self.used: set[str] = set()
        self._names = Names(folder, self.prefix)
        self._columns = frozenset().union(*(excluded.columns for excluded in (TIMES, *without)))

    def run(
        self,
        trainable: Any,
        *,
        stock: dict[str, Any] | None = None,
        executor: FluidExecutor | None = None,
        raises: bool = False,
        **options: Any,
    ) -> Any:
        """``tune.run``.

        Args:
            trainable: the trainable.
            stock: options of stock Tune alone, which make it faster and nothing else.
            executor: another than the side's, for Fluid.
            raises: whether the call may raise; the error is compared.
            options: those of ``tune.run``.

        Returns:
            The analysis, or ``None`` if the call has raised.
        """
        self._note("run", options)
        recorder = Recorder()
        options = {"storage_path": str(self.storage), "verbose": 0, **options}
        name = options["name"] = f"{self.prefix}-{options.get('name', 'sweep')}"
        options["callbacks"] = [*(options.get("callbacks") or ()), recorder]
        if self.is_stock:
            return self._call(recorder, name, raises, lambda: ray.tune.run(trainable, **{**options, **(stock or {})}))
        chosen = executor or self.executor
        return self._call(recorder, name, raises, lambda: tune.run(trainable, executor=chosen, **options))

    def fit(
        self,
        trainable: Any,
        *,
        tune_config: Any = None,
        run_config: Any = None,
        raises: bool = False,
        **options: Any,
    ) -> Any:
        """``Tuner(...).fit()``; returns the ResultGrid, or ``None`` if it has raised."""
        self._note("Tuner", options)
        recorder = Recorder()
        run_config = run_config or tune.RunConfig()
        run_config.name = f"{self.prefix}-{run_config.name or 'sweep'}"
        if run_config.storage_path == tune.RunConfig().storage_path:
            run_config.storage_path = str(self.storage)
        run_config.verbose = run_config.verbose if run_config.verbose is not None else 0
        run_config.callbacks = [*(run_config.callbacks or ()), recorder]
        for given in (tune_config, run_config):
            if given is not None:
                self._note(type(given).__name__, given)
        options |= {"run_config": run_config, "tune_config": tune_config}

        def call() -> Any:
            tuner = ray.tune.Tuner if self.is_stock else tune.Tuner
            on = {} if self.is_stock else {"executor": self.executor}
            return tuner(trainable, **on, **options).fit()

        return self._call(recorder, run_config.name, raises, call)

    def restore(self, trainable: Any, *, name: str = "sweep", **options: Any) -> Any:
        """``Tuner.restore(...).fit()``; returns the ResultGrid, or ``None`` if it has raised."""
        self._note("Tuner.restore", options)
        name = f"{self.prefix}-{name}"
        await_uploads()
        recorders: list[Recorder] = []

        def call() -> Any:
            tuner = ray.tune.Tuner if self.is_stock else tune.Tuner
            on = {} if self.is_stock else {"executor": self.executor}
            restored = tuner.restore(str(self.storage / name), trainable, **on, **options)
            callbacks = restored._local_tuner.get_run_config().callbacks or []
            recorders.extend(callback for callback in callbacks if isinstance(callback, Recorder))
            for recorder in recorders:
                recorder.__init__()
            return restored.fit()

        return self._call(recorders, name, False, call)

    def _call(self, recorder: Recorder | list[Recorder], name: str, raises: bool, call: Callable[[], Any]) -> Any:
        random.seed(11)
        np.random.seed(11)
        result, error = None, None
        try:
            result = call()
        except Exception as raised:
            if not raises:
                raise
            error = raised
        if isinstance(recorder, list):
            recorder = recorder[-1] if recorder else Recorder()
        experiment = self.storage / name
        seen = observed_sweep(recorder, experiment, self._names, self._columns)
        seen["raised"] = error_of(error, self._names)
        self.seen.append(seen)
        return result

    def plain(self, value: Any) -> Any:
        """A value without what differs between two runs."""
        return self._names.plain(value)

    def rows(self, sweep: int = -1) -> list[list[dict[str, Any]]]:
        """The results of each trial of a sweep, in the order of the trials."""
        return [trial["results"] for _, trial in sorted(self.seen[sweep]["trials"].items())]

    def iterations(self, sweep: int = -1) -> list[list[int]]:
        """The iterations of the results of each trial of a sweep."""
        return [[row["training_iteration"] for row in rows] for rows in self.rows(sweep)]

    def trials(self, sweep: int = -1) -> list[dict[str, Any]]:
        """What was observed of each trial of a sweep, in the order of the trials."""
        return [trial for _, trial in sorted(self.seen[sweep]["trials"].items())]

    def _note(self, owner: str, given: Any) -> None:
        if is_dataclass(given):
            default = type(given)()
            given = {f.name: getattr(given, f.name) for f in fields(given)}
            given = {name: value for name, value in given.items() if value != getattr(default, name)}
        self.used |= {f"{owner}.{name}" for name in given}
        for value in given.values():
            if isinstance(value, (tune.CheckpointConfig, tune.FailureConfig)):
                self._note(type(value).__name__, value)


def await_uploads() -> None:
    """Waits until Tune has uploaded its state of a sweep, which cannot be restored from a half-written file."""
    for thread in threading.enumerate():
        if "entrypoint" in thread.name:  # The name of the thread of Tune's syncer.
            with suppress(RuntimeError):
                thread.join(90.0)
