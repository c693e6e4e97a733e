"""What torture.py checks of a session, by what its drivers were told and what its files say; independent of Fluid."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torture_search
from torture_driver import AT_THE_END
from torture_files import entries_of, results
from torture_trials import chain

#: Faults after which a checkpoint may be gone.
_DESTROY = ("damage_checkpoint", "lose_memory", "other_boot", "fill_memory", "eio", "enospc")
#: Share of a span, and seconds of each driver and of each stop of one, by which iterations may be told late.
_SURELY, _LATE_S, _STOPPED_S = 0.9, 0.5, 3.5


@dataclass
class Found:
    """What a session has shown.

    Attributes:
        iterations: how many were checked.
        wide: how many of them ran on several devices.
        elastic: how many of them were of elastic trials.
        lost, repeated, wrong: descriptions of what is amiss with iterations.
        others: descriptions of anything else: trials that are missing, or ended otherwise than the script says.
        work: checkpoints that the session had when its disk was full at its end, and that were not used after it.
        times: times that Fluid tells of the session and that cannot be.
        imported: modules of the working directory that a process has executed.
    """

    iterations: int = 0
    wide: int = 0
    elastic: int = 0
    lost: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    work: list[str] = field(default_factory=list)
    times: list[str] = field(default_factory=list)
    imported: list[str] = field(default_factory=list)


@dataclass
class Expected:
    """What a trial was to do.

    Attributes:
        fields: as planned.
        certain: whether it was accepted for certain: a driver may be killed before it is told.
        least, most: iterations that it was to run, if it was not stopped.
        stopped: whether its stop was asked for.
    """

    fields: dict[str, Any]
    certain: bool
    least: int
    most: int
    stopped: bool = False


def read_lines(path: Path, *, may_be_cut: bool = False) -> list[dict[str, Any]]:
    """Returns the entries of a file of JSON lines; none if there is no file. Its last line may be cut if so said."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    if may_be_cut:
        text = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in text.splitlines()]


