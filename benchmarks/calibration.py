"""Measures how well forecasts of ends are calibrated.

    python benchmarks/calibration.py [--part native] [--groups 500] [--json FILE]
    python benchmarks/calibration.py --part sweeps [--sweeps 200] [--json FILE]

Of a good forecast, nine in ten groups end by its 90 % time. Part ``native``: groups of trials, run by the real engine
on the simulated backend, with errors of the predicted runtimes and trials that are stopped early. At a quarter, at half
and at three quarters of their iterations, the forecast is asked when the group ends and which trial ends last. The
pinball loss of its quantiles is compared with that of the ETA, one number for all quantiles.

Part ``sweeps``: sweeps of several algorithms, simulated ones in the same way, and 20 real ones of trials that sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import calibration_native
import calibration_sweeps
from rich.console import Console
from rich.table import Table

PARTS = ("native", "sweeps")


def print_native(figures: Mapping[str, Any]) -> None:
    """Prints the figures of native groups."""
    table = Table(title=f"{figures['groups']} simulated groups")
    names = ("covered_by_0.1", "covered_by_0.5", "covered_by_0.9", "pinball_over_eta", "last_first", "last_in_three")
    names += ("within_an_iteration_first", "within_an_iteration_in_three")
    for name in ("", *names):
        table.add_column(name.replace("_", " "))
    rows = {"all": figures["all"]}
    for part in figures:
        if part.startswith(("by_", "half_time_by")):
            rows |= {f"{part.replace('_', ' ')} {level}": found for level, found in figures[part].items()}
    for label, found in rows.items():
        table.add_row(label, *(f"{found[name]:.2f}" for name in names))
    Console(width=200).print(table)
    for odds, found in figures["odds_of_the_trial_named_first"].items():
        print(f"named first with odds {odds}, on average {found['odds']}: {found['ended_last']} ended last")
    print("milliseconds for 1,000 trials:", figures["milliseconds_for_1000_trials"])


def main() -> None:
    """Runs the benchmark and prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", choices=PARTS, default="native", help="what to forecast")
    parser.add_argument("--groups", type=int, default=500, help="simulated groups")
    parser.add_argument("--sweeps", type=int, default=200, help="simulated sweeps, besides 20 real ones")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file, beside other parts")
    options = parser.parse_args()
    if options.part == "native":
        figures = calibration_native.measure(options.groups)
        print_native(figures)
    else:
        figures = calibration_sweeps.measure(options.sweeps)
        print(json.dumps(figures, indent=1))
    if options.json:
        path = Path(options.json)
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        known[options.part] = {
            "machine": f"{os.cpu_count()} CPU cores, shared, Python {platform.python_version()}",
            "date": time.strftime("%Y-%m-%d"),
            **figures,
        }
        path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
