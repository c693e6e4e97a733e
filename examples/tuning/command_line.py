"""The command line that the three sweeps share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from tuning.algorithms import ALGORITHMS
from tuning.outcome import Outcome
from tuning.progress import Progress
from tuning.running import Sweep
from tuning.scales import SCALE_NAMES
from tuning.workload import Workload

import fluid.cli
from fluid import FluidExecutor, tune
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError, require_integer


def main(workload: Workload, arguments: Sequence[str] | None = None) -> None:
    """Runs a sweep with the options of the command line, and prints its progress and its outcome.

    Args:
        workload: what is tuned.
        arguments: of the command line; ``None`` for this process's.

    Raises:
        SystemExit: the command line cannot be used (2), a trial failed (1), or a signal has ended the sweep.
    """
    parser = _parser(workload)
    options = parser.parse_args(arguments)
    if options.reuse_actors and options.executor == "fluid":
        parser.error("--reuse-actors: needs --executor tune; Fluid's processes always run one trial after another")
    folder = Path(options.run_dir).resolve() if options.run_dir else None
    interruption = None
    try:
        sweep = Sweep(
            workload=workload,
            algorithm=options.algo,
            scale=workload.scale(options.scale),
            folder=workload.data.locate(options.data),
            samples=options.samples,
            seed=options.seed,
            devices=options.devices,
            reuse_actors=options.reuse_actors,
            storage=None if folder is None else folder / "tune",
        )
        made: list[FluidExecutor] = []

        def executor() -> FluidExecutor:
            where = None if folder is None else folder / "fluid"
            made.append(FluidExecutor("local", options.devices, max_width=options.max_width, run_dir=where))
            return made[0]

        on_fluid = options.executor == "fluid"
        print(f"{workload.title}: {options.algo} on {options.executor}, {options.scale}; data from {sweep.folder}")
        outcome = sweep.run(executor if on_fluid else None, [Progress(workload.metric, workload.mode)])
    except tune.SweepInterrupted as error:
        interruption, outcome = error, error.result
    except (InvalidFieldError, MissingDependencyError) as error:
        parser.error(str(error))
    except FluidError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    if made:
        fluid.cli.main(["report", str(made[0].run_dir)])
    print(summary(sweep, outcome, with_times=not made))
    if interruption is not None:
        raise interruption


def summary(sweep: Sweep, outcome: Outcome, *, with_times: bool) -> str:
    """Returns the outcome of a sweep as text.

    Args:
        sweep: the sweep.
        outcome: its outcome.
        with_times: whether to tell makespan, busy share and wall time; ``fluid report`` has told those of Fluid.
    """
    workload = sweep.workload
    cut_off = [f"interrupted: {outcome.cut_off} trials were cut off"] if outcome.cut_off else []
    if not outcome.iterations:
        return "\n".join(["", *cut_off, "no trial has reported a result"])
    times = [
        f"makespan {outcome.makespan:.1f} s, devices busy {100 * outcome.utilisation:.0f} %; "
        f"wall time, start-up included: {outcome.wall_time:.1f} s"
    ]
    best = outcome.best
    sign = ">=" if workload.mode == "max" else "<="
    reached = "not reached" if outcome.to_target is None else f"reached after {outcome.to_target:.1f} s"
    lines = [
        "",
        f"{outcome.trials} trials with results, {len(outcome.iterations)} iterations on {outcome.devices} devices",
        *cut_off,
        *(times if with_times else []),
        f"target {workload.metric} {sign} {outcome.target:g}: {reached}",
        f"best: {workload.metric} {best.value:.4f}, {best.trial_id} after {best.iteration} iterations",
        *(
            f"  {name:10} {value:.4g}" if isinstance(value, float) else f"  {name:10} {value}"
            for name, value in best.config.items()
        ),
    ]
    return "\n".join(lines)


def _parser(workload: Workload) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Tunes {workload.title} with Ray Tune, on Fluid or without it.")
    add = parser.add_argument
    add("--algo", choices=ALGORITHMS, default="asha", help="the search algorithm (default asha)")
    add("--executor", choices=("fluid", "tune"), default="fluid", help="what runs the trials (default fluid)")
    add("--data", metavar="DIR", help=f"a folder with {workload.data.files} (default: download)")
    add("--scale", choices=SCALE_NAMES, default="small", help="minutes, or the paper's setting (default small)")
    add("--samples", type=_whole("samples", 1), metavar="N", help="configurations (default: by the algorithm)")
    add("--seed", type=_whole("seed", 0), default=0, metavar="S", help="seed of all random numbers (default 0)")
    add("--devices", type=_whole("devices", 1), metavar="N", help="how many GPUs or CPU cores to use (default all)")
    add("--max-width", type=_whole("max_width", 1), metavar="N", help="most devices of one trial on Fluid (default 8)")
    add("--run-dir", metavar="DIR", help="folder for results (default: ~/fluid_runs and ~/ray_results)")
    add("--reuse-actors", action="store_true", help="with --executor tune: Tune's reuse_actors=True")
    return parser


def _whole(field: str, least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            return require_integer(field, int(text), at_least=least)
        except InvalidFieldError as error:
            raise argparse.ArgumentTypeError(error.reason) from None
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None

    return read