def told_in(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Gives what drivers were told: the driver's number, and the entry.

    A limit on the size of files cuts the driver's own record too: half a line at its end is passed over.
    """
    for path in folder.glob("told-*.jsonl"):
        for entry in read_lines(path, may_be_cut=True):
            yield int(path.stem.partition("-")[2]), entry


def expectations(plan: dict[str, Any], requests: list[dict[str, Any]]) -> dict[str, Expected]:
    """Returns what each trial was to do, by its id."""
    submitted = {entry["group"]: False for entry in requests if entry["what"] == "submit"}
    submitted |= {entry["group"]: True for entry in requests if entry["what"] == "submit" and "done" in entry}
    expected = {
        fields["id"]: Expected(fields, certain, fields["budget"], fields["budget"])
        for group, certain in submitted.items()
        for fields in plan["groups"][group]
    }
    for entry in requests:
        done, refused = "done" in entry, "refused" in entry
        if entry["what"] == "add":
            fields = entry["fields"]
            if not done and not refused:
                expected[fields["id"]] = Expected(fields, False, fields["budget"], fields["budget"])
            elif done:
                expected[fields["id"]].certain = True
        elif entry["what"] == "extend" and entry["trial"] in expected:
            trial = expected[entry["trial"]]
            if done:
                trial.least += entry["by"]
            else:  # Asked for; a refusal takes it back.
                trial.most += -entry["by"] if refused else entry["by"]
        elif entry["what"] in ("stop", "stop_now") and entry["trial"] in expected and not refused:
            expected[entry["trial"]].stopped = True
    return expected


def check(folder: Path) -> Found:
    """Checks a session that has ended."""
    found = Found()
    plan = json.loads((folder / "plan.json").read_text())
    if (folder / "imported.txt").exists():
        found.imported = sorted(set((folder / "imported.txt").read_text(errors="replace").splitlines()))
    if plan["kind"] == "optuna":
        found.iterations, found.lost, found.wrong, found.others = torture_search.check_study(plan, folder)
        return found
    if plan["kind"] == "tune":
        _check_sweep(found, plan, folder)
        return found
    requests = read_lines(folder / "requests.jsonl")
    expected = expectations(plan, requests)
    written: dict[str, list[dict[str, Any]]] = {}
    for entry in results(folder / "disk" / "run"):
        written.setdefault(entry["trial"], []).append(entry)
    told: dict[str, dict[int, str | None]] = {}
    told_last: set[tuple[str, int]] = set()
    drivers = [driver for driver, _ in told_in(folder)]
    ways: Counter[tuple[int, str, str, int]] = Counter()
    states: dict[str, str] = {}
    for driver, entry in sorted(told_in(folder), key=lambda pair: pair[0]):
        if "iteration" in entry:
            _check_told(found, told.setdefault(entry["trial"], {}), driver, entry)
            if driver == max(drivers):
                told_last.add((entry["trial"], entry["iteration"]))
            ways[(driver, entry["way"], entry["trial"], entry["iteration"])] += 1
        states |= entry.get("states", {})
        if entry.get("answer") is not None and entry["answer"] != [f"{plan['seed']}/{entry['called']}", 7]:
            found.others.append(f"{entry['called']}: a call was answered by {entry['answer']}")
    for (driver, way, trial, iteration), times in ways.items():
        if times > 1:
            found.repeated.append(f"{trial} {iteration}: told {times} times by {way} of driver {driver}")
    for trial_id, wanted in expected.items():
        lines = written.get(trial_id, [])
        if wanted.certain or lines:
            _check_trial(found, trial_id, wanted, lines, told.get(trial_id, {}), states.get(trial_id))
            missing = [line["iteration"] for line in lines if (trial_id, line["iteration"]) not in told_last]
            if missing:
                found.lost.append(f"{trial_id}: {missing} were not told by the last driver")
            forgotten = any(entry["what"] == "forget" and entry["trial"] == trial_id for entry in requests)
            _check_state(found, trial_id, wanted, states.get(trial_id), forgotten)
    for trial_id in sorted((written.keys() | told.keys()) - expected.keys()):
        found.others.append(f"{trial_id}: was never submitted")
    found.work = thrown_away(folder)
    found.times = implausible_times(plan, folder)
    return found


def thrown_away(folder: Path) -> list[str]:
    """Returns the checkpoints that a session had when its disk was full at its end, and that no later one continued.

    Not those that another fault has destroyed meanwhile.
    """
    faults = read_lines(folder / "faults.jsonl")
    journal = folder / "disk" / "run" / "journal.jsonl"
    found = []
    for driver in read_lines(folder / "drivers.jsonl"):
        number = driver["driver"]
        if not any(fault["kind"] == "full_at_close" and fault["driver"] == number for fault in faults):
            continue
        saved: dict[str, int] = {}
        for entry in entries_of(journal, end=driver["journal"]):
            if entry.get("what") == "TrialSaved" and entry.get("checkpoint"):
                saved[entry["trial_id"]] = entry["checkpoint"]["iteration"]
        begun: dict[str, int] = {}
        for entry in entries_of(journal, first=driver["journal"]):
            if entry.get("what") == "TrialStarted":
                begun.setdefault(entry["trial_id"], entry["iteration"])
        if not any(fault["kind"] in _DESTROY and fault["driver"] >= number for fault in faults):
            found += [
                f"{trial}: saved at {saved[trial]} in driver {number}, which found its disk full; continued at {at}"
                for trial, at in begun.items()
                if at < saved.get(trial, 0)
            ]
    return found


def implausible_times(plan: dict[str, Any], folder: Path) -> list[str]:
    """Returns the times that Fluid tells of a session and that cannot be, by when its drivers ran and what they told.

    From the first start to the last end of a session, or of a group, at least the spans passed in which each driver
    told new iterations, and at most the time since the first driver was started.
    """
    drivers = {entry["driver"]: entry for entry in read_lines(folder / "drivers.jsonl")}
    if not drivers:
        return []
    stops = sum(entry["kind"] == "stop_driver" for entry in read_lines(folder / "faults.jsonl"))
    first_told: dict[tuple[str, int], tuple[int, float]] = {}
    groups: dict[str, list[str]] = {}
    makespans: dict[str, Any] = {}
    report: dict[str, Any] = {}
    trials: dict[str, list[float]] = {}
    for driver, entry in sorted(told_in(folder), key=lambda pair: pair[0]):
        if "iteration" in entry:
            if entry["way"] == AT_THE_END:
                continue  # It says nothing of when the iteration ended.
            key, at = (entry["trial"], entry["iteration"]), (driver, entry["at"])
            first_told[key] = min(first_told.get(key, at), at)
        elif "states" in entry:
            groups[entry["group"]] = list(entry["states"])
            makespans[entry["group"]] = entry.get("makespan")
        elif "report" in entry:
            report, trials = entry["report"], entry["iterations"]
    longest = max(entry["ended"] for entry in drivers.values()) - min(entry["began"] for entry in drivers.values())
    found = []

    def require(name: str, told: Any, least: float, most: float) -> None:
        if not isinstance(told, int | float) or not least <= told <= most:
            found.append(f"{name}: {told}, not between {least:.3f} and {most:.3f}")

    def least_of(ids: set[str] | None) -> float:
        spans: dict[int, list[float]] = {}
        for (trial, _), (driver, at) in first_told.items():
            if ids is None or trial in ids:
                spans.setdefault(driver, []).append(at)
        told = sum(max(span) - min(span) for span in spans.values())
        return max(0.0, _SURELY * told - _LATE_S * len(spans) - _STOPPED_S * stops)

    for group, ids in groups.items():
        if any(trial in ids for trial, _ in first_told):
            require(f"makespan of {group}", makespans[group], least_of(set(ids)), longest)
    if report and first_told:
        least, devices = least_of(None), plan["devices"]
        require("makespan", report["makespan"], least, longest)
        if report["wall"] is not None:  # Unknown.
            require("wall", report["wall"], least, longest)
        for name in ("held", "device_seconds"):
            require(name, report[name], least, devices * longest)
        require("busy", report["busy"], 0.0, devices * longest)
        require("utilisation", report["utilisation"], 0.0, 1.0 + 1e-6)
        for fields in (fields for group in plan["groups"].values() for fields in group):
            if fields["id"] in trials and fields["form"] != "elastic":
                iterations, seconds = trials[fields["id"]]
                slept = _SURELY * iterations * fields["config"]["seconds"]
                require(f"seconds of {fields['id']}", seconds, slept, longest)
    return found


def _check_sweep(found: Found, plan: dict[str, Any], folder: Path) -> None:
    """Checks a sweep under Ray Tune, by what Tune's callback was told.

    A trial that failed, or whose sweep was restored, goes on from Tune's own checkpoint and reports again what follows:
    that is Tune's. But no iteration is left out, each has its value, and every trial ends.
    """
    (trials,) = plan["groups"].values()
    last: dict[str, int] = {}
    ends: dict[str, str] = {}
    for _, entry in sorted(told_in(folder), key=lambda pair: pair[0]):
        if "begun" in entry:
            last.clear()
        elif "status" in entry:
            ends[entry["trial"]] = entry["status"]
        else:
            trial, number = entry["trial"], entry["iteration"]
            found.iterations += 1
            if entry["step"] != number or entry["value"] != chain(f"{plan['seed']}/{trial}", number)[-1]:
                found.wrong.append(f"{trial} {number}: step {entry['step']}, {entry['value']}")
            if number > last.get(trial, 0) + 1:
                found.lost.append(f"{trial}: {number} after {last.get(trial, 0)}")
            last[trial] = number
    for index in range(len(trials)):
        if ends.get(f"t{index}") != "TERMINATED":
            found.others.append(f"t{index}: ended as {ends.get(f't{index}')}")
        elif plan["scheduler"] == "fifo" and last[f"t{index}"] != torture_search.BUDGET:
            found.lost.append(f"t{index}: ended after {last[f't{index}']}")


def _check_told(found: Found, told: dict[int, str | None], driver: int, entry: dict[str, Any]) -> None:
    before = told.setdefault(entry["iteration"], entry["value"])
    if before != entry["value"]:
        found.wrong.append(
            f"{entry['trial']} {entry['iteration']}: told {before}, and {entry['value']} by driver {driver}"
        )


def _check_trial(
    found: Found,
    trial_id: str,
    wanted: Expected,
    lines: list[dict[str, Any]],
    told: dict[int, str | None],
    state: str | None,
) -> None:
    numbers = Counter(line["iteration"] for line in lines)
    values = chain(wanted.fields["config"]["seed"], max([wanted.most, *numbers, *told]))
    found.iterations += len(lines)
    if wanted.fields["form"] == "elastic":
        found.elastic += len(lines)
        found.wide += sum(line["width"] > 1 for line in lines)
    nasty = wanted.fields["config"]["nasty"]
    for line in lines:
        if not _is_right(_value(line["metrics"]), values, line["iteration"], nasty):
            found.wrong.append(f"{trial_id} {line['iteration']}: {line['metrics']} in results.jsonl")
    for iteration, value in told.items():
        if not _is_right(value, values, iteration, nasty):
            found.wrong.append(f"{trial_id} {iteration}: told {value}")
    found.repeated += [f"{trial_id} {number}: {times} times" for number, times in numbers.items() if times > 1]
    last = max([*numbers, *told], default=0)
    ends_early = wanted.stopped or (wanted.fields["doomed"] and state in ("FAILED", None))  # None: it was forgotten.
    least = last if ends_early else max(last, wanted.least)
    for number in range(1, least + 1):
        where = [name for name, of in (("results.jsonl", numbers), ("told", told)) if number not in of]
        if where:
            found.lost.append(f"{trial_id} {number} of {least}: not in {' nor '.join(where)}")
    if last > wanted.most:
        found.others.append(f"{trial_id}: {last} iterations, of {wanted.most}")


def _check_state(found: Found, trial_id: str, wanted: Expected, state: str | None, forgotten: bool) -> None:
    allowed = ["DONE"] + ["STOPPED"] * wanted.stopped + ["FAILED"] * wanted.fields["doomed"]
    if state not in allowed and not (forgotten and state is None):
        found.others.append(f"{trial_id}: ended as {state}")


def _is_right(value: str | None, values: tuple[str, ...], iteration: int, nasty: dict[str, str]) -> bool:
    """Whether the value of an iteration is right; metrics that the driver cannot read have none."""
    unreadable = value is None and nasty.get(str(iteration), "").startswith("metric_")
    return unreadable or value == values[iteration - 1]


def _value(metrics: Any) -> str | None:
    return metrics.get("value") if isinstance(metrics, dict) else None
