"""Rehearses a script: starts a process for each number of devices and seed, and reads what its sweeps came to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fluid._clock import MonotonicClock, nap
from fluid.commands.rehearsed_script import RehearsalRequest
from fluid.display.format import duration
from fluid.errors import FluidError, InvalidFieldError
from fluid.processes.interpreters import start_program
from fluid.rehearsal.outcome import SweepOutcome, outcomes_of
from fluid.trialgroup import TrialState

#: Seconds between two looks at the processes.
_LOOK_S = 0.1
#: Seconds for a process to end by itself.
_GRACE_S = 3.0
#: The end of a file that is read for the last result.
_TAIL = 8192
#: Lines of a script's output that are shown of one that failed.
_MOST_LINES = 15
#: States of trials whose sweep has not been broken off.
_ENDED = frozenset(state.value for state in TrialState if state.ended)


@dataclass(frozen=True, kw_only=True)
class RehearsedSweep:
    """A sweep of the script, the same in each of its rehearsals.

    Attributes:
        name: of the sweep.
        outcomes: by number of devices, as text, and then one for each seed.
    """

    name: str
    outcomes: dict[str, list[SweepOutcome]] = field(default_factory=dict)


@dataclass(kw_only=True)
class ScriptRehearsal:
    """What all rehearsals of a script came to.

    Attributes:
        sweeps: at least one.
        source: what replayed the trials, in words.
        assumptions: what it tells of itself, and of which overheads were assumed, a sentence each.
        virtual_s, wall_s: seconds that were rehearsed, and that it took.
        results: iterations that were rehearsed.
        folder: where the run folders are.
    """

    sweeps: list[RehearsedSweep]
    source: str
    assumptions: list[str]
    virtual_s: float
    wall_s: float
    results: int
    folder: Path = Path()


class _Started:
    """A process that rehearses.

    Args:
        request: what it rehearses.
        folder: its own.
    """

    def __init__(self, request: RehearsalRequest, folder: Path) -> None:
        self.request = request
        self._folder = folder
        request.write(folder / "request.json")
        self.log = folder / "output.log"
        with self.log.open("wb") as log:
            self._process = start_program(
                "fluid.commands.rehearsed_script",
                [str(folder / "request.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for the command, which ends it.
            )

    @property
    def status(self) -> int | None:
        """The exit status; ``None`` while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Ends it, and those that it has started."""
        for ask in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, ask)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
                return

    def events(self) -> list[dict[str, Any]]:
        """What it has told so far."""
        path = Path(self.request.events)
        found = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def run_dirs(self) -> list[Path]:
        """Run folders of its executors, in the order made."""
        return [Path(event["began"]) for event in self.events() if "began" in event]

    def virtual_s(self) -> float:
        """Virtual seconds of its latest session so far."""
        folders = self.run_dirs()
        try:
            with (folders[-1] / "results.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
                return float(json.loads(file.read().splitlines()[-1])["at"])
        except (IndexError, KeyError, OSError, TypeError, ValueError):
            return 0.0

    def require_success(self) -> None:
        """Raises what went wrong, if anything did."""
        events, what = self.events(), f"{self.request.target} on {_devices(self.request.devices)}"
        told = next((event for event in events if "error" in event), None)
        ended = next((event for event in events if "ended" in event), None)
        if told is not None and told.get("field") == "trainable":
            hint = "; give --from RUN or --benchmark NAME, or the trainable a method replay(config, iterations)"
            has_source = self.request.runs or self.request.benchmark is not None
            reason = f"its trials cannot be replayed: {told['error']}{'' if has_source else hint}"
            raise InvalidFieldError("trainable", self.request.target, reason)
        if self.failure is not None and self._have_sweeps_ended():
            return
        if self.status != 0 or ended is None:
            said = f": {told['error']}" if told is not None else ""
            self._show_output()
            raise FluidError(f"{what} failed with exit status {self.status}{said}; its output is in {self.log}")
        if not self.run_dirs():
            tune = "; fluid.tune.run and fluid.tune.Tuner take what ray.tune's do" if ended.get("has_tune") else ""
            raise FluidError(
                f"{what} has made no FluidExecutor, so there is nothing to rehearse: only sweeps that Fluid runs can "
                f"be; a plain ray.tune.run, Optuna study or loop has run for real{tune}; its output is in {self.log}"
            )

    @property
    def failure(self) -> str | None:
        """What the script itself has raised, where that was not within a sweep."""
        return next((event["failure"] for event in self.events() if "ended" in event), None)

    def _have_sweeps_ended(self) -> bool:
        """Whether the script failed only behind its sweeps, as where it loads a checkpoint: a rehearsal leaves none."""
        try:
            outcomes = self.outcomes()
        except FluidError:
            return False
        return all(trial.state in _ENDED for outcome in outcomes for trial in outcome.played)

    def _show_output(self) -> None:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in deque(lines, _MOST_LINES):
            print(f"  | {line}", file=sys.stderr)

    def outcomes(self) -> list[SweepOutcome]:
        """What its sweeps came to.

        Raises:
            FluidError: nothing was run.
        """
        request = self.request
        found = [one for folder in self.run_dirs() for one in outcomes_of(folder, request.metric, request.mode)]
        found = [one for one in found if one.results]
        if not found:
            raise FluidError(f"{request.target} has run no iteration on {_devices(request.devices)}; see {self.log}")
        return found


def rehearse_script(requests: Sequence[RehearsalRequest], jobs: int) -> ScriptRehearsal:
    """Rehearses a script.

    Args:
        requests: the rehearsals, each with a folder that exists.
        jobs: how many run at once.

    Raises:
        FluidError: the script failed, or had nothing to rehearse.
        InvalidFieldError: its trials cannot be replayed.
    """
    clock = MonotonicClock()
    began = clock.now()
    waiting, running, done = deque(requests), list[_Started](), list[_Started]()
    console = Console(stderr=True, markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(requests))
        try:
            while waiting or running:
                # The first one runs alone: what is wrong with the script is wrong with all.
                while waiting and len(running) < (jobs if done else 1):
                    request = waiting.popleft()
                    running.append(_Started(request, Path(request.folder).parent))
                nap(_LOOK_S)
                for each in [each for each in running if each.status is not None]:
                    running.remove(each)
                    each.require_success()
                    done.append(each)
                left = _left(clock.now() - began, len(done), len(requests))
                progress.update(task, completed=len(done), description=_doing(running, left))
        finally:
            for each in running:
                each.end()
    return _gathered(sorted(done, key=lambda each: requests.index(each.request)), clock.now() - began)


def _left(passed: float, done: int, total: int) -> str:
    return f", about {duration(passed / done * (total - done))} left" if 0 < done < total else ""


def _doing(running: Sequence[_Started], left: str) -> str:
    shown = (f"{_devices(each.request.devices)}: {each.virtual_s() / 3600.0:.1f} h" for each in running)
    return "; ".join(shown) + left


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def _gathered(done: Sequence[_Started], wall_s: float) -> ScriptRehearsal:
    sweeps: list[RehearsedSweep] = []
    every: list[SweepOutcome] = []
    for each in done:
        outcomes = each.outcomes()
        every += outcomes
        for position, outcome in enumerate(outcomes):
            if position == len(sweeps):
                sweeps.append(RehearsedSweep(name=outcome.name))
            sweeps[position].outcomes.setdefault(str(each.request.devices), []).append(outcome)
    failed = [
        f"{each.request.target} failed after its sweeps on {_devices(each.request.devices)}: {each.failure}; "
        f"a rehearsal leaves no checkpoints; its output is in {each.log}"
        for each in done
        if each.failure is not None
    ]
    told = [next(event for event in each.events() if "ended" in event) for each in done]
    return ScriptRehearsal(
        sweeps=sweeps,
        source=str(told[0]["source"]),
        assumptions=[*told[0]["told"], f"overheads: {told[0]['overheads']['source']}", *failed[:1]],
        virtual_s=sum(outcome.makespan_s for outcome in every),
        wall_s=wall_s,
        results=sum(outcome.results for outcome in every),
    )
