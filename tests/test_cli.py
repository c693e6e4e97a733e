from __future__ import annotations

import argparse
import dataclasses
import inspect
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fluid._imports import try_import
from fluid._version import __version__
from fluid.cli import _parser, main
from fluid.forecasting.scenario import ArrivingWorkload, EventInput, Runtimes, ScenarioInput, Workload
from fluid.planners.portfolio import PLANNERS
from fluid.planners.read_instance import InstanceInput, TrialInput
from fluid.reports.tables.comparison import as_json, policies_as_json
from fluid.reports.tables.size import sizes_as_json
from fluid.resources import Device
from tests.json_fields import undescribed

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
TOY = str(EXAMPLES / "plan_toy.json")
HALVING = str(EXAMPLES / "scenario_successive_halving.json")
ASHA = str(EXAMPLES / "scenario_asha.json")

Captured = pytest.CaptureFixture[str]


def instance(devices: int, runtimes: list[float], **fields: Any) -> dict[str, Any]:
    trials = [{"id": f"t{row}", "runtime_s": runtime} for row, runtime in enumerate(runtimes)]
    return {"devices": devices, "trials": trials, **fields}


def small_scenario(**fields: Any) -> dict[str, Any]:
    workload = {"algorithm": "random", "trials": 6, "max_iterations": 3}
    runtimes = {"distribution": "lognormal", "seconds_per_iteration": 10.0, "sigma": 0.5}
    return {"name": "small", "devices": 2, "workload": workload, "runtimes": runtimes, **fields}


@pytest.fixture
def file(tmp_path: Path) -> Any:
    def write(data: object) -> str:
        path = tmp_path / "input.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(path)

    return write


