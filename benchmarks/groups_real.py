"""Real sweeps side by side on unlike devices of this machine: mean completion under each group policy.

    python benchmarks/groups_real.py [--rounds 4] [--parts native tune speed] [--json FILE]

Three CPU devices: one of 8 GB, two of 2 GB, which take 1.5 times as long for an iteration. Trials sleep, so that three
devices are as fast as three, however many cores there are. A general sweep (24 trials, 1 GB each, any device) comes
first, a demanding one (4 trials, 6 GB each, the large device only) 0.2 s later. Completion is the
time from the engine's hearing of a sweep to the end of its last trial, by the journal.

* ``native``: two groups with ``submit_trialgroup``.
* ``tune``: two ``tune.run`` in two threads, with ``resources_per_trial={"memory": ...}``, on one executor.
* ``speed``: how many iterations on a slowed device until its speed is known within 10 %, and how far off it is in the
  end. Nothing tells the engine of the slowdown.

Policies alternate within a round, in an order that turns from round to round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from groups_real_workload import DEVICES, SLOWDOWN, Sleeper, sleeper

from fluid import Device, FluidExecutor, MemoryNeed, Trial, TrialGroup

GB = 1e9
POLICIES = ("fifo", "srsf", "irs")
#: Name, trials, bytes of each, iterations, and seconds of one on a fast device; in order of submission.
SWEEPS = (("general", 24, 1.0 * GB, 4, 0.2), ("demanding", 4, 6.0 * GB, 4, 0.2))
GAP_S = 0.2


def devices() -> list[Device]:
    """The devices: models differ, so that their speeds are measured."""
    return [
        Device(index, kind="cpu", memory_bytes=room * GB, model="large" if index == 0 else "small")
        for index, room in enumerate(DEVICES)
    ]


def native(executor: FluidExecutor, folder: Path) -> None:
    """Runs the sweeps as two groups."""
    handles = []
    for position, (name, count, room, budget, seconds) in enumerate(SWEEPS):
        time.sleep(GAP_S if position else 0.0)
        group = TrialGroup(name=name)
        for _ in range(count):
            need = MemoryNeed(persistent_bytes=room)
            group.add(Trial(sleeper, {"seconds": seconds}, budget=budget, memory=need, profile_key="sleeper"))
        handles.append(executor.submit_trialgroup(group))
    for handle in handles:
        assert handle.wait(timeout=120.0), f"{handle.name} has not ended"


def under_tune(executor: FluidExecutor, folder: Path) -> None:
    """Runs the sweeps as two ``tune.run`` in two threads."""
    from fluid import tune

    def run(name: str, count: int, room: float, budget: int, seconds: float) -> None:
        analysis = tune.run(
            Sleeper,
            config={"seconds": seconds},
            num_samples=count,
            stop={"training_iteration": budget},
            resources_per_trial={"cpu": 1, "memory": room},
            executor=executor,
            storage_path=str(folder / "tune"),
            name=name,
            verbose=0,
        )
        assert all(trial.last_result["training_iteration"] == budget for trial in analysis.trials)

    threads = [threading.Thread(target=run, args=sweep) for sweep in SWEEPS]
    for thread in threads:
        thread.start()
        time.sleep(GAP_S)
    for thread in threads:
        thread.join()


def once(how: Any, policy: str) -> dict[str, float]:
    """Runs the sweeps in a session of their own; returns the seconds of each."""
    with tempfile.TemporaryDirectory() as folder:
        chosen: dict[str, Any] = {"packing": "off", "group_policy": policy, "verbose": 0}
        with FluidExecutor("local", devices(), run_dir=Path(folder, "run"), **chosen) as executor:
            warm_up(executor)
            how(executor, Path(folder))
        return completions(Path(folder, "run"))


def completions(run: Path) -> dict[str, float]:
    """Seconds from the submission of each group to the end of its last trial, by name, given the run folder."""
    submitted = map(json.loads, (run / "trials.jsonl").read_text(encoding="utf-8").splitlines())
    names = {line["group"]: line["name"] for line in submitted if "name" in line}
    begun, ended = dict[str, float](), dict[str, float]()
    for line in map(json.loads, (run / "journal.jsonl").read_text(encoding="utf-8").splitlines()):
        if line["what"] == "GroupSubmitted":
            begun.setdefault(line["group_id"], line["at"])
        elif line["what"] == "ReportEnd":
            ended[line["group_id"]] = line["at"]
    return {name: ended[group] - begun[group] for group, name in names.items() if name != "warm-up"}


def warm_up(executor: FluidExecutor) -> None:
    """One iteration on each device, so that its lane runs; the seconds of an iteration are then known, too."""
    trials = [Trial(sleeper, {"seconds": 0.1}, budget=1, profile_key="sleeper") for _ in DEVICES]
    assert executor.submit_trialgroup(TrialGroup(trials, name="warm-up")).wait(timeout=60.0)


def compare(how: Any, rounds: int) -> dict[str, Any]:
    """Runs every policy in every round; returns mean completions and their ratios to that of IRS."""
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for number in range(rounds):
        turned = POLICIES[number % 3 :] + POLICIES[: number % 3]
        for policy in turned:
            found[policy].append(took := once(how, policy))
            print(f"  {policy:5}", {name: round(seconds, 2) for name, seconds in sorted(took.items())}, flush=True)
    means = {policy: [statistics.mean(took.values()) for took in some] for policy, some in found.items()}
    summary: dict[str, Any] = {"rounds": rounds}
    for policy in POLICIES:
        ratios = [mean / irs for mean, irs in zip(means[policy], means["irs"], strict=True)]
        summary[policy] = {
            "mean_completion_s": round(statistics.mean(means[policy]), 3),
            **{f"{name}_s": round(statistics.mean(took[name] for took in found[policy]), 3) for name, *_ in SWEEPS},
            "over_irs": round(statistics.mean(ratios), 3),
            "over_irs_least": round(min(ratios), 3),
            "over_irs_most": round(max(ratios), 3),
        }
    return summary


def slowed_device(rounds: int) -> dict[str, Any]:
    """How soon the engine knows the speed of a slowed device, and how well."""
    found = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            chosen: dict[str, Any] = {"packing": "off", "verbose": 0}
            with FluidExecutor("local", devices()[:2], run_dir=Path(folder, "run"), **chosen) as executor:
                trials = [Trial(sleeper, {"seconds": 0.1}, budget=20, profile_key="sleeper") for _ in range(2)]
                handle = executor.submit_trialgroup(TrialGroup(trials))
                known_after, speed = None, None
                ran = {trial.trial_id: 0 for trial in trials}
                for result in handle.results():
                    ran[result.trial_id] = result.iteration
                    profile = executor.profile
                    speeds = profile.speeds("sleeper", ["large", "small"])
                    speed = (speeds["small"] or 0.0) / (speeds["large"] or 1.0)
                    if known_after is None and abs(speed * SLOWDOWN - 1.0) <= 0.1:
                        known_after = min(ran.values())
                found.append({"known_after_iterations": known_after, "speed": round(speed or 0.0, 4)})
        print("  ", found[-1], flush=True)
    true = 1.0 / SLOWDOWN
    return {
        "true_speed": round(true, 4),
        "runs": found,
        "worst_error": round(max(abs(one["speed"] / true - 1.0) for one in found), 4),
    }


def main() -> None:
    """Runs the chosen parts, prints and writes what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of all policies (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=("native", "tune", "speed"), default=["native", "tune", "speed"])
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args()
    if "tune" in options.parts:
        os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
        ray.init(num_cpus=len(DEVICES), include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    about: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/groups_real.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} shared CPU cores, {platform.machine()}",
        "load_before": round(os.getloadavg()[0], 1),
    }
    out: dict[str, Any] = {}
    if options.json is not None and options.json.exists():  # Parts that are not run now stay.
        out = json.loads(options.json.read_text(encoding="utf-8"))
    for part in options.parts:
        print(part, flush=True)
        if part == "speed":
            figures = slowed_device(options.rounds)
        else:
            figures = compare({"native": native, "tune": under_tune}[part], options.rounds)
        out[part] = {**about, **figures}
        print(json.dumps(out[part], indent=1), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    for part in sorted({"native", "tune"} & set(options.parts)):
        print(f"\n{part:8} {'mean completion':>16} {'general':>9} {'demanding':>10} {'over IRS':>9} (least-most)")
        for policy in POLICIES:
            row = out[part][policy]
            spread = f"({row['over_irs_least']:.2f}-{row['over_irs_most']:.2f})"
            print(
                f"{policy:8} {row['mean_completion_s']:14.2f} s {row['general_s']:7.2f} s {row['demanding_s']:8.2f} s "
                f"{row['over_irs']:9.2f} {spread}"
            )


if __name__ == "__main__":
    main()
