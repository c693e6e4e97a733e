"""What users may give as a trainable, without a lane."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fluid.trainables.trainable
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError
from fluid.trainables.import_scan import elastic_class_of
from fluid.trainables.payload import payload_of
from fluid.trainables.resident import Resident, Step
from fluid.trainables.trainable import can_save, is_elastic, kind_of, make_resident, profile_name


class Full:
    fluid_elastic = True

    def setup(self, config: dict[str, Any]) -> None:
        self.config = config
        self.value = 0

    def step(self) -> dict[str, Any]:
        self.value += 1
        return {"value": self.value, "done": self.value == self.config.get("last")}

    def save_checkpoint(self, folder: str) -> Any:
        how = self.config["save"]
        if how == "object":
            return {"value": self.value}
        target = Path(folder, "deep") if how == "below" else Path(folder)
        target.mkdir(exist_ok=True)
        (target / "value").write_text(str(self.value), encoding="utf-8")
        return {"nothing": None, "folder": folder, "below": target, "relative": ".", "outside": "/tmp"}[how]

    def load_checkpoint(self, saved: Any) -> None:
        if self.config["save"] == "object":
            self.value = saved["value"]
        else:
            self.value = int(Path(saved, "value").read_text(encoding="utf-8"))

    def cleanup(self) -> None:
        self.config["cleaned"] = True


class Bare:
    def __init__(self, config: dict[str, Any]) -> None:
        self.start = config["start"]

    def step(self) -> dict[str, Any]:
        return {"value": self.start}


def counting(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    try:
        for value in range(config["count"]):
            yield {"value": value}
    finally:
        config["closed"] = True


def reporting(config: dict[str, Any]) -> None:
    from ray import tune

    tune.report({"value": 1})


def resident(trainable: Any) -> Resident:
    return make_resident(trainable, trial_id="t", folder="unused")


def test_kinds() -> None:
    assert kind_of(Full) == kind_of(Bare) == "class"
    assert kind_of(counting) == kind_of(functools.partial(counting)) == "generator"

    class Callable:
        def __call__(self, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield {}

    assert kind_of(Callable()) == "generator"


class NoStep:
    def setup(self, config: dict[str, Any]) -> None:
        pass


async def asynchronous(config: dict[str, Any]) -> None:
    pass


def no_config() -> Iterator[dict[str, Any]]:
    yield {}


def two_arguments(config: dict[str, Any], data: Any) -> Iterator[dict[str, Any]]:
    yield {}


@pytest.mark.parametrize(
    ("trainable", "reason"),
    [
        (7, "must be a class"),
        (None, "must be a class"),
        (NoStep, "needs a step"),
        (Bare({"start": 1}), "not an instance"),
        (asynchronous, "asynchronous"),
        (no_config, "only argument"),
        (two_arguments, "only argument"),
    ],
)
def test_what_cannot_be_run_is_refused(trainable: Any, reason: str) -> None:
    with pytest.raises(InvalidFieldError, match=reason) as refused:
        kind_of(trainable)
    assert refused.value.field == "trainable"


def test_arguments_can_be_bound(tmp_path: Path) -> None:
    assert kind_of(functools.partial(two_arguments, data=1)) == "generator"


def test_a_function_that_imports_ray_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fluid.trainables.trainable.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        kind_of(reporting)


def test_what_can_be_saved() -> None:
    assert can_save(Full)
    assert not can_save(Bare)
    assert not can_save(counting)
    assert is_elastic(Full)
    assert not is_elastic(counting)
    assert profile_name(Full) == "Full"
    assert profile_name(functools.partial(two_arguments, data=1)) == "two_arguments"


@pytest.mark.parametrize("how", ["nothing", "folder", "below", "relative", "object"])
def test_a_class_is_saved_and_restored_elsewhere(tmp_path: Path, how: str) -> None:
    config: dict[str, Any] = {"save": how, "last": 2}
    first, second = resident(Full), resident(Full)
    first.setup(config)
    assert first.step() == Step({"value": 1, "done": False}, False)
    (tmp_path / "a").mkdir()
    first.save(str(tmp_path / "a"))
    os.rename(tmp_path / "a", tmp_path / "b")
    second.setup(config)
    second.restore(str(tmp_path / "b"))
    assert second.step() == Step({"value": 2, "done": True}, True)
    first.cleanup()
    assert config["cleaned"]


def test_a_checkpoint_must_stay_in_its_folder(tmp_path: Path) -> None:
    full = resident(Full)
    full.setup({"save": "outside"})
    with pytest.raises(FluidError, match="outside the folder"):
        full.save(str(tmp_path))


def test_a_class_without_setup_gets_its_config_at_once() -> None:
    bare = resident(Bare)
    bare.setup({"start": 5})
    assert bare.step() == Step({"value": 5}, False)
    bare.cleanup()


def test_a_generator() -> None:
    config: dict[str, Any] = {"count": 2}
    generator = resident(counting)
    generator.setup(config)
    assert [generator.step() for _ in range(3)] == [
        Step({"value": 0}, False),
        Step({"value": 1}, False),
        Step(None, True),
    ]
    assert config["closed"]
    other = resident(counting)
    other.setup({"count": 9})
    other.step()
    with pytest.raises(FluidError, match="cannot be saved"):
        other.save("")
    with pytest.raises(FluidError, match="cannot be restored"):
        other.restore("")
    other.cleanup()


def test_methods_are_called_where_there_are_any() -> None:
    class Adder(Full):
        def add(self, one: int, *, other: int) -> int:
            self.value += one + other
            return self.value

    adder = resident(Adder)
    adder.setup({})
    adder.step()
    assert adder.call("add", (1,), {"other": 2}) == 4
    assert adder.step().metrics == {"value": 5, "done": False}
    with pytest.raises(AttributeError, match="subtract"):
        adder.call("subtract", (), {})
    generator = resident(counting)
    generator.setup({"count": 1})
    with pytest.raises(FluidError, match="'add' cannot be called: a function has no methods"):
        generator.call("add", (1,), {"other": 2})


def test_metrics_must_be_a_dict() -> None:
    class Number:
        def step(self) -> Any:
            return 0.5

    number = resident(Number)
    with pytest.raises(TypeError):
        number.setup({})
    number.cleanup()

    class Later(Number):
        def setup(self, config: Any) -> None:
            pass

    later = resident(Later)
    later.setup({})
    with pytest.raises(TypeError, match=r"step\(\) must give a dict of metrics per iteration, not float"):
        later.step()


class Exhausted:
    """Forgets that iterators end, in the method that its config names."""

    def setup(self, config: dict[str, Any]) -> None:
        self.where = config["where"]
        self.forget("setup")

    def forget(self, method: str) -> None:
        if method == self.where:
            next(iter(()))

    def step(self) -> dict[str, Any]:
        self.forget("step")
        return {}

    def save_checkpoint(self, folder: str) -> None:
        self.forget("save_checkpoint")

    def load_checkpoint(self, folder: str) -> None:
        self.forget("load_checkpoint")


@pytest.mark.parametrize("where", ["setup", "step", "save_checkpoint", "load_checkpoint"])
def test_stop_iteration_out_of_a_class_is_an_error(tmp_path: Path, where: str) -> None:
    resident = make_resident(Exhausted, trial_id="t", folder=str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"^{where}\(\) raised StopIteration") as raised:
        resident.setup({"where": where})
        assert resident.step() == Step({}, False)
        resident.save(str(tmp_path))
        resident.restore(str(tmp_path))
    assert isinstance(raised.value.__cause__, StopIteration)


def test_stop_iteration_within_a_generator_is_an_error(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"x": 1}
        next(iter(()))

    resident = make_resident(train, trial_id="t", folder=str(tmp_path))
    resident.setup({})
    assert resident.step() == Step({"x": 1}, False)
    with pytest.raises(RuntimeError, match="raised StopIteration"):
        resident.step()


# -- Ray Tune -----------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_ray_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = pytest.importorskip("ray.tune")
    monkeypatch.chdir(tmp_path)

    class Walk(tune.Trainable):  # type: ignore[misc, name-defined, unused-ignore]
        def setup(self, config: dict[str, Any]) -> None:
            self.at = config["start"]
            self.folder = os.getcwd()

        def step(self) -> dict[str, Any]:
            self.at += 1
            return {"at": self.at, "folder": self.folder, "done": self.at == 14}

        def save_checkpoint(self, folder: str) -> dict[str, Any]:
            return {"at": self.at}

        def load_checkpoint(self, saved: dict[str, Any]) -> None:
            self.at = saved["at"]

        def reset_config(self, config: dict[str, Any]) -> bool:
            self.at = config["start"]
            return True

    class Stub(tune.Trainable):  # type: ignore[misc, name-defined, unused-ignore]
        def step(self) -> dict[str, Any]:
            return {}

    assert kind_of(Walk) == "ray_class"
    assert can_save(Walk)
    assert not can_save(Stub)
    walks = [make_resident(Walk, trial_id=f"t{index}", folder=str(tmp_path / f"t{index}")) for index in range(2)]
    for walk in walks:
        walk.setup({"start": 10})
    walks[0].step()
    metrics = walks[0].step().metrics
    assert metrics is not None
    assert (metrics["at"], metrics["training_iteration"], metrics["trial_id"]) == (12, 2, "t0")
    assert metrics["folder"] == str(tmp_path / "t0")
    assert "config" not in metrics
    (tmp_path / "save").mkdir()
    walks[0].save(str(tmp_path / "save"))
    os.rename(tmp_path / "save", tmp_path / "moved")
    walks[1].restore(str(tmp_path / "moved"))
    step = walks[1].step()
    assert step.metrics is not None
    assert (step.metrics["at"], step.metrics["training_iteration"], step.finished) == (13, 3, False)
    assert walks[1].step().finished
    assert walks[0].call("reset", ({"start": 20},), {}) is True
    metrics = walks[0].step().metrics
    assert metrics is not None and metrics["at"] == 21
    for walk in walks:
        walk.cleanup()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_ray_functions_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = pytest.importorskip("ray.tune")
    monkeypatch.chdir(tmp_path)

    def train(config: dict[str, Any]) -> None:
        for value in range(2):
            with open("state", "w", encoding="utf-8") as file:
                file.write(str(value))
            tune.report({"value": config["factor"] * value}, checkpoint=tune.Checkpoint.from_directory("."))
        if config["factor"] == 3:
            raise LookupError("no more")

    assert kind_of(train) == "ray_function"
    assert not can_save(train)
    both = [make_resident(train, trial_id=f"t{factor}", folder=str(tmp_path / f"t{factor}")) for factor in (1, 3)]
    for one, factor in zip(both, (1, 3), strict=True):
        one.setup({"factor": factor})
    seen = []
    for one in both * 2:
        metrics = one.step().metrics
        assert metrics is not None
        seen.append(metrics["value"])
    assert seen == [0, 0, 1, 3]
    assert both[0].step() == Step(None, True)
    with pytest.raises(LookupError, match="no more"):
        both[1].step()
    with pytest.raises(FluidError, match="has reported no checkpoint"):
        both[0].save("")  # It asked for none to go on from.
    # Ray's own method works on the session in force: it must be that of the trial that is called.
    assert both[0].call("reset", ({"factor": 5},), {}) is True
    seen = []
    for _ in range(2):
        metrics = both[0].step().metrics
        assert metrics is not None
        seen.append(metrics["value"])
    assert seen == [0, 5]
    assert importlib.import_module("ray.train._internal.session")._session is None
    for one in both:
        one.cleanup()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_classes_that_wrap_functions_for_ray_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes such classes of functions and of its trainers. Each has a session, and a process has one at a time."""
    tune = pytest.importorskip("ray.tune")
    wrap_function = importlib.import_module("ray.tune.trainable.function_trainable").wrap_function
    sessions = importlib.import_module("ray.train._internal.session")
    monkeypatch.chdir(tmp_path)

    def train(config: dict[str, Any]) -> None:
        for value in range(3):
            tune.report({"value": config["factor"] * value})

    wrapped = wrap_function(train)
    assert kind_of(wrapped) == "ray_class"
    both = [make_resident(wrapped, trial_id=f"t{factor}", folder=str(tmp_path / f"t{factor}")) for factor in (1, 3)]
    for one, factor in zip(both, (1, 3), strict=True):
        one.setup({"factor": factor})
        assert sessions.get_session() is None, "what other code reports here goes to none of them"
    seen = [one.step().metrics for one in both * 2]
    assert [metrics["value"] for metrics in seen if metrics is not None] == [0, 0, 1, 3]
    for one in both:
        one.cleanup()
    assert sessions.get_session() is None
    fluid.report({"value": 1})  # It is of no trial.


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_stop_iteration_out_of_trainables_of_ray_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = pytest.importorskip("ray.tune")
    monkeypatch.chdir(tmp_path)

    class Walk(tune.Trainable):  # type: ignore[misc, name-defined, unused-ignore]
        def step(self) -> dict[str, Any]:
            return {"at": next(iter(()))}

    def train(config: dict[str, Any]) -> None:
        tune.report({"value": 1})
        next(iter(()))

    for number, trainable in enumerate((Walk, train)):
        resident = make_resident(trainable, trial_id=f"t{number}", folder=str(tmp_path / f"t{number}"))
        resident.setup({})
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            for _ in range(2):
                assert not resident.step().finished
        resident.cleanup()


class Wraps:
    """As :func:`fluid.elastic.as_tune_trainable` makes it."""

    fluid_elastic = True
    fluid_elastic_class = Full

    def step(self) -> dict[str, Any]:
        return {}


class Overrides(Wraps):
    """Derived from a wrapper, so that it does more than the class that is wrapped."""


def test_a_class_derived_from_a_wrapper_runs_as_it_is() -> None:
    assert elastic_class_of(Wraps) is Full and is_elastic(Wraps)
    assert elastic_class_of(Overrides) is None and not is_elastic(Overrides)
    assert elastic_class_of(Full) is None and is_elastic(Full)
    assert pickle.loads(payload_of(Overrides, {}).trainable.pickled) is Overrides


class Requests(Wraps):
    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        return None


class RequestsAndMore(Wraps):
    default_resource_request = Requests.default_resource_request

    def _more(self) -> None: ...


def test_a_request_for_resources_leaves_a_class_what_it_is() -> None:
    assert elastic_class_of(Requests) is Full and is_elastic(Requests)
    assert elastic_class_of(RequestsAndMore) is None and not is_elastic(RequestsAndMore)
    assert pickle.loads(payload_of(Requests, {}).trainable.pickled) is Full
