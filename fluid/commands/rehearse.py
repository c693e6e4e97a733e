"""``fluid rehearse``: a sweep on the real engine and a virtual clock, before it is run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluid._private_files import make_folder, replacing
from fluid.commands.inout import Subparsers, is_narrow, make_console, write_json
from fluid.errors import InvalidFieldError, require_integer, require_number

if TYPE_CHECKING:
    from fluid.commands.console import CommandConsole
    from fluid.commands.rehearsed_script import RehearsalRequest
    from fluid.commands.script_rehearsals import ScriptRehearsal

_DEVICES = "1,2,4,8"
#: Of algorithms that are compared.
_COMPARED_ON = "8"
_SEEDS = 1
_OVERHEADS = {
    "alpha": "packing: each of two trials on one device takes so many times as long as alone; at 1, none are packed",
    "beta": "scaling: on two devices, a trial takes so many times half as long as on one",
    "epsilon": "seconds of a resize",
    "server_s": "seconds until a host's fork server is ready, for which its first lanes wait",
    "lane_s": "seconds until a new lane is ready",
    "start_s": "seconds until a trial is set up in a lane",
}


def add_rehearse(commands: Subparsers) -> None:
    """Adds ``fluid rehearse``."""
    text = "play a script's sweeps on a virtual clock, to choose how many devices to run them on"
    rehearse = commands.add_parser("rehearse", help=text)
    rehearse.add_argument("script", metavar="SCRIPT", nargs="*", help="the script, and its arguments; others after --")
    rehearse.add_argument("-m", "--module", metavar="MODULE", help="run this module in place of a script")
    rehearse.add_argument("--from", dest="runs", action="append", metavar="RUN", help="replay this run; repeatable")
    rehearse.add_argument("--benchmark", metavar="NAME", help="replay this benchmark, such as lcbench:189866")
    rehearse.add_argument("--data", metavar="DIR", help="the folder with benchmarks (default: $FLUID_BENCHMARKS)")
    text = "compare these algorithms on the benchmark, such as random,asha,hyperband,tpe,bohb,pbt,raytune-pbt"
    rehearse.add_argument("--algorithms", metavar="NAME,NAME,...", help=text)
    rehearse.add_argument("--samples", type=int, metavar="N", help="configs of each of their sweeps (default: 64)")
    rehearse.add_argument("--budget", type=int, metavar="N", help="most iterations of their trials (default: all)")
    rehearse.add_argument("--devices", metavar="N,N,...", help=f"numbers of devices (default: {_DEVICES})")
    rehearse.add_argument("--seeds", type=int, default=_SEEDS, metavar="N", help=f"of each (default: {_SEEDS})")
    rehearse.add_argument("--planner", help="of the executors (default: the script's)")
    rehearse.add_argument("--metric", metavar="NAME", help="judge sweeps by this metric (default: the search's)")
    rehearse.add_argument("--mode", metavar="MODE", help="min or max (default: the search's, else the name's)")
    rehearse.add_argument("--price", type=float, metavar="USD", help="US dollars for a device-hour")
    for name, meaning in _OVERHEADS.items():
        option = f"--{name.replace('_', '-')}"
        rehearse.add_argument(option, type=float, metavar="X", help=f"{meaning} (default: as --from measured)")
    rehearse.add_argument("--jobs", type=int, metavar="N", help="rehearsals at once (default: cores less one)")
    rehearse.add_argument("--out", metavar="FOLDER", help="for run folders and outputs (default: in ~/fluid_runs)")
    rehearse.add_argument("--record", action="store_true", help="keep the outcomes in FOLDER/rehearsal.json")
    rehearse.add_argument("--json", metavar="FILE", help="write the figures to this file; - for stdout")
    rehearse.add_argument("--png", metavar="FILE", help="draw the best so far, makespan and cost to this file")
    rehearse.add_argument("--calibrate", metavar="RUN", help="compare this real run with the rehearsal of it")
    rehearse.add_argument("--against", metavar="OUTCOME", help="that rehearsal: rehearsal.json, or its run folder")
    rehearse.set_defaults(command=_rehearse)


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of ``fluid``, and those after ``--``, which are the script's, or the script's command."""
    given = list(argv)
    if given[:1] not in (["rehearse"], ["run"]) or "--" not in given:
        return given, []
    at = given.index("--")
    return given[:at], given[at + 1 :]