def answer(capsys: Captured, *arguments: str) -> dict[str, Any]:
    """What a command prints with --json; nothing else may be printed, on stderr neither."""
    assert main([*arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    data: dict[str, Any] = json.loads(printed.out)
    return data


def refusal(capsys: Captured, *arguments: str) -> str:
    """The one line on stderr with which a command is refused."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fluid: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


# --- fluid plan --json: the acceptance cases

# name, instance, planner, widths (None: not looked at), makespan, lower bound (None: not looked at)
CASES = [
    ("1", instance(5, [4, 4, 12, 30], c=2, d=5), "fifo", [1, 1, 1, 1], 30.0, 8.2),
    ("1", instance(5, [4, 4, 12, 30], c=2, d=5), "static", [0.5, 0.5, 1, 3], 12.0, 8.2),
    ("1", instance(5, [4, 4, 12, 30], c=2, d=5), "dynamic", [0.5, 0.5, 1, 3], 10.4, 8.2),
    ("2", instance(4, [100, 26, 25, 25, 25], c=4, d=4), "static", [1, 0.25, 0.25, 0.25, 0.25], 100.0, 30.05),
    ("2", instance(4, [100, 26, 25, 25, 25], c=4, d=4), "dynamic", None, 44.0, 30.05),
    ("3", instance(8, [0.1] * 8, c=4), "static", [1] * 8, 0.1, None),
    ("4", instance(1, [10] * 4, alpha=1.1, c=4), "static", [0.25] * 4, 13.31, None),
    ("4", instance(1, [10] * 4, alpha=1.1, c=4), "fifo", [1] * 4, 40.0, None),
    ("5", instance(1, [10, 4], alpha=1.25, c=2), "static", [0.5, 0.5], 11.0, None),
    ("6", instance(8, [100], beta=1.05, d=8), "static", [8], 17.58875508, None),
    ("6", instance(8, [100], beta=1.3, d=8), "static", [4], 54.925, None),
    ("7", instance(16, [3] * 27, alpha=1.2, c=4), "static", [0.25] * 27, 3.6, None),
    ("7", instance(16, [3] * 27, alpha=1.2, c=4), "fifo", [1] * 27, 6.0, None),
    (
        "8",
        instance(8, list(range(9, 0, -1)), alpha=1.1, beta=1.05, c=4, d=8, epsilon=0.1),
        "static",
        [1] * 4 + [0.25] * 5,
        9.0,
        4.366,
    ),
    (
        "8",
        instance(8, list(range(9, 0, -1)), alpha=1.1, beta=1.05, c=4, d=8, epsilon=0.1),
        "dynamic",
        None,
        6.25,
        4.366,
    ),
    ("9", instance(4, [40, 10, 8, 6, 4, 2], alpha=1.1, beta=1.05, c=4, d=4), "static", None, 21.0, 13.6476),
    ("9", instance(4, [40, 10, 8, 6, 4, 2], alpha=1.1, beta=1.05, c=4, d=4), "dynamic", None, 15.86, 13.6476),
]


@pytest.mark.parametrize(
    ("data", "planner", "widths", "makespan", "bound"),
    [pytest.param(*case[1:], id=f"{case[0]}-{case[2]}") for case in CASES],
)
def test_plans_of_known_instances(
    data: dict[str, Any],
    planner: str,
    widths: list[float] | None,
    makespan: float,
    bound: float | None,
    file: Any,
    capsys: Captured,
) -> None:
    got = answer(capsys, "plan", file(data), "--planner", planner)
    assert list(got) == ["planner", "widths", "makespan_s", "lower_bound_s"]
    assert got["planner"] == planner
    assert list(got["widths"]) == [trial["id"] for trial in data["trials"]]
    # The specification rounds these to the digits it prints.
    rounded = 1e-6 if makespan != 15.86 else 1e-3
    assert got["makespan_s"] == pytest.approx(makespan, rel=rounded)
    if bound is not None:
        assert got["lower_bound_s"] == pytest.approx(bound, rel=1e-4)
    if widths is not None:
        assert list(got["widths"].values()) == widths
    for width in got["widths"].values():
        assert isinstance(width, int if width >= 1 else float)


@pytest.mark.parametrize(
    ("data", "most"),
    [
        (instance(5, [4, 4, 12, 30], c=2, d=5), 10.0),
        (instance(4, [100, 26, 25, 25, 25], c=4, d=4), 33.4),
        (instance(8, list(range(9, 0, -1)), alpha=1.1, beta=1.05, c=4, d=8, epsilon=0.1), 6.0),
        (instance(4, [40, 10, 8, 6, 4, 2], alpha=1.1, beta=1.05, c=4, d=4), 14.7),
    ],
    ids=["1", "2", "8", "9"],
)
def test_the_default_planner_is_better_still(data: dict[str, Any], most: float, file: Any, capsys: Captured) -> None:
    got = answer(capsys, "plan", file(data))
    assert got["planner"] == "portfolio"
    assert got["lower_bound_s"] * (1.0 - 1e-9) <= got["makespan_s"] <= most


def test_the_examples_are_the_cases(capsys: Captured) -> None:
    assert answer(capsys, "plan", TOY, "--planner", "static")["makespan_s"] == pytest.approx(12.0)
    counterexample = str(EXAMPLES / "plan_counterexample.json")
    assert answer(capsys, "plan", counterexample, "--planner", "static")["makespan_s"] == pytest.approx(100.0)
    assert answer(capsys, "plan", counterexample)["makespan_s"] <= 33.4


def test_stdin(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(instance(1, [10, 4], alpha=1.25, c=2))))
    assert answer(capsys, "plan", "-", "--planner", "static")["makespan_s"] == pytest.approx(11.0)


def test_ids_of_any_script(file: Any, capsys: Captured) -> None:
    data = {"devices": 1, "trials": [{"id": "größe [b]=1", "runtime_s": 1}]}
    assert answer(capsys, "plan", file(data))["widths"] == {"größe [b]=1": 1}
    assert main(["plan", file(data)]) == 0
    assert "größe [b]=1" in capsys.readouterr().out


def test_a_line_break_in_an_id_breaks_no_line(file: Any, capsys: Captured) -> None:
    assert main(["plan", file({"devices": 1, "trials": [{"id": "a\nb", "runtime_s": 1}]})]) == 0
    assert "a a?b" in capsys.readouterr().out.splitlines()[-3]


# --- fluid plan, for people


def test_a_plan_for_people(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["plan", TOY, "--planner", "static"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    for device in range(5):
        assert f"gpu {device} " in out
    assert "1/2 of device 4" in out
    assert "3 devices: 0,1,2" in out
    (said,) = [line for line in out.splitlines() if line.startswith("makespan")]
    assert said == "makespan 12 s (1.46x the lower bound, 8.2 s); devices busy 77 %; FIFO would take 30 s (2.50x)"


@pytest.mark.parametrize("columns", [20, 40, 60, 100, 160])
def test_plans_fit_their_terminal(columns: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", TOY]) == 0
    lines = capsys.readouterr().out.splitlines()
    # The summary is left to the terminal to wrap.
    assert all(len(line) <= columns for line in lines if not line.startswith("makespan"))


def test_a_large_plan_is_cut(file: Any, capsys: Captured) -> None:
    assert main(["plan", file(instance(200, [1.0 + row % 7 for row in range(500)])), "--planner", "dynamic"]) == 0
    out = capsys.readouterr().out
    assert "... and 440 more trials" in out
    assert "more devices, busy" in out
    assert len(out.splitlines()) < 140


def test_plan_plots(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "plan.png"
    assert answer(capsys, "plan", TOY, "--plot", str(path))["makespan_s"] < 10.0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", TOY, "--plot", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out.splitlines()


def test_plots_without_matplotlib(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    with try_import("matplotlib", extra="plot") as imports:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    monkeypatch.setattr("fluid.reports.figures.gantt._imports", imports)
    assert "pip install 'matplotlib>=3.7'" in refusal(capsys, "plan", TOY, "--plot", "plan.png")


# --- fluid simulate


def test_simulate_compares_all_planners(capsys: Captured) -> None:
    got = answer(capsys, "simulate", HALVING)
    assert [entry["planner"] for entry in got["results"]] == list(PLANNERS)
    assert {entry["devices"] for entry in got["results"]} == {8}
    assert {entry["trials"] for entry in got["results"]} == {27}
    assert undescribed({*got, *got["results"][0]}, as_json) == set()
    makespans = {entry["planner"]: entry["makespan_s"] for entry in got["results"]}
    assert makespans["portfolio"] < makespans["fifo"]
    for entry in got["results"]:
        assert entry["lower_bound_s"] <= entry["makespan_s"] * (1.0 + 1e-9)
        assert entry["device_hours"] == pytest.approx(8 * entry["makespan_s"] / 3600.0)
        assert 0.0 < entry["utilisation"] <= 1.0


def test_simulate_for_people(file: Any, capsys: Captured) -> None:
    path = file(small_scenario())
    assert main(["simulate", path, "--planner", "portfolio", "--planner", "static", "--planner", "static"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "small: 6 trials, 2 devices, seed 0"
    assert [line.split()[0] for line in lines[4:6]] == ["portfolio", "static"]
    assert any(line.split()[3] == "*" for line in lines[4:6])


def test_the_seed_decides(file: Any, capsys: Captured) -> None:
    path = file(small_scenario(seed=1))
    first, again, other = (
        answer(capsys, "simulate", path, "--planner", "fifo", *seed) for seed in ([], ["--seed", "1"], ["--seed", "2"])
    )
    assert first == again
    assert other["seed"] == 2
    assert other["results"][0]["makespan_s"] != first["results"][0]["makespan_s"]


def several() -> dict[str, Any]:
    """A long workload, and a short one of another owner that arrives while it runs."""
    shape = {"algorithm": "random", "max_iterations": 10}
    workloads = [{**shape, "trials": 8, "name": "long"}, {**shape, "trials": 2, "at": 5, "owner": "ann"}]
    return {"devices": 2, "c": 1, "d": 1, "runtimes": {"distribution": "constant"}, "workloads": workloads}


def test_simulate_compares_group_policies(file: Any, capsys: Captured, tmp_path: Path) -> None:
    path, plot = file(several()), tmp_path / "policies.png"
    got = answer(capsys, "simulate", path, "--plot", str(plot))
    assert plot.stat().st_size > 1000
    means = {run["group_policy"]: run["mean_completion_s"] for run in got["results"]}
    assert means == {"irs": 32.5, "srsf": 32.5, "fifo": 42.5}
    srsf = next(run for run in got["results"] if run["group_policy"] == "srsf")
    assert [workload["completion_s"] for workload in srsf["workloads"]] == [50.0, 15.0]
    assert srsf["mean_completion_s_of_owners"] == {"workload 1": 50.0, "ann": 15.0}
    assert undescribed({*got, *srsf, *srsf["workloads"][0]}, as_json, policies_as_json) == set()
    assert main(["simulate", path, "--group-policy", "fifo", "--group-policy", "srsf"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("2 workloads, 10 trials, 2 devices, seed 0")
    first = [line.split()[0] for line in lines if line.strip()]
    assert [word for word in first if word in ("fifo", "srsf", "irs", "long", "2")] == ["fifo", "srsf", "long", "2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", "1,2"), "devices='1,2': needs a scenario with one workload"),
        (("--deadline", "1h"), "deadline='1h': needs a scenario with one workload"),
        (("--group-policy", "lifo"), "group_policy='lifo': must be one of"),
        (("--seeds", "3"), "seeds=3: needs --deadline or --budget"),
    ],
)
def test_what_is_not_for_several_workloads(
    file: Any, capsys: Captured, arguments: tuple[str, ...], message: str
) -> None:
    assert main(["simulate", file(several()), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_group_policy_needs_several_workloads(file: Any, capsys: Captured) -> None:
    assert main(["simulate", file(small_scenario()), "--group-policy", "irs"]) == 2
    assert "group_policy='irs': needs a scenario with workloads" in capsys.readouterr().err


@pytest.mark.slow
def test_simulate_sizes_devices_for_a_deadline(file: Any, capsys: Captured, tmp_path: Path) -> None:
    workload = {"algorithm": "successive_halving", "trials": 9, "max_iterations": 9}
    path = file(small_scenario(devices=5, workload=workload, c=1, d=1))
    plot = tmp_path / "held.png"
    goals = ("--deadline", "4m", "--price", "3.6", "--spot", "0.5", "--preempt-every", "2m", "--provision", "5s")
    got = answer(capsys, "simulate", path, *goals, "--seeds", "3", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert (got["deadline_s"], got["price_per_device_hour"], got["seeds"]) == (240.0, 3.6, 3)
    assert [row["devices"] for row in got["fixed"]] == [1, 2, 4, 5]
    ends = [row["median_s"] for row in got["fixed"]]
    assert ends == sorted(ends, reverse=True)
    for row in got["fixed"]:
        assert row["cost_usd"] == pytest.approx(3.6 * row["device_hours"]) and row["taken_back"] == 0
    sized, preemptible = got["sized"]
    assert not sized["preemptible"] and preemptible["preemptible"] and preemptible["taken_back"] > 0
    assert sized["cost_usd"] == pytest.approx(3.6 * sized["device_hours"])
    assert preemptible["cost_usd"] == pytest.approx(0.5 * 3.6 * preemptible["device_hours"])
    assert sized["held"][0][0] == 0.0 and 0 < max(held for _, held in sized["held"]) <= 5
    assert got["first"]["meets"] is True
    assert undescribed({*got, *got["first"], *sized}, sizes_as_json) == set()
    assert main(["simulate", path, *goals, "--seeds", "2"]) == 0
    printed = capsys.readouterr().out
    assert "seeds 0 to 1" in printed and "sized, preemptible" in printed
    assert "Deadline 4 min: begins on" in printed.replace("240 s", "4 min") and "over time, seed 0" in printed


@pytest.mark.slow
def test_simulate_says_at_once_what_cannot_be_met(file: Any, capsys: Captured) -> None:
    path = file(small_scenario(c=1, d=1))
    assert main(["simulate", path, "--deadline", "20s", "--seeds", "2"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Deadline 20 s: cannot be met with 90 % on up to 2 GPUs" in printed
    assert "the earliest that can is" in printed and "no fixed number (1, 2) meets them in 90 %" in printed
    got = answer(capsys, "simulate", path, "--deadline", "20s", "--seeds", "2", "--unmeasured")
    assert got["first"]["meets"] is None and got["cheapest_fixed"] is None


def test_simulate_sizes_devices_for_a_budget(file: Any, capsys: Captured) -> None:
    path = file(small_scenario(c=1, d=1))
    few = answer(capsys, "simulate", path, "--budget", "0.01", "--price", "3.6", "--seeds", "2")
    assert few["first"]["within_budget"] is False and few["sized"][0]["met"] == 0.0
    enough = answer(capsys, "simulate", path, "--budget", "9", "--price", "3.6", "--seeds", "2")
    assert enough["first"]["within_budget"] is True and enough["sized"][0]["met"] == 1.0


def test_simulate_says_what_a_budget_allows(file: Any, capsys: Captured) -> None:
    path = file(small_scenario(c=1, d=1))

    def said(*options: str) -> str:
        assert main(["simulate", path, "--price", "3.6", "--seeds", "1", *options]) == 0
        return " ".join(capsys.readouterr().out.split())

    poor = said("--budget", "0.01", "--deadline", "4m")
    assert "cannot be met with 90 % within the budget, by what is known at the start; begins on 1 GPU" in poor
    assert "Budget $0.01: does not suffice; at the start $" in poor
    assert "Budget $9.00: suffices; at the start $" in said("--budget", "9")
    unknown = said("--budget", "9", "--deadline", "4m", "--unmeasured")
    assert "nothing is known at the start; it is measured on" in unknown
    assert "Budget $9.00: whether it suffices is not known at the start." in unknown


def test_simulate_plots(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "asha.png"
    answer(capsys, "simulate", ASHA, "--planner", "dynamic", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    path.unlink()
    answer(capsys, "simulate", HALVING, "--planner", "static", "--devices", "1,2", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_answers_how_many(file: Any, capsys: Captured) -> None:
    path = file(small_scenario())
    got = answer(capsys, "simulate", path, "--devices", "4, 1,2,1")
    assert [entry["devices"] for entry in got["results"]] == [1] * 4 + [2] * 4 + [4] * 4
    assert set(got["advice"]) == {"planner", "fastest", "cheapest", "knee"}
    assert main(["simulate", path, "--devices", "1,2,4", "--planner", "portfolio"]) == 0
    out = capsys.readouterr().out
    assert "How many GPUs? With portfolio" in out
    for word in ("fastest", "cheapest", "knee"):
        assert word in out


def test_a_sweep_keeps_to_narrow_terminals(file: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "44")
    for arguments in ([], ["--devices", "1,2"]):
        assert main(["simulate", file(small_scenario()), *arguments]) == 0
        assert all(len(line) <= 44 for line in capsys.readouterr().out.splitlines())


# --- What is refused


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (instance(0, [1.0]), ["devices=0"]),
        (instance(2, [-3.0]), ["runtime_s=-3.0"]),
        (instance(2, []), ["trials=[]"]),
        (instance(2, [1.0], c=0.5), ["c=0.5"]),
        (instance(2, [1.0], alpha="fast"), ["alpha='fast'", "must be a number"]),
        (instance(2, [1.0], colour="red"), ["colour='red'"]),
        (instance(2, [1e308, 1e308]), ["runtime_s=1e+308: must be at most 1e+12"]),
        (instance(2, [1.0], alpha=1e300), ["alpha=1e+300: must be at most 1e+06"]),
        ({"devices": 2, "workload": {}}, ["workload", "a scenario is for fluid simulate"]),
        ('{"devices": 2, "trials": [{"runtime_s": NaN}]}', ["runtime_s=nan"]),
        ({"devices": 1, "trials": [{"id": "a", "runtime_s": 1}, {"id": "a", "runtime_s": 1}]}, ["id='a'"]),
        ({"trials": [{"runtime_s": 1}]}, ["devices", "is missing"]),
        ("[]", ["must hold one JSON object"]),
        ("{", ["is not JSON"]),
    ],
)
def test_bad_instances_name_the_field_and_the_value(data: object, said: list[str], file: Any, capsys: Captured) -> None:
    error = refusal(capsys, "plan", file(data))
    for part in said:
        assert part in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", TOY, "--planner", "zzz"), "planner='zzz': must be one of"),
        (("simulate", HALVING, "--planner", "fifo", "--planner", "zzz"), "planner='zzz': must be one of"),
        (("simulate", HALVING, "--devices", "1,x"), "devices='1,x'"),
        (("simulate", HALVING, "--devices", "0"), "devices=0: must be at least 1"),
        (("simulate", HALVING, "--devices", "1000000"), "devices=1000000: must be at most 100000"),
        (("simulate", HALVING, "--devices", ""), "devices=''"),
        (("simulate", HALVING, "--seed", "-1"), "seed=-1"),
        (("simulate", HALVING, "--deadline", "soon"), "deadline='soon'"),
        (("simulate", HALVING, "--price", "2"), "price=2.0: needs --deadline or --budget"),
        (("simulate", HALVING, "--deadline", "1h", "--spot", "0.6"), "spot=0.6: needs --price"),
        (("simulate", HALVING, "--deadline", "1h", "--price", "1", "--spot", "60"), "spot=60.0: must be above 0"),
        (("simulate", HALVING, "--deadline", "1h", "--preempt-every", "1h"), "preempt_every='1h': needs --spot"),
        (("simulate", HALVING, "--deadline", "1h", "--seeds", "0"), "seeds=0"),
        (("simulate", HALVING, "--budget", "5"), "budget_usd=5.0: needs price_per_device_hour"),
        (("simulate", HALVING, "--deadline", "1h", "--planner", "fifo", "--planner", "static"), "must be one planner"),
        (("simulate", TOY), "is no field of a scenario; an instance is for fluid plan"),
        (("plan", "nowhere.json"), "path='nowhere.json': cannot be read"),
        (("plan", TOY, "--plot", "nowhere/plan.png"), "plot='nowhere/plan.png': cannot be written"),
        (("plan", TOY, "--plot", "plan.nonsense"), "plot='plan.nonsense'"),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[str, ...], said: str, capsys: Captured) -> None:
    assert said in refusal(capsys, *arguments)


def test_bad_stdin_is_refused(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, said in (("{", "is not JSON"), ("[1]", "must hold one JSON object")):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert f"stdin='-': {said}" in refusal(capsys, "plan", "-")


def test_a_huge_value_makes_no_huge_error(file: Any, capsys: Captured) -> None:
    error = refusal(capsys, "plan", file({"devices": 1, "trials": {f"t{row}": 1 for row in range(1000)}}))
    assert "trials={" in error
    assert "must be a list" in error
    assert len(error) < 700


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["plan"], ["simulate", HALVING, "--seed", "x"]])
def test_what_is_no_command_ends_with_status_2(arguments: list[str], capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: fluid" in capsys.readouterr().err


# --- The manual

PLANNERS_PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```console\n\$ fluid (.*?)\n(.*?)\n```", PLANNERS_PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "said"), [pytest.param(*shown, id=shown[0]) for shown in SHOWN])
def test_the_manual_shows_real_output(
    command: str, said: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "90")
    main(command.split())
    printed = capsys.readouterr()
    if "--json" in command:  # the last digits may differ from machine to machine
        assert _close(json.loads(printed.out), json.loads(said))
    else:
        assert [line.rstrip() for line in (printed.out + printed.err).splitlines()] == said.splitlines()


def _close(got: Any, said: Any) -> bool:
    if isinstance(said, dict):
        return got.keys() == said.keys() and all(_close(got[key], said[key]) for key in said)
    if isinstance(said, list):
        return len(got) == len(said) and all(map(_close, got, said))
    return bool(got == (pytest.approx(said) if isinstance(said, float) else said))


def test_the_pages_have_every_command() -> None:
    assert {shown[0].split()[0] for shown in SHOWN} == {"plan", "simulate"}
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    commands = {"plan", "simulate", *re.findall(r"^## fluid (\w+)$", page, re.MULTILINE)}
    assert commands == set(subcommands())


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(found.choices)


def test_every_option_says_what_it_does() -> None:
    actions = [(name, each) for name, parser in subcommands().items() for each in parser._actions]
    assert len(actions) > 100
    assert [(name, each.dest) for name, each in actions if not each.help] == []


@pytest.mark.parametrize(
    "record", [InstanceInput, TrialInput, Device, ScenarioInput, Workload, ArrivingWorkload, Runtimes, EventInput]
)
def test_every_field_of_a_file_is_described(record: type) -> None:
    page = (ROOT / "docs" / "api" / "files.md").read_text(encoding="utf-8")
    assert record is Device or f"::: {record.__module__}.{record.__name__}\n" in page
    described = re.findall(r"^ {4}([\w, ]+): ", (inspect.getdoc(record) or "").partition("Args:")[2], re.MULTILINE)
    named = {name for names in described for name in names.split(", ")}
    inherited = {field.name for base in record.__bases__ if base is not object for field in dataclasses.fields(base)}
    fields = {field.name for field in dataclasses.fields(record) if field.init} - inherited
    assert undescribed(fields - named, record) == set()


# --- The program around the commands


def test_version(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"fluid {__version__}\n"


def python(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, *arguments], text=True, env=environment, cwd=ROOT, **options)


def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys\nfrom fluid.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'rich', 'matplotlib', 'torch', 'ray'} & set(sys.modules)))"
    )
    out, _ = python("-c", script, stdout=subprocess.PIPE).communicate()
    assert "simulate" in out
    assert out.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_error() -> None:
    for options in ([], ["--json"]):
        read_end, write_end = os.pipe()
        os.close(read_end)
        process = python("-m", "fluid.cli", "plan", TOY, *options, stdout=write_end, stderr=subprocess.PIPE)
        os.close(write_end)
        _, errors = process.communicate()
        assert (process.returncode, errors) == (1, "")


def test_interrupts_end_with_status_130(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fluid.planners.instance.Instance.from_json", interrupted)
    assert main(["plan", TOY]) == 130
    assert capsys.readouterr().out == ""
