"""Trials that a lane trains in one step, of which one fails, or too many do not fit, or that cannot be fused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lane_messages as to
import pytest
import torch
from torch import nn

from fluid.engine.events import FusionLimited, IterationDone, LaneReady, TrialFailed, TrialStarted
from fluid.errors import Infeasible
from fluid.fused import SGD, FusedTrainable, TensorData, fusion_key
from fluid.lane.process.state import read_running_trial
from fluid.lane.protocol import ShipTrainable
from fluid.trainables.pickling import dump_config, dump_trainable


class Faulty(FusedTrainable):
    """A linear regression with iterations of two epochs; its data does as its config says at the begin of an epoch."""

    iteration_batches = 4

    class Data(TensorData):
        def __init__(self, trial: FusedTrainable, config: dict[str, Any], seed: int) -> None:
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
            super().__init__([x, x.sum(-1, keepdim=True)], batch_size=8, seed=seed)
            self.trial, self.config = trial, config

        def order(self, epoch: int) -> torch.Tensor:
            if self.config.get("heard"):
                with open(self.config["heard"], "a", encoding="utf-8") as file:
                    file.write(f"{read_running_trial(self.config['note'])}\n")
            if epoch == self.config.get("fails_at"):
                raise self.config.get("error", ValueError)("so it was told to")
            pack: Any = self.trial._fused.pack
            if pack is not None and len(pack) > self.config.get("fit", 100) and epoch > 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory: this is a drill")
            if pack is not None and self.config.get("alone") and epoch > 1:
                raise RuntimeError("not in company")
            return TensorData.order(self, epoch)

    def build(self, config: dict[str, Any]) -> nn.Module:
        if config.get("trace"):
            with open(config["trace"], "a", encoding="utf-8") as file:
                file.write("set up\n")
        return nn.Linear(4, 1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)

    def optimizer(self, config: dict[str, Any]) -> SGD:
        return SGD(lr=config["lr"], momentum=0.9)

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        return self.Data(self, config, seed)


class Branching(Faulty):
    """Its loss looks at numbers, which several trials at once do not have."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        return loss if loss > 0.5 else 2.0 * loss


def config(number: int, **others: Any) -> dict[str, Any]:
    return {"lr": 0.01 * (number + 1), "seed": number, **others}


def losses_alone(cls: type[FusedTrainable], values: dict[str, Any], iterations: int) -> list[float]:
    trial = cls()
    trial.setup({"lr": values["lr"], "seed": values["seed"]})
    return [trial.step()["loss"] for _ in range(iterations)]


@pytest.fixture
def make_lane(make_server: Callable[..., Any], fork: Callable[..., Any]) -> Callable[..., Any]:
    server = make_server()

    def make(lane_id: int = 0, **options: Any) -> Any:
        lane = fork(server, lane_id, **{"save_after": 1e9, **options})
        lane.receive(LaneReady)
        return lane

    return make


def start(lane: Any, trials: dict[str, dict[str, Any]], iterations: int, cls: type = Faulty) -> list[Any]:
    lane.send(ShipTrainable(0, dump_trainable(cls), ()))
    lane.send(*(to.set_up(name, 0, dump_config(values), 0) for name, values in trials.items()))
    started = [lane.receive(TrialStarted, name) for name in trials]
    lane.send(*(to.run(name, iterations) for name in trials))
    return started


def check(lane: Any, trials: dict[str, dict[str, Any]], iterations: int, cls: type[FusedTrainable] = Faulty) -> Any:
    """Receives iterations, and checks that all are as of the trials alone; returns the rows of each."""
    rows = {}
    for name, values in trials.items():
        done = [lane.receive(IterationDone, name) for _ in range(iterations)]
        assert [one.iteration for one in done] == list(range(1, iterations + 1))
        expected = losses_alone(cls, values, iterations)
        assert [one.metrics["loss"] for one in done] == pytest.approx(expected, rel=1e-5)
        rows[name] = [one.rows for one in done]
    return rows


@pytest.mark.slow
def test_of_a_pack_that_raises_only_the_culprit_fails(make_lane: Callable[..., Any], tmp_path: Path) -> None:
    note, heard = str(tmp_path / "note"), str(tmp_path / "heard")
    lane = make_lane(note=note)
    told = {"note": note, "heard": heard}
    trials = {f"t{number}": config(number, **told) for number in range(5)}
    trials["t3"]["fails_at"] = 3  # In the middle of its second iteration, when all have trained for an epoch.
    start(lane, trials, 4)
    failed = lane.receive(TrialFailed)
    told_of = (failed.trial_id, failed.failure.kind, failed.failure.message)
    assert told_of == ("t3", "error", "ValueError: so it was told to")
    culprit = trials.pop("t3")
    assert lane.receive(IterationDone, "t3").metrics["loss"] == pytest.approx(losses_alone(Faulty, culprit, 1)[0])
    rows = check(lane, trials, 4)
    assert all(each[0] == 5 and each[2:] == [4, 4] for each in rows.values())
    log = (tmp_path / "trials/t3/output.log").read_text(encoding="utf-8")
    assert "so it was told to" in log and "in order" in log
    notes = Path(heard).read_text(encoding="utf-8").split()
    assert notes.count("None") > 5 * 4 and set(notes) == {"None", "t2", "t3", "t4"}, "a pack names no culprit"
    assert not any(isinstance(message, (TrialFailed, FusionLimited)) for message in lane.messages)


