"""Optimizers that are made in the middle of training, in place of others, and gradient scalers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.groups import make_groups, together  # noqa: E402
from elastic.test_trainable import join  # noqa: E402

from fluid.elastic import ElasticTrainable  # noqa: E402
from fluid.elastic.members.member import ElasticMember  # noqa: E402
from fluid.errors import FluidError  # noqa: E402


class Replacing(ElasticTrainable):
    """Makes a new optimizer, and if told a new model, before its batches of each iteration."""

    def build(self, config: dict[str, Any]) -> None:
        self.config = config
        self.loader = self.make_loader(torch.utils.data.TensorDataset(torch.linspace(-1, 1, 24).view(12, 2)), 2)
        self.model = self.new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        #: Optimizers that were replaced.
        self.old: list[weakref.ref[Any]] = []

    def new_model(self) -> Any:
        made = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.6, parameter.numel()).view(parameter.shape))
        return made

    def train_iteration(self) -> Mapping[str, Any]:
        self.old.append(weakref.ref(self.optimizer))
        if self.config["model"]:
            self.model = self.new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1 + 0.01 * self.iteration, momentum=0.9)
        return super().train_iteration()

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        self.optimizer.zero_grad()
        loss = (self.model(batch[0]) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss}


@pytest.mark.slow
@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "auto"])
def test_an_optimizer_that_replaces_another_averages_and_leaves_nothing_behind(model: bool, backend: str) -> None:
    alone = Replacing()
    alone.setup({"model": model})
    expected = [alone.step()["loss"] for _ in range(6)]
    members = []
    for group in make_groups(2, backend=backend):
        trainable = Replacing()
        trainable.setup({"model": model})
        members.append(ElasticMember(trainable, group))
    join(members)
    for number, loss in enumerate(expected):
        results = together(members, lambda member: member.iterate(lambda: True))
        assert [result.metrics["loss"] for result in results] == pytest.approx([loss] * 2, rel=1e-5)
        assert all(member.iteration == number + 1 for member in members), "no iteration was repeated"
        for member in members:
            averagers = member.trainable._elastic._averagers
            assert list(averagers) == [member.trainable.optimizer]  # type: ignore[attr-defined]
            for parameter in member.trainable.model.parameters():  # type: ignore[attr-defined]
                assert len(parameter._post_accumulate_grad_hooks or ()) <= 1
    gc.collect()
    for member in members:
        assert [old() for old in member.trainable.old] == [None] * 6  # type: ignore[attr-defined]


class Scaling(Replacing):
    """Scales its loss, and averages before the scaler looks at the gradients, or not."""

    def build(self, config: dict[str, Any]) -> None:
        super().build(config)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train_iteration(self) -> Mapping[str, Any]:
        return ElasticTrainable.train_iteration(self)

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        self.optimizer.zero_grad()
        loss = (self.model(batch[0]) - 1).square().mean()
        if self.config["sync"]:
            with self.sync(self.optimizer):
                self.scaler.scale(loss).backward()
        else:
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"loss": loss}


@pytest.mark.parametrize("sync", [False, True])
def test_a_scaler_needs_gradients_that_are_averaged(sync: bool) -> None:
    config = {"model": False, "sync": sync}
    alone = Scaling()
    alone.setup(config)
    expected = alone.step()["loss"]
    members = []
    for group in make_groups(2):
        trainable = Scaling()
        trainable.setup(config)
        members.append(ElasticMember(trainable, group))
    join(members)
    results = together(members, lambda member: member.iterate(lambda: True))
    if sync:
        assert [result.metrics["loss"] for result in results] == pytest.approx([expected] * 2, rel=1e-5)
    else:
        assert all(isinstance(result, FluidError) for result in results)
        assert any("within `with self.sync(optimizer):`" in str(result) for result in results)