def _rehearse(arguments: argparse.Namespace) -> None:
    _check(arguments)
    if arguments.calibrate is not None:
        from fluid.commands.calibrating import calibrate

        calibrate(arguments, lambda devices: _run(arguments, [devices]))
        return
    if _compares(arguments):
        from fluid.commands.comparing import compare_algorithms

        counts = _counts(arguments.devices or _COMPARED_ON)
        folder = _out_folder(arguments.out, arguments.benchmark.replace(":", "-").replace("/", "-"))
        compare_algorithms(arguments, counts, _given_overheads(arguments), folder, _jobs(arguments))
        return
    rehearsal = _run(arguments, _counts(arguments.devices or _DEVICES))
    _show(rehearsal, arguments)


def _compares(arguments: argparse.Namespace) -> bool:
    """Whether algorithms are to be compared on a benchmark, without a script."""
    is_alone = not arguments.script and arguments.module is None and arguments.calibrate is None
    return arguments.benchmark is not None and is_alone


def _given_overheads(arguments: argparse.Namespace) -> dict[str, float]:
    return {name: getattr(arguments, name) for name in _OVERHEADS if getattr(arguments, name) is not None}


def _jobs(arguments: argparse.Namespace) -> int:
    from fluid.resources import available_cores

    return arguments.jobs or max(1, len(available_cores()) - 1)


def _check(arguments: argparse.Namespace) -> None:
    """Refuses what cannot be, before anything runs."""
    named, module = arguments.script, arguments.module
    for option in ("algorithms", "samples", "budget"):
        if getattr(arguments, option) is not None and not _compares(arguments):
            raise InvalidFieldError(option, getattr(arguments, option), "needs --benchmark, and no script")
    for option in ("metric", "mode"):
        if getattr(arguments, option) is not None and _compares(arguments):
            reason = "needs a script: without one, algorithms are compared by the metric of the benchmark"
            raise InvalidFieldError(option, getattr(arguments, option), reason)
    for option in ("png", "price"):
        if getattr(arguments, option) is not None and arguments.calibrate is not None:
            raise InvalidFieldError(option, getattr(arguments, option), "cannot be with --calibrate")
    if not named and module is None and arguments.against is None and not _compares(arguments):
        what = "must be named" if arguments.calibrate is None else "must be named, or the rehearsal by --against"
        raise InvalidFieldError("script", None, what)
    if named and module is None and not Path(named[0]).is_file():
        raise InvalidFieldError("script", named[0], "is not a file")
    if arguments.runs and arguments.benchmark is not None:
        raise InvalidFieldError("benchmark", arguments.benchmark, "cannot be with --from: trials are replayed from one")
    if arguments.data is not None and arguments.benchmark is None:
        raise InvalidFieldError("data", arguments.data, "needs --benchmark")
    if arguments.against is not None and arguments.calibrate is None:
        raise InvalidFieldError("against", arguments.against, "needs --calibrate")
    if arguments.calibrate is not None and arguments.devices is not None:
        raise InvalidFieldError("devices", arguments.devices, "cannot be with --calibrate: they are those of the run")
    require_integer("seeds", arguments.seeds, at_least=1, at_most=1000)
    if arguments.jobs is not None:
        require_integer("jobs", arguments.jobs, at_least=1)
    if arguments.price is not None:
        require_number("price", arguments.price, at_least=0.0)
    if arguments.mode is not None:
        from fluid.results.metrics import goals_of

        goals_of(arguments.metric, arguments.mode)
    if arguments.planner is not None:
        from fluid.planners.portfolio import make_planner

        make_planner(arguments.planner)
    if arguments.png:
        from fluid.reports.figures.gantt import check_plot

        check_plot(arguments.png, "png")
    for run in arguments.runs or ():
        from fluid.results.stored_run import read_run

        read_run(run, "from")


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidFieldError("devices", text, "must be numbers of devices such as 1,2,4,8") from error
    return sorted({require_integer("devices", count, at_least=1, at_most=100_000) for count in counts})


