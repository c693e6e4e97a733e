"""Runs a script with its sweeps rehearsed: the process that ``fluid rehearse`` starts for each rehearsal.

Its only argument is the path of a file with a :class:`RehearsalRequest` as JSON. What it finds out it appends to
another file, an object per line.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluid.errors import FluidError, InvalidFieldError

if TYPE_CHECKING:
    from fluid.rehearsal.overheads import Overheads
    from fluid.rehearsal.replayable import Replayable

#: The variable that tells a script which rehearsal this is.
SEED_VARIABLE = "FLUID_REHEARSAL_SEED"
#: In an argument of a script, stands for the seed.
SEED_MARK = "{seed}"


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest:
    """One rehearsal of a script.

    Attributes:
        target: the path of the script, or the name of a module.
        is_module: whether it is a module.
        arguments: of the script.
        devices: how many.
        seed: of this rehearsal, from 0 on; 0 leaves the script's own seeds as they are.
        draws: whether what a run folder does not tell is drawn by the seed, and not the median.
        runs: run folders that replay the trials.
        benchmark: the name of a benchmark that does; ``None`` for none.
        data: its folder.
        metric, mode: what is optimized, where no search says it.
        overheads: those given.
        planner: of the executors; ``None`` for what the script asks for.
        folder: where run folders are made.
        events: the file to append to.
    """

    target: str
    is_module: bool = False
    arguments: tuple[str, ...] = ()
    devices: int = 1
    seed: int = 0
    draws: bool = False
    runs: tuple[str, ...] = ()
    benchmark: str | None = None
    data: str | None = None
    metric: str | None = None
    mode: str | None = None
    overheads: Mapping[str, float] = field(default_factory=dict)
    planner: str | None = None
    folder: str = ""
    events: str = ""

    def write(self, path: Path) -> None:
        """Writes it to a file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> RehearsalRequest:
        """Reads what :meth:`write` wrote."""
        content: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in content.items()
        }
        return cls(**fields)

    def make_source(self) -> Replayable | None:
        """What replays the trials; ``None`` for their trainables themselves.

        Raises:
            InvalidFieldError: there is no such run folder or benchmark.
        """
        if self.runs:
            from fluid.rehearsal.recorded import recorded

            noise = self.seed if self.draws else None
            source: Replayable = recorded(self.runs, metric=self.metric, mode=self.mode, noise=noise)
            return source
        if self.benchmark is not None:
            from fluid.rehearsal.sources import source_by_name

            return source_by_name(self.benchmark, None if self.data is None else Path(self.data))
        return None

    def make_overheads(self, source: Replayable | None) -> Overheads:
        """The overheads: those given, else those that the source has measured, else none.

        Raises:
            InvalidFieldError: one that is given cannot be used.
        """
        from fluid.rehearsal.overheads import FREE, Overheads

        measured = getattr(source, "overheads", None)
        return (measured if isinstance(measured, Overheads) else FREE).with_given(self.overheads)


def main(arguments: Sequence[str]) -> int:
    """Runs the script; returns the exit status.

    Args:
        arguments: the path of the request.
    """
    request = RehearsalRequest.read(arguments[0])
    with Path(request.events).open("a", encoding="utf-8", buffering=1) as events:

        def tell(**entry: Any) -> None:
            events.write(json.dumps(entry) + "\n")

        try:
            return _rehearse(request, tell)
        except InvalidFieldError as error:
            tell(error=str(error), field=error.field)
            raise
        except FluidError as error:
            tell(error=str(error))
            raise


def _rehearse(request: RehearsalRequest, tell: Any) -> int:
    from fluid.rehearsal.plan import RehearsalPlan, rehearsing
    from fluid.rehearsal.seeding import seed_draws

    source = request.make_source()
    overheads = request.make_overheads(source)
    options = {"verbose": 0, **({} if request.planner is None else {"planner": request.planner})}
    plan = RehearsalPlan(
        devices=request.devices,
        source=source,
        overheads=overheads,
        options=tuple(options.items()),
        folder=Path(request.folder),
        began=lambda run_dir: tell(began=str(run_dir)),
        seed=request.seed,
    )
    seed_draws(request.seed)
    os.environ[SEED_VARIABLE] = str(request.seed)
    status, failure = 0, None
    try:
        with rehearsing(plan):
            _run(request)
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except Exception as error:
        if not _is_outside_of_sweeps(error):
            raise
        traceback.print_exc()
        status, failure = 1, f"{type(error).__name__}: {error}"
    describe = getattr(source, "describe", None)
    lines = describe() if callable(describe) else []
    tell(
        ended=True,
        failure=failure,
        source=_name_of(source, request.runs),
        told=[lines] if isinstance(lines, str) else list(map(str, lines)),
        overheads=asdict(overheads),
        has_tune="ray.tune" in sys.modules,
    )
    return status


def _name_of(source: Replayable | None, runs: Sequence[str]) -> str:
    """What replays the trials, in a few words."""
    if source is None:
        return "the trainable itself"
    if runs:
        return f"run folder{'s' if len(runs) > 1 else ''} {', '.join(runs)}"
    return str(getattr(source, "name", None) or source)


def _is_outside_of_sweeps(error: Exception) -> bool:
    """Whether the script raised an error by itself, or as it read results, and not Fluid while it ran a sweep."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    ours = [name for name in modules if name.startswith("fluid.")]
    # An error of Fluid's in which it does not appear was raised in another thread.
    return all(name.startswith("fluid.results.") for name in ours) and (bool(ours) or not isinstance(error, FluidError))


def _run(request: RehearsalRequest) -> None:
    arguments = [argument.replace(SEED_MARK, str(request.seed)) for argument in request.arguments]
    sys.argv = [request.target, *arguments]
    if request.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(request.target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(request.target).resolve().parent))
        runpy.run_path(request.target, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
