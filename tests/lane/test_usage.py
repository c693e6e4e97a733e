"""What an iteration used: measured in its lane, and shown wherever its result is."""

import json
import time
from pathlib import Path

import pytest

import fluid
from fluid import FluidExecutor, Trial, TrialGroup
from fluid.cli import main
from fluid.lane.usage import UsageMeter
from fluid.trainables.usage import NO_USAGE, TITLES, Usage

SIZE = 3_000_000
LONG_S = 0.05


def read_file(path: Path) -> None:
    with open(path, "rb") as file:
        assert len(file.read()) == SIZE


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(SIZE))
    return path


def test_bytes_are_those_of_the_iteration(data: Path, tmp_path: Path) -> None:
    meter = UsageMeter()
    read_file(data)
    meter.begin(None)
    read_file(data)
    (tmp_path / "out").write_bytes(bytes(1000))
    used = meter.end(LONG_S)
    assert used.read_bytes is not None and SIZE <= used.read_bytes < SIZE + 10_000
    assert used.written_bytes is not None and 1000 <= used.written_bytes < 2000


def test_trials_of_one_step_have_a_part_each(data: Path) -> None:
    meter = UsageMeter()
    meter.begin(LONG_S)
    read_file(data)
    part = meter.end(LONG_S, rows=3).read_bytes
    assert part is not None and SIZE // 3 <= part < SIZE // 3 + 10_000


def test_short_iterations_are_not_measured() -> None:
    meter = UsageMeter()
    meter.begin(0.001)
    assert meter.end(LONG_S) is NO_USAGE
    meter.begin(None)
    assert meter.end(0.001) is NO_USAGE


def test_a_system_without_counters_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr("os.open", refuse)
    meter = UsageMeter()
    monkeypatch.undo()
    meter.begin(None)
    assert meter.end(LONG_S) is NO_USAGE


def test_a_total_leaves_out_what_was_not_measured() -> None:
    assert Usage.total([]) == Usage.total([NO_USAGE]) == NO_USAGE
    assert Usage.total([NO_USAGE, Usage(read_bytes=2), Usage(read_bytes=3, written_bytes=0)]) == Usage(
        read_bytes=5, written_bytes=0
    )
    assert set(TITLES) <= set(Usage.__struct_fields__)


def test_results_files_and_reports_have_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config):  # type: ignore[no-untyped-def]
        for step in range(2):
            with open(config["data"], "rb") as file:
                file.read()
            time.sleep(0.02)
            yield {"loss": 1.0 / (step + 1)}

    run = tmp_path / "run"
    with FluidExecutor(backend="local", devices=1, run_dir=run, verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, {"data": str(data)}, budget=2)]))
        told = [result.usage for result in handle.results()]
    assert all(used.read_bytes is not None and used.read_bytes >= SIZE for used in told)
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    assert [line["usage"]["read_bytes"] for line in lines] == [used.read_bytes for used in told]
    (trial,) = fluid.load(run).trials
    assert [result.usage for result in trial.results] == told
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"][0]["usage"]["read_bytes"] == Usage.total(told).read_bytes
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["report", str(run), "--columns", "read,written"]) == 0
    shown = capsys.readouterr().out
    assert "read" in shown and "5.72 MiB" in shown
