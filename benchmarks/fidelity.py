"""How close rehearsals come to real runs: the three sweeps of examples/, run for real once, and then rehearsed.

    python benchmarks/fidelity.py --data DIR                     # all sweeps; those that were measured are kept
    python benchmarks/fidelity.py --data DIR --scale tiny --workloads cifar10 --runs DIR

Each sweep (examples/native_sweep.py, two devices) is run by random search, ASHA and Hyperband, and rehearsed from its
own run folder with the overheads that were measured there. Compared are the makespan, what was decided (which trials
with which configs reached which iterations, and how they ended), the time to the target, and the order of the
algorithms by it. ASHA and Hyperband are also predicted from the run of random search alone. Trials are not fused, as
rehearsals know no fused packs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # benchmarks/ has a native_sweep, too.

import native_sweep
from tuning.scales import SCALES

from fluid.rehearsal import RehearsalPlan, recorded, rehearsing
from fluid.rehearsal.outcome import SweepOutcome, outcome_of

RESULT = Path("fidelity.json")
ALGORITHMS = ("random", "asha", "hyperband")
#: Algorithms whose times to the target differ by no more than this share may change places.
ALIKE = 0.1
_DEVICES = 2


def play(workload: str, algorithm: str, options: argparse.Namespace, run_dir: Path) -> tuple[SweepOutcome, float]:
    """Runs a sweep of the examples, for real or rehearsed, as the plan in force says; and the seconds that it took."""
    words = ["--workload", workload, "--algorithm", algorithm, "--scale", options.scale, "--data", options.data]
    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        found = native_sweep.main([*words, "--devices", str(_DEVICES), "--run-dir", str(run_dir), "--max-fused", "1"])
    task = native_sweep.TASKS[workload]
    return outcome_of(found.run_dir, task.metric, task.mode), time.perf_counter() - begun


def decisions(outcome: SweepOutcome) -> list[tuple[str, str, str, int]]:
    """What was decided in a sweep: the ids, configs, ends and iterations of its trials."""
    return [
        (trial.trial_id, json.dumps(trial.config, sort_keys=True, default=str), trial.state, trial.iterations)
        for trial in outcome.played
    ]


def rehearse(workload: str, algorithm: str, options: argparse.Namespace, source: Path, where: Path) -> dict[str, Any]:
    """Rehearses a sweep from a run folder, and returns the outcome and how long it took."""
    replayed = recorded(source)
    plan = RehearsalPlan(source=replayed, overheads=replayed.overheads, folder=where)
    with rehearsing(plan):
        outcome, seconds = play(workload, algorithm, options, where)
    return {"outcome": outcome, "took_s": seconds}


def compared(real: SweepOutcome, played: dict[str, Any], target: float) -> dict[str, Any]:
    """The figures of a real sweep beside those of a rehearsal of it."""
    rehearsed: SweepOutcome = played["outcome"]
    return {
        "makespan_s": real.makespan_s,
        "rehearsed_makespan_s": rehearsed.makespan_s,
        "makespan_error": rehearsed.makespan_s / real.makespan_s - 1.0,
        "to_target_s": real.seconds_to(target),
        "rehearsed_to_target_s": rehearsed.seconds_to(target),
        "best": real.best,
        "rehearsed_best": rehearsed.best,
        "same_decisions": decisions(rehearsed) == decisions(real),
        "results": real.results,
        "rehearsed_results": rehearsed.results,
        "rehearsal_took_s": played["took_s"],
    }


def measure(workload: str, options: argparse.Namespace, runs: Path) -> dict[str, Any]:
    """Runs the sweeps of one workload for real, and rehearses them."""
    target = SCALES[workload][options.scale].target
    rows, predicted = {}, {}
    for algorithm in ALGORITHMS:
        real, took = play(workload, algorithm, options, runs / f"{workload}-{algorithm}")
        again = rehearse(
            workload, algorithm, options, runs / f"{workload}-{algorithm}", runs / f"{workload}-r-{algorithm}"
        )
        rows[algorithm] = {**compared(real, again, target), "real_took_s": took}
        if algorithm != "random":
            short = rehearse(
                workload, algorithm, options, runs / f"{workload}-random", runs / f"{workload}-p-{algorithm}"
            )
            predicted[algorithm] = compared(real, short, target)
    return {"target": target, "sweeps": rows, "from_random": predicted, "same_order": same_order(rows)}


def same_order(rows: dict[str, dict[str, Any]]) -> bool | None:
    """Whether algorithms come in the same order by time to the target, rehearsed, where they differ by more than 10 %.

    ``None`` where no two of them can be told apart.
    """
    judged = []
    for one, other in itertools.combinations(rows.values(), 2):
        first, second = one["to_target_s"], other["to_target_s"]
        if first is None or second is None or abs(first - second) <= ALIKE * max(first, second):
            continue
        played, beside = one["rehearsed_to_target_s"], other["rehearsed_to_target_s"]
        judged.append(played is not None and beside is not None and (played < beside) == (first < second))
    return all(judged) if judged else None


def shown(workload: str, found: dict[str, Any]) -> str:
    """The figures of one workload as text."""
    lines = [f"{workload}: same order by time to the target {found['target']:g}: {found['same_order']}"]
    for name, rows in (("rehearsed", found["sweeps"]), ("predicted from random search", found["from_random"])):
        lines += [
            f"  {algorithm:10} {row['makespan_s']:7.2f} s real, {row['rehearsed_makespan_s']:7.2f} s {name} "
            f"({100.0 * row['makespan_error']:+.1f} %), same decisions: {row['same_decisions']}"
            for algorithm, row in rows.items()
        ]
    return "\n".join(lines)


def main() -> None:
    """Measures what has not been measured yet, and writes it down after each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="DIR", help="a folder with the three data sets")
    parser.add_argument("--scale", default="small", choices=("tiny", "small"), help="of the sweeps (default small)")
    parser.add_argument("--workloads", nargs="+", default=list(native_sweep.TASKS), choices=list(native_sweep.TASKS))
    parser.add_argument("--runs", type=Path, metavar="DIR", help="where run folders are left (default: nowhere)")
    parser.add_argument("--output", type=Path, default=RESULT, metavar="FILE", help="JSON (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure all of them anew")
    options = parser.parse_args()
    known: dict[str, Any] = {}
    if options.output.is_file() and not options.again:
        known = json.loads(options.output.read_text(encoding="utf-8")).get("workloads", {})
    with tempfile.TemporaryDirectory() as scratch:
        for workload in options.workloads:
            before = known.get(workload)
            if before is None or before["scale"] != options.scale:
                runs = (options.runs or Path(scratch)) / time.strftime("%Y%m%d-%H%M%S")
                about = {"scale": options.scale, "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0]}
                known[workload] = about | measure(workload, options, runs)
                machine = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}"
                content = {"machine": machine, "devices": _DEVICES, "workloads": known}
                options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            print(shown(workload, known[workload]), flush=True)


if __name__ == "__main__":
    main()
