"""Functions as trainables: with a state that is saved, with returned iterators, and with returned metrics."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluid.errors import FluidError
from fluid.lane.errors import one_line
from fluid.trainables.function_resident import StateFunctionResident
from fluid.trainables.reporting_resident import ReportingResident
from fluid.trainables.resident import NotSavableError, Resident, Step
from fluid.trainables.trainable import can_save, kind_of, make_resident, takes_state

Yields = Iterator[tuple[dict[str, Any], Any]]


def chain(config: dict[str, Any], state: Any) -> Yields:
    """Each value follows from the one before; the state is one object that is changed in place."""
    state = state or {"value": config.get("first", 1), "seen": []}
    while len(state["seen"]) < config.get("count", 9):
        state["value"] = state["value"] * 31 % 1_000_003
        state["seen"].append(state["value"])
        yield {"value": state["value"]}, state


def plain(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"value": 1}


class Holder:
    def train(self, config: dict[str, Any], state: Any = None) -> Yields:
        yield from chain(config, state)

    def __call__(self, config: dict[str, Any], *, state: Any = None) -> Yields:
        yield from chain(config, state)


def with_data(config: dict[str, Any], data: int, state: Any) -> Yields:
    yield from chain({**config, "first": data}, state)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return run


@decorated
def wrapped(config: dict[str, Any], state: Any = None) -> Yields:
    return chain(config, state)


def of_a_config(function: Any) -> Any:
    """Hides the signature of a function behind one that takes a config alone, as integrations do."""

    @functools.wraps(function, updated=())
    def run(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"value": 1}

    return run


WITH_STATE = [
    chain,
    Holder().train,
    Holder(),
    functools.partial(with_data, data=1),
    wrapped,
    lambda config, state: chain(config, state),
]
WITHOUT = [
    plain,
    functools.partial(chain, state=None),
    lambda config: chain(config, None),
    lambda state: iter(()),
    of_a_config(wrapped),
    Holder,
    7,
]


def resident(trainable: Any, **config: Any) -> Resident:
    made = make_resident(trainable, trial_id="t", folder="unused")
    made.setup(config)
    return made


def saved(trial: Resident, folder: Path) -> str:
    folder.mkdir()
    trial.save(str(folder))
    return str(folder)


def values(trial: Resident, count: int) -> list[Any]:
    steps = [trial.step() for _ in range(count)]
    assert not any(step.finished for step in steps)
    return [step.metrics["value"] for step in steps if step.metrics is not None]


@pytest.mark.parametrize("trainable", WITH_STATE)
def test_functions_that_take_a_state_can_be_saved(trainable: Any, tmp_path: Path) -> None:
    assert takes_state(trainable) and can_save(trainable) and kind_of(trainable) == "state_function"
    expected = [pow(31, number + 1, 1_000_003) for number in range(9)]
    first = resident(trainable)
    assert values(first, 3) == expected[:3]
    path = saved(first, tmp_path / "a")
    assert os.listdir(tmp_path / "a" / "state") == ["state.pkl"]
    assert values(first, 2) == expected[3:5], "it goes on"
    os.rename(path, tmp_path / "b")
    second = resident(trainable)
    second.restore(str(tmp_path / "b"))
    assert values(second, 6) == expected[3:]
    assert second.step() == Step(None, True)
    first.cleanup()
    second.cleanup()


@pytest.mark.parametrize("trainable", WITHOUT)
def test_what_takes_no_state(trainable: Any) -> None:
    assert not takes_state(trainable) and not can_save(trainable)


def test_a_state_is_pickled_as_it_is_between_two_iterations(tmp_path: Path) -> None:
    """What is done to it after a save changes nothing of what was saved."""
    first, second = resident(chain), resident(chain)
    path = saved(first, tmp_path / "before")
    values(first, 2)
    second.restore(path)
    assert values(second, 1) == [31], "it had not begun when it was saved"


def test_arrays_and_tensors_are_saved(tmp_path: Path) -> None:
    np, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

    def train(config: dict[str, Any], state: Any) -> Yields:
        if state is None:
            torch.manual_seed(0)
            model = torch.nn.Linear(2, 1)
            state = model, torch.optim.Adam(model.parameters()), np.zeros(3)
        model, optimizer, total = state
        while True:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            optimizer.step()
            total += loss.item()
            yield {"value": (loss.item(), total.tolist())}, state

    unbroken = values(resident(train), 6)
    first, second = resident(train), resident(train)
    begun = values(first, 3)
    second.restore(saved(first, tmp_path / "a"))
    assert begun + values(second, 3) == unbroken, "the optimizer still works on the model's parameters"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (threading.Lock(), r"the state cannot be pickled: cannot pickle '_thread.lock' object"),
        ({"model": 1, "loader": threading.Lock()}, r"state\['loader'\] cannot be pickled"),
        (None, r"train\(\) yielded None as its state, from which it would begin again"),
    ],
)
def test_a_state_that_cannot_be_saved_fails_the_save_alone(state: Any, reason: str, tmp_path: Path) -> None:
    def train(config: dict[str, Any], state: Any) -> Yields:
        for value in range(3):
            yield {"value": value}, config["state"]

    trial = resident(train, state=state)
    assert values(trial, 1) == [0]
    with pytest.raises(NotSavableError, match=f"^{reason}"):
        saved(trial, tmp_path / "a")
    assert values(trial, 2) == [1, 2]


@pytest.mark.parametrize("item", [{"value": 1}, ({"value": 1},), ({}, 1, 2), 3.0])
def test_a_function_with_a_state_must_yield_it(item: Any) -> None:
    def train(config: dict[str, Any], state: Any) -> Iterator[Any]:
        yield item

    with pytest.raises(TypeError, match=r"train\(\) has a parameter named state, so it must yield \(metrics, state\)"):
        resident(train).step()


def test_metrics_beside_a_state_must_be_a_dict() -> None:
    def train(config: dict[str, Any], state: Any) -> Iterator[Any]:
        yield 0.5, 1

    with pytest.raises(TypeError, match=r"train\(\) must give a dict of metrics per iteration, not float"):
        resident(train).step()


def test_done_ends_a_function_with_a_state() -> None:
    def train(config: dict[str, Any], state: Any) -> Yields:
        yield {"value": 1, "done": True}, 1

    assert resident(train).step() == Step({"value": 1, "done": True}, True)


# -- functions that return ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trainable",
    [
        lambda config: ({"value": value} for value in range(3)),
        lambda config: iter([{"value": 0}, {"value": 1}, {"value": 2}]),
    ],
)
def test_an_iterator_that_is_returned_is_run(trainable: Any) -> None:
    assert kind_of(trainable) == "function"
    trial = resident(trainable)
    assert isinstance(trial, ReportingResident)
    assert values(trial, 3) == [0, 1, 2] and trial.step() == Step(None, True)
    trial.cleanup()


def test_metrics_that_are_returned_are_one_iteration() -> None:
    assert resident(lambda config: {"value": config["x"]}, x=2).step() == Step({"value": 2}, True)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "returned nothing, and has not called fluid.report"),
        (0.25, r"returned float 0.25; return {'loss': 0.25}, say"),
        ([{"value": 1}], "returned list"),
        ("loss", "returned str 'loss'"),
    ],
)
def test_what_else_is_returned_is_an_error(returned: Any, reason: str) -> None:
    def train(config: dict[str, Any]) -> Any:
        return returned

    with pytest.raises(TypeError, match=rf"a trainable function yields a dict .*; train\(\) {reason}"):
        resident(train).step()


def test_a_dict_from_a_function_with_a_state_is_an_error() -> None:
    def train(config: dict[str, Any], state: Any) -> Any:
        return {"value": 1}

    trial = resident(train)
    assert isinstance(trial, StateFunctionResident)
    with pytest.raises(TypeError, match=r"train\(\) returned dict"):
        trial.step()


def test_a_function_runs_without_ray(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from fluid.trainables.trainable import kind_of, make_resident\n"
        "train = lambda config: {'value': 1}\n"
        "trial = make_resident(train, trial_id='t', folder='unused')\n"
        "trial.setup({})\n"
        "print(trial.step().metrics, 'ray' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout == "{'value': 1} False\n"


def test_an_objective_of_optuna_is_explained() -> None:
    for objective in (lambda trial: {"value": trial.suggest_float("x", 0, 1)}, lambda trial: iter([trial.report(1)])):
        with pytest.raises(AttributeError) as raised:
            resident(objective).step()
        assert re.search(r"has no attribute '(suggest_float|report)': .* objective: pass it to", one_line(raised.value))
    with pytest.raises(AttributeError, match=r"^'dict' object has no attribute 'lr'$"):
        resident(lambda config: {"value": config.lr}).step()


class Reports:
    """Reports to Ray Tune from a method that its call refers to by name alone."""

    def __call__(self, config: dict[str, Any]) -> None:
        self.report()

    def train(self, config: dict[str, Any]) -> None:
        self.report()

    def report(self) -> None:
        from ray import tune

        tune.report({"value": 1})


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_functions_that_use_ray_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = pytest.importorskip("ray.tune")
    from types import ModuleType

    def reports(config: dict[str, Any]) -> None:
        tune.report({"value": 1})

    helper = ModuleType("helper_of_another_package")
    exec("from ray.tune import report\ndef tell(value):\n    report({'value': value})", helper.__dict__)
    monkeypatch.setitem(sys.modules, helper.__name__, helper)

    def asks_a_helper(config: dict[str, Any]) -> None:
        helper.tell(1)

    for trainable in (reports, Reports(), Reports().train, asks_a_helper, tune.with_parameters(reports)):
        assert kind_of(trainable) == "ray_function", trainable
    assert kind_of(lambda config: {"value": 1}) == "function"


@pytest.mark.ray
def test_modules_that_ray_patches_are_not_rays() -> None:
    pytest.importorskip("ray.tune")
    import logging

    def train(config: dict[str, Any]) -> dict[str, int]:
        logging.getLogger(__name__).info("of %s", sys.argv)
        return {"value": 1}

    assert kind_of(train) == "function"


def test_a_function_without_a_state_cannot_be_saved() -> None:
    trial = resident(plain)
    with pytest.raises(FluidError, match="cannot be saved; give it a second parameter named `state`"):
        trial.save("")
    with pytest.raises(FluidError, match="cannot be restored"):
        trial.restore("")
