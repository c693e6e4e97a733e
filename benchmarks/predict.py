"""Measures how well trials are predicted before their first iteration, by the configs of others (docs/theory.md).

    python benchmarks/predict.py [--part offline,makespan,real] [--grid FILE] [--seeds 30] [--settings narrow,...]
        [--data DIR] [--trials 24,40] [--quick] [--figure FILE] [--json FILE]

offline: 200 random trials are drawn from a grid that ``predict_grid.py`` has measured: batch size, width and optimizer
of a perceptron and of a convolutional network, with three more fields that change neither time nor memory. Cohorts
learn the first 60, and predict seconds and bytes of the rest; "without trends" by the median and the most memory of
each cohort. "one key" is the median of all trials so far, and the most memory of any: what holds where cohorts are off.
"mlp and cnn" is one space of both. Memory is what a lane of a CPU measures; "tensors" counts the bytes of PyTorch's
tensors instead, much as a GPU's lane does. Density is the number of devices that an oracle of every need fills, over
the number that are filled by what is reserved; each has four times the largest need.

makespan: sweeps on 8 simulated devices and the real engine, whose trials all have one profile key. One in four takes
three times as long, and one field of its config tells; four others say nothing. In the setting "narrow" each device
runs one trial at a time, so that their order alone decides; trials are packed in "packed", and elastic in "elastic".
With "known runtimes" the engine is told the seconds of each trial, and measures overheads; with "all known", neither.

real: a sweep in processes of this machine, on two cores with a share of its memory each, with cohorts and without. It
reports failures, and predictions of the second group of trials against what was measured of them later.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import predict_makespan
import predict_real
from predict_offline import Guess, in_tensors, predict_grid
from rich.console import Console
from rich.table import Table

GRID = Path(__file__).resolve().parent / "predict_grid.json"
PARTS = ("offline", "makespan", "real")
TRIALS, AFTER = 200, 60


def offline(console: Console, grid: Path, seeds: int, figure: Path | None, *, quick: bool) -> dict[str, Any]:
    """Predicts trials of a measured grid; prints and returns the figures."""
    measured = json.loads(grid.read_text(encoding="utf-8"))
    found: dict[str, Any] = {"grid": {key: value for key, value in measured.items() if key != "rows"}, "seeds": seeds}
    table = Table(title=f"Trials {AFTER + 1} to {TRIALS} before their first iteration, mean of {seeds} searches")
    for column in ("network", "by", "seconds", "p90", "bytes", "p90", "reserved too small", "density", "overfull"):
        table.add_column(column, justify="left" if column in ("network", "by") else "right")
    drawn: dict[str, dict[str, list[Guess]]] = {}
    grids = {"mlp and cnn": measured["rows"]}
    for net in sorted({row["config"]["net"] for row in measured["rows"]}):
        grids[net] = [row for row in measured["rows"] if row["config"]["net"] == net]
        grids[f"{net}, tensors"] = in_tensors(grids[net])
    for net, rows in grids.items():
        if quick and net not in ("mlp", "cnn"):
            continue
        mean, drawn[net], words = predict_grid(rows, seeds=seeds, trials=TRIALS, after=AFTER)
        found[net] = {"figures": mean, "cohorts": words}
        for name, each in mean.items():
            errors = ("seconds_error", "seconds_error_p90", "bytes_error", "bytes_error_p90")
            shares = [f"{each[key]:.1%}" for key in (*errors, "too_small")]
            overfull = f"{each['devices_overfull']:.2f} of {each['devices']:.1f}"
            table.add_row(net, name, *shares, f"{each['density']:.2f}", overfull)
    console.print(table)
    drawn = {net: each for net, each in drawn.items() if net in ("mlp", "cnn")}
    for net in drawn:
        console.print(f"Cohorts of {net} after {TRIALS} trials of the first search:", highlight=False)
        for line in found[net]["cohorts"]:
            console.print(f"  {line}", highlight=False)
    if figure is not None:
        save_scatter(figure, drawn, f"{measured['machine']}, {measured['date']}")
        console.print(f"figure: {figure}")
    return found


def makespan(console: Console, seeds: int, settings: list[str], sweeps: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Compares makespans of sweeps; prints and returns the figures."""
    table = Table(
        title=f"Makespan of bimodal sweeps over that with known runtimes, 8 devices, mean of {seeds} seeds (p90)"
    )
    ways = (*predict_makespan.WAYS, "lower bound")
    for column in ("sweep", "setting", *ways):
        table.add_column(column, justify="left" if column in ("sweep", "setting") else "right")
    found: dict[str, Any] = {"seeds": seeds}
    for name, (algorithm, trials) in sweeps.items():
        found[name] = {}
        for setting in settings:
            found[name][setting] = one = predict_makespan.compare(algorithm, trials, setting, seeds)
            cells = [f"{one[way]['mean_ratio']:.3f} ({one[way]['p90_ratio']:.2f})" for way in ways]
            table.add_row(name, setting, *cells)
    console.print(table)
    return found


