"""What a trial reports is what is read: equal, of the same type, and as it was at the report.

Trials report values of all kinds and change them afterwards, iterations being too short to be sent one by one. Readers
change what they have read, which no other reader sees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from metric_values import (
    ByStep,
    Replayed,
    by_report,
    by_yield,
    changed,
    difference,
    expected,
    json_difference,
    made,
    metrics_of,
    with_state,
    write,
    wrong,
)

import fluid
from fluid import FluidExecutor, Result, Trial, TrialGroup, TrialListener
from fluid.search import choice

FORMS: dict[str, Any] = {"yield": by_yield, "state": with_state, "report": by_report, "class": ByStep}


@pytest.fixture(scope="module")
def values() -> list[Any]:
    return made()


@pytest.fixture(scope="module")
def path(values: list[Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file with the values that trials report."""
    return write(values, tmp_path_factory.mktemp("values") / "values.pkl")


@pytest.fixture(params=["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])], scope="module")
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "local":
        yield "local"
        return
    import ray

    ray.init(request.getfixturevalue("ray_cluster"), log_to_driver=False, logging_level="ERROR")
    yield "ray"
    ray.shutdown()


class Reading(TrialListener):
    """Compares each result when it is told of it; then changes what it was given."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self.heard: dict[str, list[int]] = {}
        self.wrong: list[str] = []

    def on_result(self, result: Result) -> None:
        self.heard.setdefault(result.trial_id, []).append(result.iteration)
        wanted = expected(result.iteration, self._values[result.iteration - 1])
        if found := difference(result.metrics, wanted):
            self.wrong.append(f"{result.trial_id} {result.iteration}: {found}")
        changed(result.metrics)


def read(results: Iterator[Result] | list[Result]) -> dict[str, dict[int, Any]]:
    """The metrics of each iteration of each trial."""
    found: dict[str, dict[int, Any]] = {}
    for result in results:
        found.setdefault(result.trial_id, {})[result.iteration] = result.metrics
    return found


def written(folder: Path) -> dict[str, dict[int, Any]]:
    """The same, as ``results.jsonl`` has it."""
    found: dict[str, dict[int, Any]] = {}
    for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        found.setdefault(entry["trial"], {})[entry["iteration"]] = entry["metrics"]
    return found


def check(executor: FluidExecutor, values: list[Any], trials: Mapping[str, tuple[Any, Any]]) -> list[Result]:
    """Runs trials in two groups, one read as the results come and one by a listener: both have what was reported.

    Returns:
        The results of the first group, which has been changed.
    """
    numbers = list(range(1, len(values) + 1))
    heard, plain = (
        TrialGroup(
            [
                Trial(made_by, {**config, "group": group}, budget=len(values), trial_id=f"{name}-{group}")
                for name, (made_by, config) in trials.items()
            ]
        )
        for group in ("heard", "read")
    )
    listener = Reading(values)
    told = executor.submit_trialgroup(heard, listener=listener)
    handle = executor.submit_trialgroup(plain)
    results = list(handle.results())
    assert told.wait(), told.states
    assert listener.heard == {f"{name}-heard": numbers for name in trials}
    assert not listener.wrong, listener.wrong[:3]
    for again in (results, list(handle.results())):  # The second reader has its own copies.
        metrics = read(again)
        assert {name: list(of_trial) for name, of_trial in metrics.items()} == {
            f"{name}-read": numbers for name in trials
        }
        for name, of_trial in metrics.items():
            assert not (found := wrong(of_trial, values)), (name, len(found), found[:3])
            changed(of_trial)
    check_files(executor.run_dir, [*told.states, *handle.states], values)
    return results


def check_files(folder: Path, trials: list[str], values: list[Any]) -> None:
    """The files have the JSON form of what was reported."""
    loaded = {
        trial.trial_id: {one.iteration: one.metrics for one in trial.results} for trial in fluid.load(folder).trials
    }
    for found in (written(folder), loaded):
        assert sorted(found) == sorted(trials)
        for trial_id, metrics in found.items():
            assert list(metrics) == list(range(1, len(values) + 1))
            assert not (bad := wrong(metrics, values, json_difference)), (trial_id, len(bad), bad[:3])


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["off", "lane"])
def test_groups(backend: str, packing: str, values: list[Any], path: str, tmp_path: Path) -> None:
    with FluidExecutor(backend=backend, devices=1, packing=packing, run_dir=tmp_path / "run", verbose=0) as executor:
        check(executor, values, {form: (made_by, {"path": path}) for form, made_by in FORMS.items()})


@pytest.mark.slow
@pytest.mark.parametrize("form", ["yield", "class"])
def test_sweeps(backend: str, form: str, values: list[Any], path: str, tmp_path: Path) -> None:
    listener = Reading(values)
    with FluidExecutor(backend=backend, devices=2, run_dir=tmp_path / "run", verbose=0):
        result = fluid.run(
            FORMS[form],
            {"path": choice([path]), "x": choice([1, 2, 3])},
            metric="loss",
            samples=2,
            budget=len(values),
            algorithm="random",
            callbacks=[listener],
        )
        assert not listener.wrong, listener.wrong[:3]
        for trial in result.trials:
            metrics = {one.iteration: one.metrics for one in trial.results}
            assert not (found := wrong(metrics, values)), (trial.trial_id, len(found), found[:3])
        assert difference(result.best.metrics, expected(len(values), values[-1])) == ""
        check_files(tmp_path / "run", [trial.trial_id for trial in result.trials], values)


def test_replays_on_a_virtual_clock(values: list[Any], path: str, tmp_path: Path) -> None:
    half = len(values) // 2
    with FluidExecutor(backend="simulated", devices=2, max_width=1, run_dir=tmp_path / "run", verbose=0) as executor:
        check(executor, values, {"whole": (Replayed(path), {})})
        listener = Reading(values)
        trial = Trial(Replayed(path), {"group": "extended"}, budget=half, trial_id="extended")
        handle = executor.submit_trialgroup(TrialGroup([trial]), listener=listener)
        assert handle.wait()
        handle.extend("extended", len(values) - half)  # It is asked for more, and changes what it had returned.
        assert handle.wait()
        assert listener.heard == {"extended": list(range(1, len(values) + 1))}
        assert not listener.wrong, listener.wrong[:3]


@pytest.mark.slow
def test_rows_of_a_fused_step(values: list[Any], path: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fluid.fused import SGD, FusedTrainable, TensorData

    class Reporting(FusedTrainable):
        """A line, trained with others in one step; what it reports are the values."""

        def build(self, config: dict[str, Any]) -> Any:
            self.values, self.reported = cloudpickle.loads(Path(config["path"]).read_bytes()), []
            return torch.nn.Linear(1, 1)

        def loss(self, model: Any, batch: Any) -> Any:
            return (model(batch[0]) - batch[1]).square().mean()

        def optimizer(self, config: dict[str, Any]) -> Any:
            return SGD(lr=config["lr"])

        def data(self, config: dict[str, Any], seed: int) -> TensorData:
            x = torch.ones(4, 1)
            return TensorData([x, x], [x, x], batch_size=4, seed=seed)

        def summarize(self, means: dict[str, float]) -> dict[str, Any]:
            for metrics in self.reported[-1:]:
                changed(metrics)
            number = len(self.reported) + 1
            self.reported.append(metrics_of(number, self.values[number - 1]))
            return self.reported[-1]

    some = values[::4]
    place = write(some, tmp_path / "some.pkl")
    trials = {f"lr{lr}": (Reporting, {"path": place, "lr": lr}) for lr in (0.1, 0.2, 0.3)}
    with FluidExecutor(backend="local", devices=1, packing="fused", run_dir=tmp_path / "run", verbose=0) as executor:
        assert any(result.rows > 1 for result in check(executor, some, trials))


@pytest.mark.slow
def test_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        weights = torch.zeros(2, 2)
        for _ in range(200):
            weights += 1.0
            yield {"loss": weights.mean(), "one": weights[:1, 0], "parts": {"all": weights, "some": [weights[0]]}}

    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, budget=200, trial_id="a")]))
        for result in handle.results():
            step = float(result.iteration)
            assert type(result.metrics["loss"]) is float and result.metrics["loss"] == step
            assert torch.equal(result.metrics["one"], torch.full((1,), step))
            assert torch.equal(result.metrics["parts"]["all"], torch.full((2, 2), step))
            assert torch.equal(result.metrics["parts"]["some"][0], torch.full((2,), step))
    for iteration, metrics in written(tmp_path / "run")["a"].items():
        assert (metrics["loss"], metrics["one"]) == (float(iteration), float(iteration))
        assert metrics["parts"]["all"] == repr(torch.full((2, 2), float(iteration)))


def test_what_nests_deeply_or_holds_itself(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        deep: list[Any] = []
        for _ in range(100):
            deep = [deep]
        for step in range(50):
            own: dict[str, Any] = {"step": [step]}
            own["own"] = [own, own]
            yield {"loss": 1.0, "deep": deep, "own": own}
            own["step"].append("later")
            deep[0].append(step)

    with FluidExecutor(backend="local", devices=1, run_dir=tmp_path / "run", verbose=0) as executor:
        handle = executor.submit_trialgroup(TrialGroup([Trial(train, budget=50, trial_id="a")]))
        for result in handle.results():
            own, deep, depth = result.metrics["own"], result.metrics["deep"], 0
            assert own["step"] == [result.iteration - 1] and own["own"][0] is own["own"][1] is own
            assert deep[0][1:] == list(range(result.iteration - 1))
            while deep:
                deep, depth = deep[0], depth + 1
            assert depth == 100
    assert list(written(tmp_path / "run")["a"]) == list(range(1, 51))
