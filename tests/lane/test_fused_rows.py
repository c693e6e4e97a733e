"""Trials that a lane trains in one step: messages in, messages out, with real PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest
import torch
from torch import nn

from fluid.engine.events import (
    IterationDone,
    LaneReady,
    StateMeasured,
    TrialCalled,
    TrialForked,
    TrialPaused,
    TrialReleased,
    TrialSaved,
    TrialStarted,
)
from fluid.fused import SGD, Adam, Dropout, FusedTrainable, TensorData
from fluid.fused.optimizers import OptimizerSpec
from fluid.lane.checkpoints.seal import is_shared
from fluid.lane.protocol import ShipTrainable
from fluid.resources import MemoryNeed
from fluid.trainables.pickling import dump_arguments, dump_config, dump_trainable
from fluid.trial_fields import TrialProcess

pytestmark = pytest.mark.slow


class Net(FusedTrainable):
    """A perceptron with dropout on random samples; its config decides what is to go wrong."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        width = config.get("width", 6)
        return nn.Sequential(nn.Linear(4, width), Dropout(config.get("p", 0.2)), nn.Tanh(), nn.Linear(width, 3))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def optimizer(self, config: dict[str, Any]) -> OptimizerSpec:
        return Adam(lr=config["lr"]) if config.get("adam") else SGD(lr=config["lr"], momentum=0.9)

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        y = (x.sum(-1) > 0).long()
        return TensorData([x, y], [x, y], batch_size=8, seed=seed)

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(-1) == y).float().mean()}

    def weight(self) -> float:
        return float(self.model[0].weight.detach().norm())

    def set_weights(self, value: float) -> None:
        with torch.no_grad():
            self.model[0].weight.fill_(value)


def config(number: int, **others: Any) -> dict[str, Any]:
    return {"lr": 0.02 * (number + 1), "seed": number, **others}


def alone(cls: type[FusedTrainable], values: dict[str, Any], iterations: int) -> list[dict[str, Any]]:
    """The metrics of a trial that trains alone, here."""
    trial = cls()
    trial.setup(dict(values))
    return [trial.step() for _ in range(iterations)]