def real(console: Console, trials: tuple[int, int], data: str | None) -> dict[str, Any]:
    """Runs a sweep with cohorts and one without; prints and returns the figures."""
    found: dict[str, Any] = {}
    for name, cohorts in (("cohorts", True), ("one key", False)):
        found[name] = one = predict_real.run_sweep(*trials, data, cohorts=cohorts)
        spans = " and ".join(f"{seconds:.1f}" for seconds in one["seconds"])
        packed = " and ".join(f"{each:.2f}" for each in one["mean_packing"])
        console.print(
            f"{name}: {one['trials']} trials in two groups of {spans} s, {packed} at once on a device; "
            f"{len(one['failed'])} failed, {one['started_again']} started again",
            highlight=False,
        )
    one = found["cohorts"]
    found["ratio"] = sum(found["one key"]["seconds"]) / sum(one["seconds"])
    found["ratio_second"] = found["one key"]["seconds"][1] / one["seconds"][1]
    if one["predicted"]:
        console.print(
            f"{one['predicted']} trials of the second group were predicted: median error of seconds "
            f"{one['seconds_error']:.1%}, of bytes {one['bytes_error']:.1%}; reserved too small {one['too_small']:.1%}",
            highlight=False,
        )
    console.print(
        f"Without cohorts the sweep takes {found['ratio']:.2f} times as long, its second group "
        f"{found['ratio_second']:.2f} times",
        highlight=False,
    )
    return found


def save_scatter(path: Path, drawn: dict[str, dict[str, list[Guess]]], note: str) -> None:
    """Draws predicted over measured seconds and bytes, a column for each network.

    Args:
        path: the file to write.
        drawn: predictions by network and predictor.
        note: the machine and date of the measurement.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 8.0), facecolor="white", layout="constrained")
    figure.suptitle(f"Predicted before the first iteration ({note})", x=0.01, ha="left", fontsize=10)
    panels = figure.subplots(2, len(drawn), squeeze=False)
    for column, (net, guesses) in enumerate(drawn.items()):
        for row, what in enumerate(("seconds per iteration", "bytes (MB)")):
            axes, most = panels[row][column], list[float]()
            for name, colour in (("one key", "#E69F00"), ("cohorts", "#0072B2")):
                if row == 0:
                    pairs = [(guess.trial.seconds, guess.seconds) for guess in guesses[name]]
                else:
                    pairs = [(guess.trial.need.peak_bytes / 1e6, guess.typical_bytes / 1e6) for guess in guesses[name]]
                axes.scatter(*zip(*pairs, strict=True), s=14, color=colour, label=name, alpha=0.6, linewidths=0)
                most += [value for pair in pairs for value in pair if value > 0]
            if row == 1:
                pairs = [(guess.trial.need.peak_bytes / 1e6, guess.reserved / 1e6) for guess in guesses["cohorts"]]
                axes.scatter(*zip(*pairs, strict=True), s=14, marker="_", color="#009E73", label="reserved by cohorts")
            axes.axline((1.0, 1.0), slope=1.0, color="#555555", linewidth=0.8)
            axes.set(xscale="log", yscale="log", xlabel=f"measured {what}", ylabel=f"predicted {what}")
            axes.set_xlim(0.7 * min(most), 1.4 * max(most))
            axes.set_ylim(0.7 * min(most), 1.4 * max(most))
            axes.set_title(f"{net}: {what}", loc="left", fontsize=10)
            axes.grid(color="#d9d9d9", linewidth=0.5)
            axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs the parts that are asked for; prints and returns the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", default=",".join(PARTS), help="which parts, comma-separated")
    parser.add_argument("--grid", type=Path, default=GRID, metavar="FILE", help="what predict_grid.py measured")
    parser.add_argument("--seeds", type=int, default=30, help="random sweeps")
    parser.add_argument(
        "--settings", default=",".join(predict_makespan.SETTINGS), help="of the makespans, comma-separated"
    )
    parser.add_argument("--data", metavar="DIR", help="folder with mnist-10k.npz, for real; random images without it")
    parser.add_argument("--trials", default="24,40", help="of the two groups of real")
    parser.add_argument("--quick", action="store_true", help="two seeds, one sweep, few trials")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw predicted over measured values to this file")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    options = parser.parse_args(arguments)
    seeds = 2 if options.quick else options.seeds
    parts = options.part.split(",")
    found: dict[str, Any] = {"machine": f"{os.cpu_count()} shared CPU cores", "date": time.strftime("%Y-%m-%d")}
    found["python"] = platform.python_version()
    console = Console(width=140)
    if "offline" in parts:
        found["offline"] = offline(console, options.grid, seeds, options.figure, quick=options.quick)
    if "makespan" in parts:
        sweeps = dict(list(predict_makespan.SWEEPS.items())[: 1 if options.quick else None])
        found["makespan"] = makespan(console, seeds, options.settings.split(","), sweeps)
    if "real" in parts:
        first, second = (4, 3) if options.quick else map(int, options.trials.split(","))
        found["real"] = real(console, (first, second), options.data)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
