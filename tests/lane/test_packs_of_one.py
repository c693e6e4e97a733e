"""A trial that is by itself trains as a pack where that is faster. The lanes' CPU stands for a device with graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest
import torch
from torch import nn

from fluid.engine.events import FusionLimited, IterationDone, LaneReady, TrialFailed, TrialStarted
from fluid.fused import SGD, Dropout, FusedTrainable, TensorData
from fluid.lane.protocol import ShipTrainable
from fluid.trainables.pickling import dump_config, dump_trainable


class Net(FusedTrainable):
    """A perceptron whose results tell whether a pack has trained it; its config decides what is to go wrong."""

    class Data(TensorData):
        trial: Any = None
        raises_in_a_pack = False
        fails_at = -1

        def order(self, epoch: int) -> torch.Tensor:
            pack = self.trial._fused.pack
            if epoch == self.fails_at:
                raise ValueError("so it was told to")
            if self.raises_in_a_pack and epoch >= 3 and pack is not None:
                raise RuntimeError("not in a pack")
            return TensorData.order(self, epoch)

    def build(self, config: dict[str, Any]) -> nn.Module:
        import fluid.fused.pack

        if not config.get("no_graphs"):
            fluid.fused.pack.capture_on = lambda device: lambda: lambda work: (work(), work)[1]
        return nn.Sequential(nn.Linear(4, 6), Dropout(0.2), nn.Tanh(), nn.Linear(6, 3))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        return loss

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=config["lr"], momentum=0.9)

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
        data = self.Data([x, (x.sum(-1) > 0).long()], batch_size=8, seed=seed)
        data.trial, data.fails_at = self, config.get("fails_at", -1)
        data.raises_in_a_pack = config.get("raises_in_a_pack", False)
        return data

    def summarize(self, means: dict[str, float]) -> dict[str, Any]:
        return {**means, "in_a_pack": self._fused.pack is not None}


class Branching(Net):
    """Its loss looks at numbers, which a pack does not have."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        return loss if loss > -1 else 2.0 * loss


def config(number: int, **others: Any) -> dict[str, Any]:
    return {"lr": 0.02 * (number + 1), "seed": number, **others}


def losses_alone(number: int, iterations: int) -> list[float]:
    trial = Net()
    trial.setup(config(number, no_graphs=True))
    return [trial.step()["loss"] for _ in range(iterations)]


@pytest.fixture
def lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Any:
    lane = fork(make_server(), 0, save_after=1e9)
    lane.receive(LaneReady)
    return lane


#: Far more than are run: a self-check is worth while for these.
MANY = 10**6


def start(lane: Any, trials: dict[str, dict[str, Any]], iterations: int, cls: type = Net) -> None:
    lane.send(ShipTrainable(0, dump_trainable(cls), ()))
    lane.send(*(to.set_up(name, 0, dump_config(values), iterations) for name, values in trials.items()))
    for name in trials:
        lane.receive(TrialStarted, name)


def check(lane: Any, name: str, number: int, iterations: int, begin: int = 0) -> list[IterationDone]:
    """Receives iterations, and checks that they are as of the trial alone."""
    done = [lane.receive(IterationDone, name) for _ in range(iterations)]
    expected = losses_alone(number, begin + iterations)[begin:]
    assert [one.metrics["loss"] for one in done] == pytest.approx(expected, rel=1e-5)
    return done


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_a_trial_that_has_much_left_is_checked_and_trains_as_a_pack(lane: Any, rows: int) -> None:
    lane.send(to.rows(rows))
    start(lane, {"a": config(3)}, MANY)
    done = check(lane, "a", 3, 5)
    assert [one.metrics["in_a_pack"] for one in done] == [False, True, True, True, True]
    # The second has the self-check in its time, and the capture.
    assert [(one.rows, one.settled) for one in done] == [(1, True), (1, False), (1, True), (1, True), (1, True)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["nobody spoke of fusing", "little is left", "no graphs"])
def test_it_trains_alone_where_that_does_not_pay(lane: Any, case: str) -> None:
    if case != "nobody spoke of fusing":
        lane.send(to.rows(8))
    start(lane, {"a": config(3, no_graphs=case == "no graphs")}, 4 if case == "little is left" else MANY)
    assert [one.metrics["in_a_pack"] for one in check(lane, "a", 3, 4)] == [False] * 4


@pytest.mark.slow
def test_the_last_of_a_pack_stays_in_it(lane: Any) -> None:
    start(lane, {"a": config(0), "b": config(1)}, 2)
    assert [one.rows for one in (*check(lane, "a", 0, 2), *check(lane, "b", 1, 2))] == [2] * 4
    lane.send(to.run("a", 3))
    done = check(lane, "a", 0, 3, begin=2)
    # Two rows are in memory, so that nothing is captured; and no check is made again.
    assert [(one.rows, one.settled, one.metrics["in_a_pack"]) for one in done] == [(1, True, True)] * 3
    lane.send(to.run("a", 1), to.run("b", 1))
    assert [check(lane, name, number, 1, begin)[0].rows for name, number, begin in (("a", 0, 5), ("b", 1, 2))] == [2, 2]


@pytest.mark.slow
def test_what_the_self_check_refuses_trains_alone(lane: Any) -> None:
    lane.send(to.rows(8))
    start(lane, {"a": config(3)}, MANY, Branching)
    assert [one.metrics["in_a_pack"] for one in check(lane, "a", 3, 4)] == [False] * 4
    assert lane.receive(FusionLimited).reason.startswith("loss() cannot run for several trials at once")


@pytest.mark.slow
def test_one_that_raises_only_as_a_pack_goes_on_alone(lane: Any, tmp_path: Path) -> None:
    lane.send(to.rows(8))
    start(lane, {"a": config(3, raises_in_a_pack=True)}, MANY)
    done = check(lane, "a", 3, 6)
    assert [one.metrics["in_a_pack"] for one in done] == [False, True, True, False, False, False]
    assert not any(isinstance(message, (TrialFailed, FusionLimited)) for message in lane.messages)
    assert (tmp_path / "trials/a/output.log").read_text(encoding="utf-8").count("\nRuntimeError: not in a pack") == 1


@pytest.mark.slow
def test_one_that_is_to_blame_itself_fails_and_others_are_packs_as_before(lane: Any) -> None:
    lane.send(to.rows(8))
    start(lane, {"a": config(3, fails_at=4)}, MANY)
    assert [one.metrics["in_a_pack"] for one in check(lane, "a", 3, 4)] == [False, True, True, True]
    assert lane.receive(TrialFailed).failure.message == "ValueError: so it was told to"
    start(lane, {"b": config(2)}, 3)
    assert [one.metrics["in_a_pack"] for one in check(lane, "b", 2, 3)] == [True] * 3
