"""LCBench by YAHPO Gym's surrogate; needs onnxruntime and the files of the benchmark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fluid.errors import InvalidFieldError
from fluid.rehearsal.benchmark import Benchmark, Curve
from fluid.rehearsal.sources import source_by_name
from fluid.search.space import make_space

pytest.importorskip("onnxruntime")
DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
pytestmark = pytest.mark.skipif(not (DATA / "yahpo" / "lcbench").is_dir(), reason="needs YAHPO Gym's LCBench")


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    return source_by_name("lcbench:189866", DATA)


def configs(benchmark: Benchmark, number: int) -> list[dict[str, object]]:
    space, rng = make_space(benchmark.space), np.random.default_rng(1)
    return [space.config(space.sample(rng)) for _ in range(number)]


def test_the_figures_are_those_that_the_data_are_known_for(benchmark: Benchmark) -> None:
    curves = [benchmark.replay(config, range(1, 53)) for config in configs(benchmark, 300)]
    seconds = sorted(one.seconds for curve in curves for one in curve)
    low, middle, high = (seconds[int(share * len(seconds))] for share in (0.05, 0.5, 0.95))
    assert 6.0 < low < 10.0 and 12.0 < middle < 18.0 and 95.0 < high < 140.0
    assert 65.0 < max(curve[-1].metrics["val_accuracy"] for curve in curves) < 80.0
    assert all(list(curve[0].metrics) == list(curve[-1].metrics) for curve in curves)


def test_a_part_of_a_curve_is_as_in_the_whole(benchmark: Benchmark) -> None:
    one, other = configs(benchmark, 2)
    whole = benchmark.replay(one, range(1, 53))
    assert [each.metrics for each in benchmark.replay(one, range(5, 11))] == [each.metrics for each in whole[4:10]]
    assert [each.seconds for each in benchmark.replay(one, range(5, 11))] == pytest.approx(
        [each.seconds for each in whole[4:10]]
    )
    assert sum(each.seconds for each in whole) == pytest.approx(whole[-1].metrics["time"], rel=1e-3)
    together = benchmark.replay_many([Curve(one, range(1, 53)), Curve(other, range(3, 4))])
    assert [len(curve) for curve in together] == [52, 1]
    assert together[0] == whole and together[1] == benchmark.replay(other, range(3, 4))


def test_it_has_no_more_epochs_than_it_has(benchmark: Benchmark) -> None:
    (config,) = configs(benchmark, 1)
    assert len(benchmark.replay(config, range(50, 60))) == 3
    assert benchmark.replay(config, range(53, 60)) == []


def test_regret(benchmark: Benchmark) -> None:
    assert benchmark.regret(benchmark.best_known) == 0.0 and benchmark.regret(benchmark.worst_known) == 1.0
    assert benchmark.regret(benchmark.value_at(0.05)) == pytest.approx(0.05)
    assert source_by_name("lcbench:189866", DATA / "yahpo" / "lcbench").known == benchmark.known


@pytest.mark.parametrize(
    ("name", "field"), [("lcbench:1", "task"), ("lcbench", "task"), ("nas:1", "benchmark"), ("", "benchmark")]
)
def test_unknown_names(name: str, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        source_by_name(name, DATA)
    assert caught.value.field == field


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLUID_BENCHMARKS", raising=False)
    for folder in (None, tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidFieldError) as caught:
            source_by_name("lcbench:189866", folder)
        assert caught.value.field == "data"
    monkeypatch.setenv("FLUID_BENCHMARKS", str(DATA))
    assert source_by_name("lcbench:189866").name == "lcbench:189866"