def _run(arguments: argparse.Namespace, counts: Sequence[int]) -> ScriptRehearsal:
    from fluid.commands.script_rehearsals import rehearse_script

    target, given = _target(arguments)
    folder = _out_folder(arguments.out, target)
    overheads = _given_overheads(arguments)
    shared: dict[str, Any] = {
        "target": target,
        "is_module": arguments.module is not None,
        "arguments": tuple(given),
        "draws": arguments.seeds > 1,
        "runs": tuple(arguments.runs or ()),
        "benchmark": arguments.benchmark,
        "data": arguments.data,
        "metric": arguments.metric,
        "mode": arguments.mode,
        "overheads": overheads,
        "planner": arguments.planner,
    }
    requests = [_request(folder, count, seed, shared) for seed in range(arguments.seeds) for count in counts]
    # The first one, on the fewest devices, runs alone: it shows whether the script can be rehearsed at all.
    rehearsal = rehearse_script(requests, _jobs(arguments))
    rehearsal.folder = folder
    if arguments.record:
        content = {"format": 1, "command": shlex.join(["fluid", *sys.argv[1:]]), **_outcomes(rehearsal)}
        with replacing(folder / "rehearsal.json") as draft:
            draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return rehearsal


def _target(arguments: argparse.Namespace) -> tuple[str, list[str]]:
    after = getattr(arguments, "after", [])
    if arguments.module is not None:
        return arguments.module, [*arguments.script, *after]
    return arguments.script[0], [*arguments.script[1:], *after]


def _out_folder(asked: str | None, target: str) -> Path:
    from fluid._clock import timestamp
    from fluid.results.run_files import runs_home

    if asked is None:
        home = runs_home()
        stamp = timestamp().replace(":", "").replace(" ", "-")
        folder = home / f"rehearsal-{Path(target).stem}-{stamp}-{os.getpid()}"
    else:
        folder = Path(asked).expanduser().absolute()
    try:
        make_folder(folder)
        if any(folder.iterdir()):
            raise InvalidFieldError("out", str(folder), "holds something already: give a fresh folder")
    except OSError as error:
        raise InvalidFieldError("out", str(folder), f"cannot be used: {error.strerror}") from error
    return folder


def _request(folder: Path, count: int, seed: int, shared: dict[str, Any]) -> RehearsalRequest:
    from fluid.commands.rehearsed_script import RehearsalRequest

    own = folder / f"{count}-devices-seed-{seed}"
    own.mkdir()
    return RehearsalRequest(
        devices=count, seed=seed, folder=str(own / "runs"), events=str(own / "events.jsonl"), **shared
    )


def _outcomes(rehearsal: ScriptRehearsal) -> dict[str, Any]:
    """The outcomes in full, as ``--record`` keeps them."""
    return {
        "source": rehearsal.source,
        "assumptions": rehearsal.assumptions,
        "sweeps": [
            {
                "name": sweep.name,
                "outcomes": {name: [each.as_json() for each in of_name] for name, of_name in sweep.outcomes.items()},
            }
            for sweep in rehearsal.sweeps
        ],
    }


# --- What is shown


def _show(rehearsal: ScriptRehearsal, arguments: argparse.Namespace) -> None:
    if arguments.png:
        _draw(rehearsal, arguments)
    if arguments.json and write_json(figures_json(rehearsal, arguments.price), arguments.json):
        return
    _print(rehearsal, arguments, make_console())