def is_near(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return ours == pytest.approx(theirs, rel=1e-5, abs=1e-7)


@pytest.fixture
def make_lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Callable[..., Any]:
    server = make_server()

    def make(lane_id: int = 0, **options: Any) -> Any:
        lane = fork(server, lane_id, **{"save_after": 1e9, **options})
        lane.receive(LaneReady)
        return lane

    return make


@pytest.fixture
def lane(make_lane: Callable[..., Any]) -> Any:
    return make_lane()


def start(lane: Any, trials: dict[str, dict[str, Any]], iterations: int, cls: type = Net, key: int = 0) -> list[Any]:
    """Starts trials at once; returns the answers."""
    lane.send(ShipTrainable(key, dump_trainable(cls), ()))
    lane.send(*(to.set_up(name, key, dump_config(values), iterations) for name, values in trials.items()))
    return [lane.receive(TrialStarted, name) for name in trials]


def iterated(lane: Any, names: Iterable[str], count: int) -> dict[str, list[IterationDone]]:
    """The next iterations of trials."""
    return {name: [lane.receive(IterationDone, name) for _ in range(count)] for name in names}


@pytest.mark.parametrize("count", [2, 4])
def test_trials_of_one_key_train_together_as_each_would_alone(lane: Any, count: int, tmp_path: Path) -> None:
    trials = {f"t{number}": config(number) for number in range(count)}
    started = start(lane, trials, 4)
    assert len({one.fusion_key for one in started}) == 1 and started[0].fusion_key
    done = iterated(lane, trials, 4)
    for name, values in trials.items():
        assert [one.iteration for one in done[name]] == [1, 2, 3, 4]
        expected = alone(Net, values, 5)
        assert all(map(is_near, [one.metrics for one in done[name]], expected))
        assert [one.rows for one in done[name]] == [count] * 4
        assert [one.settled for one in done[name]] == [False, True, True, True]
    steps = {(one.at, one.seconds) for each in done.values() for one in each}
    assert len(steps) == 4, "trials of one step have the same times"
    for name, values in trials.items():
        lane.send(to.save(name, True))
        saved = lane.receive(TrialSaved, name)
        lane.send(to.set_up(f"{name} on", 0, dump_config(values), 1, saved.checkpoint))
        on = lane.receive(IterationDone, f"{name} on")
        assert is_near(on.metrics, alone(Net, values, 5)[-1]) and on.rows == 1


def test_rows_are_forked_between_two_steps_and_train_on(lane: Any) -> None:
    trials = {"a": config(0), "b": config(1)}
    start(lane, trials, 0)
    forks = [to.fork(name, f"{name} {which}", at=3) for name in trials for which in ("fork", "twin")]
    lane.send(*forks, *(to.run(name, 5) for name in trials))
    done = iterated(lane, trials, 5)
    for name, values in trials.items():
        forked = lane.receive(TrialForked, f"{name} fork")
        assert lane.receive(TrialForked, f"{name} twin").checkpoint.iteration == 3
        assert forked.checkpoint.iteration == 3 and {one.rows for one in done[name]} == {2}
        assert is_near(done[name][-1].metrics, alone(Net, values, 5)[-1])
        lane.send(to.set_up(f"{name} fork", 0, dump_config(values), 1, forked.checkpoint))
        assert is_near(lane.receive(IterationDone, f"{name} fork").metrics, alone(Net, values, 4)[-1])
        assert is_shared(forked.checkpoint.path), "Fluid's own code has read it, and can be trusted"


def test_trials_join_and_leave_between_two_steps(lane: Any) -> None:
    start(lane, {"a": config(0), "b": config(1)}, 10**6)
    iterated(lane, "ab", 2)
    start(lane, {"c": config(2)}, 3)
    joined = iterated(lane, "c", 3)["c"]
    assert [one.rows for one in joined] == [3, 3, 3] and all(one.settled for one in joined), "it costs little to join"
    lane.send(to.pause("a"))
    paused = lane.receive(TrialPaused, "a").iteration
    lane.send(to.release("b"), to.run("a", 2))
    lane.receive(TrialReleased, "b")
    numbers: dict[int, IterationDone] = {}
    while paused + 2 not in numbers:
        one = lane.receive(IterationDone, "a")
        numbers[one.iteration] = one
    assert [numbers[paused + more].rows for more in (1, 2)] == [1, 1]
    expected = alone(Net, config(0), paused + 2)
    assert all(is_near(one.metrics, expected[number - 1]) for number, one in numbers.items())
    assert all(map(is_near, [one.metrics for one in joined], alone(Net, config(2), 3)))


def test_the_driver_limits_the_rows_of_a_step(lane: Any) -> None:
    trials = {f"t{number}": config(number) for number in range(5)}
    lane.send(to.rows(1))
    start(lane, trials, 2)
    assert {one.rows for each in iterated(lane, trials, 2).values() for one in each} == {1}
    lane.send(to.rows(4), *(to.run(name, 40) for name in trials))
    done = iterated(lane, trials, 40)
    settled = [one for each in done.values() for one in each if one.settled]
    assert {one.rows for one in settled} == {4, 1}
    steps = sorted({one.at for one in settled})
    turns = "".join(str(next(one.rows for one in settled if one.at == at)) for at in steps)
    assert "4" in turns[len(turns) // 2 :] and "1" in turns[: len(turns) // 2], "they take turns"
    for name, values in trials.items():
        assert is_near(done[name][-1].metrics, alone(Net, values, 42)[-1])


def test_trials_of_other_keys_and_other_trainables_take_turns_with_a_pack(lane: Any) -> None:
    def count(config: dict[str, Any]) -> Any:
        number = 0
        while True:
            number += 1
            yield {"number": number}

    fused = {"a": config(0), "b": config(1), "wide": config(2, width=9), "adam": config(3, adam=True)}
    keys = dict(zip(fused, (one.fusion_key for one in start(lane, fused, 0)), strict=True))
    assert keys["a"] == keys["b"] and len(set(keys.values())) == 3
    assert start(lane, {"function": {}}, 0, count, 1)[0].fusion_key is None
    lane.send(*(to.run(name, 3) for name in (*fused, "function")))
    done = iterated(lane, (*fused, "function"), 3)
    rows = {name: {one.rows for one in each} for name, each in done.items()}
    assert rows == {"a": {2}, "b": {2}, "wide": {1}, "adam": {1}, "function": {1}}
    for name, values in fused.items():
        assert is_near(done[name][-1].metrics, alone(Net, values, 3)[-1])


def test_trials_of_unlike_numbers_of_threads_do_not_train_together(lane: Any) -> None:
    lane.send(ShipTrainable(0, dump_trainable(Net), ()))
    asked = {"a": None, "b": 2, "c": 2, "d": 3}
    for number, (name, threads) in enumerate(asked.items()):
        lane.send(to.set_up(name, 0, dump_config(config(number)), 0, process=TrialProcess(threads)))
    keys = [lane.receive(TrialStarted, name).fusion_key for name in asked]
    assert keys[1] == keys[2] and len(set(keys)) == 3
    lane.send(*(to.run(name, 2) for name in asked))
    assert [each[-1].rows for each in iterated(lane, asked, 2).values()] == [1, 2, 2, 1]


def test_a_row_is_saved_and_called_without_harm_to_the_others(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(save_after=0.0, save_ratio=0.0)
    trials = {"a": config(0), "b": config(1), "c": config(2)}
    start(lane, trials, 2)
    assert {lane.receive(TrialSaved, name).checkpoint.iteration for name in trials for _ in range(2)} == {1, 2}
    first = iterated(lane, trials, 2)
    lane.send(to.save("a", False), *(to.run(name, 1) for name in trials))
    saved = lane.receive(TrialSaved, "a")
    assert saved.checkpoint.iteration == 2
    after = iterated(lane, trials, 1)
    assert all(each[0].settled and each[0].rows == 3 for each in after.values()), "to be saved, none has left the pack"
    lane.send(
        to.call("b", 1, "set_weights", dump_arguments((0.5,), {})),
        to.call("b", 2, "weight", dump_arguments((), {})),
        *(to.run(name, 1) for name in trials),
    )
    assert [lane.receive(TrialCalled).failure for _ in range(2)] == [None, None]
    called = iterated(lane, trials, 1)
    changed = Net()
    changed.setup(config(1))
    for _ in range(3):
        changed.step()
    changed.set_weights(0.5)
    assert is_near(called["b"][0].metrics, changed.step())
    for name in "ac":
        expected = alone(Net, trials[name], 4)
        assert all(map(is_near, [one.metrics for one in (*first[name], *after[name], *called[name])], expected))
        assert called[name][0].rows == 3


MB = 2**20


class OnData(Net):
    """A hundred megabytes of data, of its own if its config says so."""

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x = torch.full((100 * MB // 16, 4), float(config.get("own", 0)))
        return TensorData([x, torch.zeros(len(x), dtype=torch.uint8)], batch_size=8, seed=seed, shuffle=False)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, (batch[0], batch[1].long()))

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {}

    iteration_batches = 2


def held_of(lane: Any, trials: dict[str, dict[str, Any]]) -> MemoryNeed:
    """What one of these trials needs, as the second step of all of them tells."""
    start(lane, trials, 2, OnData)
    (_, second), *_ = iterated(lane, trials, 2).values()
    assert second.rows == len(trials) and second.memory is not None
    return second.memory


def test_what_rows_share_is_told_apart_from_what_each_has(make_lane: Callable[..., Any]) -> None:
    lane = make_lane(bounded=True)
    need = held_of(lane, {f"t{number}": config(number) for number in range(6)})
    data = 106 * MB  # With the labels.
    assert data <= need.shared_bytes < data + MB
    assert need.own_persistent_bytes < 40 * MB, "what libraries took at their first use is of all six"
    # Those that stay hold the data that the one that leaves has not freed, which the driver is told as they rest.
    for number in range(5):
        lane.send(to.release(f"t{number}"))
        lane.receive(TrialReleased, f"t{number}")
        assert lane.receive(StateMeasured, "t5").held_bytes > data / (5 - number)
    lane.send(to.run("t5", 1))
    left = lane.receive(IterationDone, "t5").memory
    assert left.shared_bytes == need.shared_bytes and left.persistent_bytes > data


def test_rows_with_data_of_their_own_share_nothing(make_lane: Callable[..., Any]) -> None:
    need = held_of(make_lane(bounded=True), {f"t{number}": config(number, own=number) for number in range(3)})
    assert need.shared_bytes == 0.0 and need.persistent_bytes > 106 * MB