@pytest.mark.slow
def test_a_pack_that_does_not_fit_is_halved(make_lane: Callable[..., Any]) -> None:
    lane = make_lane()
    trials = {f"t{number}": config(number, fit=2) for number in range(5)}
    start(lane, trials, 4)
    rows = check(lane, trials, 4)
    limited = lane.receive(FusionLimited)
    assert limited.rows == 2 and "CUDA out of memory" in limited.reason
    assert {each[0] for each in rows.values()} == {5}
    assert sorted(each[-1] for each in rows.values()) == [1, 2, 2, 2, 2]


@pytest.mark.slow
def test_trials_that_raise_only_in_a_pack_take_turns(make_lane: Callable[..., Any]) -> None:
    lane = make_lane()
    trials = {f"t{number}": config(number, alone=True) for number in range(3)}
    start(lane, trials, 3)
    rows = check(lane, trials, 3)
    limited = lane.receive(FusionLimited)
    assert limited.rows == 1 and "RuntimeError: not in company" in limited.reason
    assert rows == {name: [3, 1, 1] for name in trials}
    assert not any(isinstance(message, (TrialFailed, FusionLimited)) for message in lane.messages)


@pytest.mark.slow
def test_trials_that_the_self_check_refuses_take_turns(make_lane: Callable[..., Any], tmp_path: Path) -> None:
    trials = {f"t{number}": config(number) for number in range(3)}
    for lane_id in range(2):  # The second lane has it from the first.
        lane = make_lane(lane_id)
        start(lane, trials, 2, Branching)
        assert check(lane, trials, 2, Branching) == {name: [1, 1] for name in trials}
        limited = lane.receive(FusionLimited)
        assert limited.rows == 1 and limited.reason.startswith("loss() cannot run for several trials at once")
        assert not any(isinstance(message, FusionLimited) for message in lane.messages), "it is told once"
    log = (tmp_path / f"trials/{limited.trial_id}/output.log").read_text(encoding="utf-8")
    assert log.count("Fluid: trials like this one are not fused here: loss() cannot run") == 2


@pytest.mark.slow
def test_one_lane_checks_for_all_of_the_machine(make_lane: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trials = {name: config(number, trace=str(trace)) for number, name in enumerate("ab")}
    for lane_id, set_ups in ((0, 6), (1, 8)):
        lane = make_lane(lane_id)
        start(lane, trials, 1)
        assert set(map(tuple, check(lane, trials, 1).values())) == {(2,)}
        assert len(trace.read_text(encoding="utf-8").splitlines()) == set_ups


@pytest.mark.slow
def test_a_self_check_that_raises_leaves_the_fault_to_its_trial(make_lane: Callable[..., Any]) -> None:
    lane = make_lane()
    trials = {f"t{number}": config(number) for number in range(3)}
    trials["t0"]["fails_at"] = 0
    start(lane, trials, 3)
    assert lane.receive(TrialFailed).trial_id == "t0"
    del trials["t0"]
    assert check(lane, trials, 3) == {name: [1, 2, 2] for name in trials}


def test_a_row_that_is_infeasible_ends_alone(make_lane: Callable[..., Any]) -> None:
    lane = make_lane()
    trials = {f"t{number}": config(number) for number in range(3)}
    trials["t1"] |= {"fails_at": 3, "error": Infeasible}
    start(lane, trials, 3)
    failed = lane.receive(TrialFailed)
    assert (failed.trial_id, failed.failure.kind, failed.failure.message) == ("t1", "infeasible", "so it was told to")
    del trials["t1"]
    rows = check(lane, trials, 3)
    assert all(each[0] == 3 and each[-1] == 2 for each in rows.values())


# -- fusion keys of several processes -------------------------------------------------------------------------------

PROGRAM = """
import enum, functools, torch
from fluid.fused import SGD, FusedTrainable, TensorData, fusion_key

class Kind(enum.Enum):
    ONE = 1

class Net(FusedTrainable):
    def build(self, config):
        self.names = {"b", "a", "longer", "names"}
        self.options = {"kinds": (Kind.ONE, torch.float32), "nested": [{"x", "y", "z"}, frozenset("pqr")]}
        self.function, self.weights = functools.partial(torch.nn.functional.mse_loss, reduction="mean"), torch.ones(3)
        return torch.nn.Sequential(torch.nn.Linear(config["width"], 1), torch.nn.BatchNorm1d(1))
    def loss(self, model, batch):
        return model(batch[0]).square().mean()
    def optimizer(self, config):
        return SGD(lr=config["lr"])
    def data(self, config, seed):
        return TensorData([torch.ones(4, config["width"])], batch_size=2, seed=seed)

pad = [object() for _ in range(PAD)]
print(*(fusion_key(Net, {"lr": lr, "width": width}).digest for lr, width in ((0.1, 2), (0.2, 2), (0.1, 3))))
"""


@pytest.mark.slow
def test_the_digest_of_a_fusion_key_is_equal_in_all_processes() -> None:
    printed = set()
    for seed in ("1", "2"):
        program = PROGRAM.replace("PAD", seed * 4)
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(ended.stdout)
    (digests,) = [line.split() for line in printed]
    assert digests[0] == digests[1] != digests[2]


def test_digests_tell_attributes_apart() -> None:
    class Numbered(Faulty):
        def build(self, config: dict[str, Any]) -> nn.Module:
            self.numbers = config["numbers"]
            return super().build(config)

    numbers: list[Any] = [[1, 23], [12, 3], [[1], 23], (1, 23), {1: 23}, {1, 23}, ["1", 23], torch.ones(2), None]
    digests = [fusion_key(Numbered, config(0, numbers=each)).digest for each in numbers]
    assert len(set(digests)) == len(numbers)
    assert fusion_key(Numbered, config(1, numbers=[1, 23])).digest == digests[0]
