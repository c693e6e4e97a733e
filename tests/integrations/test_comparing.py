"""Algorithms compared on a benchmark, by the library and by the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import fluid
from fluid.cli import main
from fluid.commands.comparing import comparison_json
from fluid.errors import InvalidFieldError
from fluid.integrations.comparing.algorithms import BenchmarkSweep
from fluid.integrations.comparing.compare import Comparison, ComparisonRequest, compare
from fluid.rehearsal.outcome import SweepOutcome
from fluid.rehearsal.overheads import Overheads
from fluid.rehearsal.sources import source_by_name
from fluid.reports.tables.rehearsal import RehearsedFigures
from tests.json_fields import undescribed
from tests.rehearsal import recorded_sweeps

pytest.importorskip("onnxruntime")
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
NAME = "lcbench:3945"
pytestmark = pytest.mark.skipif(not (DATA / "yahpo" / "lcbench").is_dir(), reason="needs YAHPO Gym's LCBench")


def sweep(algorithm: str, **options: object) -> BenchmarkSweep:
    given = {"devices": 4, "samples": 9, "budget": 9, "overheads": Overheads(alpha=1.3, beta=1.3), **options}
    return BenchmarkSweep(benchmark=source_by_name(NAME, DATA), algorithm=algorithm, **given)


@pytest.mark.parametrize("algorithm", ["random", "asha", "hyperband", "bohb", "sha"])
def test_native_algorithms(algorithm: str, tmp_path: Path) -> None:
    first, again = (sweep(algorithm).play(tmp_path / name) for name in ("first", "again"))
    assert first.as_json() == again.as_json()
    assert first.trials == 9 and first.devices == 4 and first.metric == "val_accuracy"
    assert max(trial.iterations for trial in first.played) == 9
    other = sweep(algorithm, seed=1).play(tmp_path / "other")
    assert other.trace != first.trace


def test_bohb_of_hpbandster(tmp_path: Path) -> None:
    pytest.importorskip("hpbandster")
    found = sweep("hpbandster-bohb").play(tmp_path / "run")
    assert found.trials >= 9 and found.best is not None


def test_bohb_of_hpbandster_tries_all_configs_whatever_the_budget(tmp_path: Path) -> None:
    """HpBandSter by itself rounds the number of rungs between 20 / 9 and 20 iterations down to 2."""
    pytest.importorskip("hpbandster")
    found = sweep("hpbandster-bohb", budget=20, samples=16).play(tmp_path / "run")
    assert found.trials == 9 + 3 + 3 + 9  # Configs that each bracket begins with; three have 15, which are too few.
    assert {trial.iterations for trial in found.played} == {2, 7, 20}


@pytest.mark.parametrize(
    ("field", "value"), [("algorithm", "best"), ("devices", 0), ("samples", 0), ("budget", 0), ("budget", 53)]
)
def test_bad_sweeps_are_refused(field: str, value: object) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        sweep(**{"algorithm": "random", field: value})
    assert caught.value.field == field


def test_who_is_first() -> None:
    def outcome(at: float | None) -> SweepOutcome:
        trace = ((1.0, 5.0),) if at is None else ((1.0, 5.0), (at, 1.0))
        facts = {"makespan_s": 99.0, "device_hours": 1.0, "busy_share": 1.0, "results": 1, "trials": 1, "devices": 1}
        return SweepOutcome(trace=trace, metric="loss", mode="min", **facts)

    found = Comparison({"a": [outcome(2.0), outcome(None)], "b": [outcome(2.0), outcome(9.0)], "c": []})
    assert found.firsts(1.0) == {"a": 0.25, "b": 0.75}
    # A seed that failed in one row is left out, and does not move others: b is first with seed 1, a with seed 2.
    rows = {"a": [outcome(2.0), outcome(2.0)], "b": [outcome(9.0), outcome(1.0), outcome(9.0)]}
    found = Comparison(rows, seeds={"a": [1, 2], "b": [0, 1, 2]})
    assert found.common_seeds == [1, 2]
    assert found.firsts(1.0) == {"a": 0.5, "b": 0.5}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rehearse", "--benchmark", NAME, "--data", str(DATA), "--samples", "6", "--budget", "3"]
    options = ["--seeds", "2", "--price", "2", "--jobs", "1", "--out", str(tmp_path / "out")]
    main([*words, *options, "--algorithms", "random,asha", "--json", str(tmp_path / "f.json"), "--record"])
    said = capsys.readouterr().out
    assert "regret" in said and "asha" in said and "surrogate of lcbench:3945" in said
    found = json.loads((tmp_path / "f.json").read_text())
    assert undescribed({*found, *found["rows"][0]}, comparison_json, RehearsedFigures.as_json) == set()
    assert [row["name"] for row in found["rows"]] == ["random", "asha"]
    assert all(len(row["seeds"]) == 2 for row in found["rows"])
    assert set(json.loads((tmp_path / "out" / "rehearsal.json").read_text())["outcomes"]) == {"random", "asha"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--benchmark", NAME, "--algorithms", "best"], "algorithms"),
        (["--benchmark", NAME, "--samples", "0"], "samples"),
        (["--benchmark", "lcbench:1"], "task"),
        (["--algorithms", "asha"], "--benchmark"),
        (["--benchmark", NAME, "--metric", "val_cross_entropy"], "metric='val_cross_entropy': needs a script"),
        (["--benchmark", NAME, "--calibrate", "run"], "must be named, or the rehearsal by --against"),
        (["--benchmark", NAME, "--alpha", "0.5"], "alpha=0.5"),
    ],
)
def test_bad_words(options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--data", str(DATA)] if "--benchmark" in options else []
    assert main(["rehearse", *options, *data, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_an_own_run_is_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the overheads that the run has measured, but for those that are given."""
    recorded_sweeps.sweep(tmp_path / "run", overheads=Overheads(lane_s=7.0, start_s=3.0), samples=12)
    words = ["rehearse", "--benchmark", f"run:{tmp_path / 'run'}", "--algorithms", "random", "--samples", "4"]
    words += ["--jobs", "1", "--json", "-", "--start-s", "2"]
    assert main([*words, "--devices", "2", "--out", str(tmp_path / "out")]) == 0
    found = json.loads(capsys.readouterr().out)
    (said,) = [line for line in found["assumptions"] if line.startswith("overheads: ")]
    assert "given: start_s 2; others measured in" in said and "the start of a lane 7 s" in said
    facts = json.loads((tmp_path / "out" / "random-2-0" / "session.json").read_text())
    assert (facts["overheads"]["lane_s"], facts["overheads"]["start_s"]) == (7.0, 2.0)