def _print(rehearsal: ScriptRehearsal, arguments: argparse.Namespace, console: CommandConsole) -> None:
    from fluid.display.format import duration, number
    from fluid.reports.tables.rehearsal import figures_of, knee_of, rehearsal_table

    for sweep in rehearsal.sweeps:
        first = next(iter(sweep.outcomes.values()))[0]
        title = f"{sweep.name}: {first.trials} trials, rehearsed on a virtual clock"
        compact = is_narrow(console) or (console.room < 130 and arguments.seeds > 1)
        console.print(rehearsal_table(sweep.outcomes, title, price=arguments.price, compact=compact))
        if first.metric is None:
            console.print("No search says what is optimized: give --metric, and --mode, to see the best values, too.")
        knee = knee_of(figures_of(sweep.outcomes))
        if knee is not None:
            console.print(knee.sentence("device", tried="rehearsed"), soft_wrap=True)
            target, given = _target(arguments)
            words = ["python", *(["-m"] if arguments.module else []), target, *given]
            devices = f"{knee.n} device{'' if knee.n == 1 else 's'}"
            console.print(
                f"For real, on {devices}, FluidExecutor(devices={knee.n}): {shlex.join(words)}", soft_wrap=True
            )
        console.print()
    console.print(f"Trials: {rehearsal.source}", soft_wrap=True)
    for line in rehearsal.assumptions:
        console.print(f"  {line}", soft_wrap=True)
    speed = rehearsal.virtual_s / max(rehearsal.wall_s, 1e-9)
    took = f"{duration(rehearsal.virtual_s)} of sweeps rehearsed in {duration(rehearsal.wall_s)}, {number(speed)}x"
    console.print(f"{took}; run folders in {rehearsal.folder}", soft_wrap=True)
    for path in filter(None, (arguments.png, arguments.json)):
        console.print(f"wrote {path}", soft_wrap=True)


def figures_json(rehearsal: ScriptRehearsal, price: float | None) -> dict[str, Any]:
    """The output of ``fluid rehearse SCRIPT --json``.

    * ``source``: what trials were replayed from; ``assumptions``: sentences on that; ``price_per_device_hour``
    * ``virtual_s``, ``wall_s``: seconds of sweeps rehearsed, and what that took; ``results``: iterations in all;
      ``folder``: the run folders
    * ``sweeps``: of each ``name``, ``metric``, ``mode``, the number of devices that is the ``knee``, and ``rows``, one
      for each number of devices
    """
    from fluid.reports.tables.rehearsal import figures_of, knee_of

    sweeps = []
    for sweep in rehearsal.sweeps:
        figures = figures_of(sweep.outcomes, price=price)
        knee, scale = knee_of(figures), figures[0].scale
        sweeps.append(
            {
                "name": sweep.name,
                "metric": None if scale is None else scale.goal.metric,
                "mode": None if scale is None else scale.goal.mode,
                "knee": None if knee is None else knee.n,
                "rows": [each.as_json() for each in figures],
            }
        )
    return {
        "source": rehearsal.source,
        "assumptions": rehearsal.assumptions,
        "price_per_device_hour": price,
        "virtual_s": rehearsal.virtual_s,
        "wall_s": rehearsal.wall_s,
        "results": rehearsal.results,
        "folder": str(rehearsal.folder),
        "sweeps": sweeps,
    }


def _draw(rehearsal: ScriptRehearsal, arguments: argparse.Namespace) -> None:
    from fluid.reports.figures.rehearsal import save_rehearsal

    for number, sweep in enumerate(rehearsal.sweeps, 1):
        path = Path(arguments.png)
        if number > 1:  # Each sweep has a picture.
            path = path.with_name(f"{path.stem}-{number}{path.suffix}")
        title = f"{sweep.name}, rehearsed: {rehearsal.source}"
        save_rehearsal(path, sweep.outcomes, title, price=arguments.price)
