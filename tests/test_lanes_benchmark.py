"""The benchmark of lanes in which trials take turns: its trace has the shape that it claims, and its parts run."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from statistics import fmean, median

import pytest

# Tests are imported in importlib mode, which leaves sys.path alone.
if (_BENCHMARKS := str(Path(__file__).resolve().parents[1] / "benchmarks")) not in sys.path:
    sys.path.append(_BENCHMARKS)

import lanes
import salus_trace
from salus_trace import TraceJob, mean_completion
from salus_trace import salus_trace as draw


def test_a_trace_has_the_published_sums_and_ranges() -> None:
    for seed in range(20):
        trace = draw(seed)
        assert trace == draw(seed) != draw(seed + 1)
        assert len(trace) == 100 and sum(job.seconds for job in trace) == pytest.approx(303.4 * 60.0)
        assert [job.at for job in trace] == sorted(job.at for job in trace) and trace[0].at == 0.0
        assert all(job.iterations >= 1 for job in trace)
        assert all(110.9e6 <= job.persistent_bytes <= 822.2e6 and job.ephemeral_bytes > 0.0 for job in trace)
        assert all(
            1e9 <= job.persistent_bytes + job.ephemeral_bytes <= 13.8e9 < salus_trace.DEVICE_BYTES for job in trace
        )
        lengths = [job.seconds for job in trace]
        assert 1.5 * median(lengths) < fmean(lengths) < max(lengths) / 4.0  # heavy-tailed


def test_policies_gain_what_they_do_in_the_paper() -> None:
    """Mean completions of 170.6, 53.4 and 96.6 minutes there; the first one of a single trace."""
    traces = [draw(seed) for seed in range(300)]
    first, shortest, fair = (
        fmean(mean_completion(trace, policy(trace)) / 60.0 for trace in traces)
        for policy in salus_trace.POLICIES.values()
    )
    assert first / shortest == pytest.approx(salus_trace.PUBLISHED_RATIO, rel=0.05)
    assert fair == pytest.approx(96.6, rel=0.05)
    assert 140.0 < first < 170.6


def test_a_shorter_trace_has_the_same_shape() -> None:
    trace, short = draw(3), draw(3, scale=0.001, iteration_s=(0.02, 0.1))
    for job, other in zip(trace, short, strict=True):
        assert other.seconds == pytest.approx(job.seconds * 0.001) and other.at == pytest.approx(job.at * 0.001)
        assert other.iterations == 1 or 0.01 < other.iteration_s < 0.15


def test_no_order_of_jobs_is_better_than_the_shortest_remaining_first() -> None:
    for seed in range(20):
        trace = draw(seed, jobs=5)
        best = mean_completion(trace, salus_trace.shortest_remaining_first(trace))
        for order in itertools.permutations(trace):
            now, ends = 0.0, dict[str, float]()
            for job in order:
                ends[job.name] = now = max(now, job.at) + job.seconds
            assert best <= mean_completion(trace, [ends[job.name] for job in trace]) + 1e-9


def test_policies_end_jobs_when_worked_by_hand() -> None:
    jobs = [TraceJob("a", 0.0, 1, 10.0, 0.0, 0.0), TraceJob("b", 2.0, 1, 2.0, 0.0, 0.0)]
    assert salus_trace.first_come_first_served(jobs) == [10.0, 12.0]
    assert salus_trace.shortest_remaining_first(jobs) == [12.0, 4.0]
    assert salus_trace.fair_shares(jobs) == [12.0, 6.0]


# --- The parts


def test_in_one_lane_the_simulated_jobs_end_nearly_as_early_as_they_can() -> None:
    """And first come, first served is just that."""
    trace = draw(1, jobs=12, iteration_s=(0.5, 3.0))
    assert lanes.simulate(trace, "fifo") == pytest.approx(salus_trace.first_come_first_served(trace))
    best = mean_completion(trace, salus_trace.shortest_remaining_first(trace))
    assert best * (1.0 - 1e-9) <= mean_completion(trace, lanes.simulate(trace, "srtf")) < 1.05 * best


@pytest.mark.slow
def test_real_parts_measure_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    path = tmp_path / "figures.json"
    small = ["--jobs", "4", "--seconds", "5", "--configurations", "3", "--chunks", "2", "--chunk-s", "0.02"]
    lanes.main(["--parts", "srtf-real,rounds", "--runs", "1", *small, "--json", str(path)])
    lanes.main(["--parts", "memory", "--trials", "2", "--json", str(path)])
    found = json.loads(path.read_text())
    assert list(found) == ["srtf-real", "rounds", "memory"]
    (run,) = found["srtf-real"]["runs"]
    assert 0.0 < run["fifo_s"] < run["fifo_all_s"] and 0.0 < run["srtf_s"] < run["srtf_all_s"]
    assert min(run["fifo_all_s"], run["srtf_all_s"]) > 0.15, "the work of the four jobs takes 0.2 s"
    assert run["ratio"] == pytest.approx(run["fifo_s"] / run["srtf_s"], rel=0.02)
    for rows in found["rounds"]["runs"].values():
        assert 0.02 < rows[0]["first_results_s"] <= rows[0]["total_s"] + 0.5
    assert found["rounds"]["runs"]["rounds"][0]["chunk_s"] >= 0.02
    memory = found["memory"]
    assert 0.0 < memory["one_lane_bytes"] < memory["a_process_each_bytes"]
