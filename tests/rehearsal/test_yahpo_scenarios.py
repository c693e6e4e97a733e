"""Scenarios of YAHPO Gym other than LCBench, on small networks: inputs, seconds, memory and conditions."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import InvalidFieldError, MissingDependencyError
from fluid.rehearsal import yahpo
from fluid.rehearsal.benchmark import Curve
from fluid.rehearsal.sources import source_by_name
from fluid.rehearsal.yahpo import SCENARIOS, YahpoBenchmark, scenario_of
from fluid.search.domains import Choice, FloatRange, IntRange
from tests.rehearsal.small_scenario import SCENARIO, SPACE, SummingNetwork, write_network, write_scenario

DART = {"booster": "dart", "rate_drop": 0.25, "depth": 4}
MIB = 2.0**20


@pytest.fixture
def network() -> SummingNetwork:
    return SummingNetwork()


@pytest.fixture
def benchmark(tmp_path: Path, network: SummingNetwork) -> YahpoBenchmark:
    return YahpoBenchmark("small", "7", write_scenario(tmp_path / "small"), network=network)


def test_the_space_is_what_a_trial_may_choose(benchmark: YahpoBenchmark) -> None:
    assert benchmark.name == "yahpo:small:7" and benchmark.max_iterations == 20
    assert benchmark.space == {
        "booster": Choice(("gblinear", "gbtree", "dart")),
        "rate_drop": FloatRange(0.0, 1.0),
        "depth": IntRange(1, 16, log=True),
    }


def test_the_network_is_asked_in_its_order(benchmark: YahpoBenchmark, network: SummingNetwork) -> None:
    played = benchmark.replay(DART, range(19, 30))
    ((categories, numbers),) = network.asked
    assert categories == [[2, 1]] * 20
    assert numbers[-1] == [0.25, 4.0, 1.0, 10.0, 5.0]  # The further fidelity is held at its greatest value.
    assert numbers[0] == pytest.approx([0.25, 4.0, 0.05, 10.0, 5.0])
    assert len(played) == 2
    assert played[-1].metrics == pytest.approx({"auc": 100.5, "timetrain": 100.0, "ramtrain": 9.5})
    assert played[-1].seconds == pytest.approx(5.0, rel=1e-4)
    assert played[-1].memory_bytes == pytest.approx(9.5 * MIB)


def test_hyperparameters_that_do_not_count_are_absent(benchmark: YahpoBenchmark, network: SummingNetwork) -> None:
    tree = {"booster": "gbtree", "depth": 4}
    assert benchmark.replay({**tree, "rate_drop": 0.9}, range(20, 21)) == benchmark.replay(tree, range(20, 21))
    linear = benchmark.replay({"booster": "gblinear"}, range(20, 21))
    assert [row[:2] for _, rows in network.asked for row in rows[-1:]] == [[0.0, 4.0], [0.0, 0.0]]
    assert linear[0].metrics["auc"] == pytest.approx(2 * 16 + 2 * 64 + 1 + 1.25)
    with pytest.raises(InvalidFieldError, match="depth"):
        benchmark.replay({"booster": "gbtree"}, range(1, 2))


def test_no_iteration_is_asked_for_twice(benchmark: YahpoBenchmark, network: SummingNetwork) -> None:
    first = benchmark.replay(DART, range(1, 4))
    whole = benchmark.replay(DART, range(1, 10))
    assert whole[:3] == first
    assert benchmark.replay(DART, range(2, 6)) == whole[1:5]
    assert [len(rows) for _, rows in network.asked] == [3, 6]


def test_several_trials_are_one_batch(benchmark: YahpoBenchmark, network: SummingNetwork, tmp_path: Path) -> None:
    others = [{**DART, "depth": depth} for depth in (1, 2, 3)]
    asked = [Curve(config, range(1, number + 2)) for number, config in enumerate(others)]
    played = benchmark.replay_many([*asked, Curve(others[0], range(1, 3)), Curve(others[0], range(1, 2))])
    assert [len(rows) for _, rows in network.asked] == [2 + 2 + 3]
    assert [len(each) for each in played] == [1, 2, 3, 2, 1]
    assert played[3][:1] == played[0] == played[4]
    fresh = YahpoBenchmark("small", "7", tmp_path / "small", network=SummingNetwork())
    assert [fresh.replay(*each) for each in asked] == played[:3]


def test_seconds_never_fall_short(tmp_path: Path, network: SummingNetwork) -> None:
    class Falling(SummingNetwork):
        def run(self, categories: Any, numbers: Any) -> Any:
            found = super().run(categories, numbers)
            found[:, 1] = [10.0, 8.0, 13.0][: len(found)]
            return found

    benchmark = YahpoBenchmark("small", "7", write_scenario(tmp_path / "small"), network=Falling())
    seconds = [one.seconds for one in benchmark.replay(DART, range(1, 4))]
    assert seconds == pytest.approx([10.0, yahpo.LEAST_SECONDS, 3.0])


def test_numbers_outside_of_the_space_count_as_the_nearest(benchmark: YahpoBenchmark) -> None:
    perturbed = benchmark.replay({**DART, "depth": 4.4, "rate_drop": 1.2}, range(1, 3))
    assert perturbed == benchmark.replay({**DART, "depth": 4, "rate_drop": 1.0}, range(1, 3))
    assert benchmark.replay({**DART, "depth": -3}, range(1, 3)) == benchmark.replay({**DART, "depth": 1}, range(1, 3))


def test_tasks_have_codes_of_their_own(tmp_path: Path, network: SummingNetwork) -> None:
    folder = write_scenario(tmp_path / "small")
    YahpoBenchmark("small", "12", folder, network=network).replay(DART, range(1, 2))
    assert network.asked[0][0] == [[1, 1]]
    with pytest.raises(InvalidFieldError) as caught:
        YahpoBenchmark("small", "13", folder, network=network)
    assert caught.value.field == "task"


def test_a_scenario_without_tasks(tmp_path: Path, network: SummingNetwork) -> None:
    folder = write_scenario(tmp_path / "small", instance=None, categories=["booster"])
    benchmark = YahpoBenchmark("small", yahpo.ONLY_TASK, folder, network=network)
    assert benchmark.name == "yahpo:small" and yahpo.tasks_of("small", folder) == [yahpo.ONLY_TASK]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({**DART, "booster": "none"}, "booster"),
        ({**DART, "depth": "deep"}, "depth"),
        ({**DART, "depth": float("nan")}, "depth"),
        ({"booster": "dart"}, "config"),
    ],
)
def test_values_that_mean_nothing(benchmark: YahpoBenchmark, config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        benchmark.replay(config, range(1, 2))
    assert caught.value.field == field


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_published_scenarios_are_complete(name: str, tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, name)
    assert len(set(scenario.inputs)) == len(scenario.inputs) and len(set(scenario.targets)) == len(scenario.targets)
    assert scenario.instance is None or scenario.instance in scenario.categories


def test_files_that_are_something_else(tmp_path: Path, network: SummingNetwork) -> None:
    with pytest.raises(InvalidFieldError, match="scenario"):
        YahpoBenchmark("none", "7", tmp_path, network=network)
    folder = write_scenario(tmp_path / "small")
    with pytest.raises(InvalidFieldError, match=r"model\.onnx"):
        YahpoBenchmark("small", "7", folder)
    wider = write_scenario(tmp_path / "wider", targets=["auc", "timetrain", "ramtrain", "more"])
    with pytest.raises(InvalidFieldError, match="targets"):
        YahpoBenchmark("small", "7", wider, network=network).replay(DART, range(1, 2))
    more = write_scenario(tmp_path / "more", numbers=[*SCENARIO["numbers"], "gamma"])
    with pytest.raises(InvalidFieldError, match="gamma"):
        YahpoBenchmark("small", "7", more, network=network)
    for changes in ({"metric": "acc"}, {"mode": "most"}, {"time": "clock"}, {"strange": 1}):
        with pytest.raises(InvalidFieldError):
            scenario_of(write_scenario(tmp_path / "changed", **changes), "small")
    strange = json.loads(json.dumps(SPACE))
    strange["hyperparameters"][3]["type"] = "normal_float"
    (folder / "config_space.json").write_text(json.dumps(strange))
    with pytest.raises(InvalidFieldError, match="normal_float"):
        YahpoBenchmark("small", "7", folder, network=network)


def test_onnxruntime_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_scenario(tmp_path / "small")
    (folder / "model.onnx").write_bytes(b"")
    monkeypatch.setattr(yahpo._imports, "_error", ModuleNotFoundError("No module named 'onnxruntime'"))
    with pytest.raises(MissingDependencyError, match="onnxruntime"):
        YahpoBenchmark("small", "7", folder)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime")), reason="needs onnx and onnxruntime"
)
def test_a_network_in_a_file(tmp_path: Path, benchmark: YahpoBenchmark) -> None:
    folder = write_scenario(tmp_path / "data" / "yahpo" / "tiny")
    write_network(folder)
    loaded = source_by_name("yahpo:tiny:7", tmp_path / "data")
    for one, other in zip(loaded.replay(DART, range(1, 21)), benchmark.replay(DART, range(1, 21)), strict=True):
        assert one.metrics == pytest.approx(other.metrics) and one.seconds == pytest.approx(other.seconds, rel=1e-3)
    assert source_by_name("yahpo:tiny:7", folder).space == loaded.space
    (folder / "model.onnx").write_bytes(b"no network")
    yahpo._network.cache_clear()
    with pytest.raises(InvalidFieldError, match="onnxruntime"):
        source_by_name("yahpo:tiny:7", folder)