@pytest.mark.parametrize("algorithm", ["bohb", "hpbandster-bohb"])
def test_bohb_on_an_own_run(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "hpbandster-bohb":
        pytest.importorskip("hpbandster")
    recorded_sweeps.sweep(tmp_path / "run", samples=12, algorithm="random")  # Its configs have a constant.
    benchmark = source_by_name(f"run:{tmp_path / 'run'}")
    own = BenchmarkSweep(benchmark=benchmark, algorithm=algorithm, devices=4, samples=9, budget=9)
    found = own.play(tmp_path / "own")
    assert found.trials == 9 and found.best is not None


@pytest.mark.slow
def test_a_run_without_the_metric_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def train(config: object) -> Iterator[dict[str, float]]:
        yield {"loss": float("nan")}

    with fluid.FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        executor.submit_trialgroup(fluid.TrialGroup([fluid.Trial(train, {"lr": 0.1})])).wait()
    words = ["rehearse", "--benchmark", f"run:{tmp_path / 'run'}", "--algorithms", "random"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "has no value of 'loss', by which algorithms are compared" in capsys.readouterr().err


def test_a_sweep_that_fails_is_told_with_its_seed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    request = ComparisonRequest(benchmark=NAME, data=str(DATA), algorithms=("random",), samples=3, budget=2, seeds=2)
    out.mkdir()
    (out / "random-8-1").mkdir()
    (out / "random-8-1" / "journal.jsonl").write_text("{}")  # Another session's folder, which is refused.
    said: list[str] = []
    found = compare(request, out, progress=said.append)
    assert said[-1] == "2 of 2 sweeps rehearsed"
    (problem,) = found.problems.items()
    assert problem[0] == "random with seed 1" and "holds a session already" in problem[1]
    assert "Traceback" in (out / "log.txt").read_text()
    assert found.seeds == {"random": [0]} and len(found.outcomes["random"]) == 1


def test_a_request_takes_its_algorithms_at_once() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        ComparisonRequest(benchmark=NAME, data=str(DATA), algorithms=())
    assert caught.value.field == "algorithms"
