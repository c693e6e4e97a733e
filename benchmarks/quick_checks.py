"""Quick checks beside a long sweep of another owner: when they start and end, and what the sweep loses.

    python benchmarks/quick_checks.py [--real] [--json FILE]

Each row is a sweep of eight trials of ann that fills the devices, and checks that are submitted in the midst of an
iteration. *before* is without exploratory quanta (their share of the devices is 0) and, under a policy or a planner for
which they did not do so, without devices that change hands between owners. The seconds are those of a virtual clock;
with ``--real``, iterations sleep on two CPU devices.

The worst case is an owner who submits ever new keys: the last rows have one who submits one every two minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from measuring import about

from fluid import Device, FluidExecutor, Trial, TrialGroup
from fluid.backends.local import LocalBackend
from fluid.policies.owners import quanta
from fluid.policies.owners.transfers import Transfers
from fluid.rehearsal import ReplayedIteration
from fluid.rehearsal.outcome import outcome_of


class Constant:
    """A trainable of which every iteration takes ``config["s"]`` seconds."""

    @staticmethod
    def replay(config: dict[str, Any], iterations: range) -> list[ReplayedIteration]:
        """Returns its iterations, for the virtual clock."""
        return [ReplayedIteration({"loss": 1.0 / each}, config["s"]) for each in iterations]


@dataclass(frozen=True)
class Variant:
    """A row.

    Attributes:
        name: for people.
        options: of the executor.
        devices: how many.
        iterations, seconds: of each trial of the sweep.
        checks: (trials, iterations, seconds of each) by the owner, who submits them all at once.
        every_s: seconds between the checks; 0 if all come at once.
        measured: whether the checks have the key of the sweep.
        terms: of their groups.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    devices: int = 2
    iterations: int = 20
    seconds: float = 60.0
    checks: tuple[tuple[int, int, float], ...] = ((1, 1, 60.0),)
    every_s: float = 0.0
    measured: bool = False
    terms: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("default"),
    Variant("srsf", {"group_policy": "srsf"}),
    Variant("dynamic", {"planner": "dynamic"}),
    Variant("priority=10", terms={"priority": 10}),
    Variant("fifo", {"group_policy": "fifo"}),
    Variant("fifo, priority=10", {"group_policy": "fifo"}, terms={"priority": 10}),
    Variant("measured key", measured=True),
    Variant("measured key, srsf", {"group_policy": "srsf"}, measured=True),
    Variant("measured key, dynamic", {"planner": "dynamic"}, measured=True),
    Variant("1 device", devices=1),
    Variant("4 devices", devices=4),
    Variant("3 iterations of 20 s", checks=((1, 3, 20.0),)),
    Variant("3 trials of 20 s", checks=((3, 1, 20.0),)),
    Variant("as long as the sweep", checks=((8, 20, 60.0),)),
    Variant("three owners at once", checks=((1, 1, 60.0),) * 3),
    Variant("iterations of 20 minutes", iterations=3, seconds=1200.0),
    Variant("ever new keys", checks=((1, 1, 60.0),) * 40, every_s=120.0),
    Variant("ever new keys, of 10 iterations", checks=((1, 10, 60.0),) * 40, every_s=120.0),
)


def _as_before(transfers: Transfers) -> list[Any]:
    return []


@contextlib.contextmanager
def before(variant: Variant) -> Iterator[None]:
    """Without what this is about."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(quanta, "MOST_SHARE", 0.0))
        if variant.options.get("group_policy") == "srsf" or variant.options.get("planner") == "dynamic":
            stack.enter_context(mock.patch.object(Transfers, "choose", _as_before))
        yield


def run(variant: Variant) -> dict[str, float]:
    """Runs a row on the virtual clock; seconds from the submission of a check, the longest of all checks."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        options = {"devices": variant.devices, "packing": "off", "max_width": 1, **variant.options}
        with FluidExecutor(backend="simulated", verbose=0, run_dir=folder, **options) as executor:
            sweep = executor.submit_trialgroup(
                TrialGroup(
                    [
                        Trial(Constant, {"s": variant.seconds}, budget=variant.iterations, profile_key="sweep")
                        for _ in range(8)
                    ],
                    name="sweep",
                    owner="ann",
                )
            )
            sweep.wait(timeout=2.5 * variant.seconds)
            handles = []
            for number, (count, iterations, seconds) in enumerate(variant.checks):
                key = "sweep" if variant.measured else f"check-{number}"
                owner = "bob" if variant.every_s else f"bob-{number}"
                trials = [Trial(Constant, {"s": seconds}, budget=iterations, profile_key=key) for _ in range(count)]
                group = TrialGroup(trials, name=f"check-{number}", owner=owner)
                handles.append(executor.submit_trialgroup(group, **variant.terms))
                if variant.every_s:
                    sweep.wait(timeout=variant.every_s)
            for handle in handles:
                handle.wait()
            sweep.wait()
        checks = [outcome_of(folder, group=f"check-{number}") for number in range(len(variant.checks))]
        return {
            "waits_s": max(each.lead_s or 0.0 for each in checks),
            "ends_s": max(each.makespan_s for each in checks),
            "sweep_s": outcome_of(folder, group="sweep").makespan_s,
        }


def sleeper(config: dict[str, Any], state: int | None = None) -> Iterator[tuple[dict[str, float], int]]:
    """Sleeps in each iteration."""
    done = 0 if state is None else state
    while True:
        time.sleep(config["s"])
        done += 1
        yield {"loss": 1.0 / done}, done


def run_real(seconds: float = 0.5, iterations: int = 10) -> dict[str, float]:
    """The first row with iterations that sleep, on two CPU devices."""
    with tempfile.TemporaryDirectory() as place:
        backend = LocalBackend([Device(index, kind="cpu") for index in range(2)], preload=[])
        with FluidExecutor(backend, packing="off", run_dir=Path(place, "run"), verbose=0) as executor:
            trials = [Trial(sleeper, {"s": seconds}, budget=iterations, profile_key="sweep") for _ in range(4)]
            begun = time.monotonic()
            sweep = executor.submit_trialgroup(TrialGroup(trials, name="sweep", owner="ann"))
            time.sleep(4.5 * seconds)
            group = TrialGroup([Trial(sleeper, {"s": seconds}, budget=1, profile_key="check")], name="c", owner="bob")
            submitted = time.monotonic()
            executor.submit_trialgroup(group).wait()
            ended = time.monotonic()
            sweep.wait()
            return {"ends_s": ended - submitted, "sweep_s": time.monotonic() - begun}


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="only the real run: three times before, three times after")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.real:
        for _ in range(3):
            with before(VARIANTS[0]):
                was = run_real()
            rows.append({"name": "real, iterations of 0.5 s", "before": was, "after": run_real()})
            print(rows[-1], flush=True)
    for variant in () if options.real else VARIANTS:
        with before(variant):
            was = run(variant)
        now = run(variant)
        rows.append({"name": variant.name, "before": was, "after": now})
        parts = [f"{name[:-2]} {was[name]:6.0f} -> {now[name]:6.0f} s" for name in now]
        print(f"{variant.name:34}", "   ".join(parts), flush=True)
    if options.json:
        options.json.write_text(json.dumps({**about(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
