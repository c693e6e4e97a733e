"""Trainables of the elastic tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from fluid.elastic import ElasticTrainable


def points(samples: int, seed: int = 0) -> TensorDataset:
    """A small regression task."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, torch.sin(x @ torch.randn(6, 2, generator=generator)))


class Regression(ElasticTrainable):
    """A small network; 65 samples in batches of 13: no shard is as large as the other one."""

    def build(self, config: dict[str, Any]) -> None:
        torch.manual_seed(config.get("seed", 0))
        self.config = config
        layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)]
        if config.get("batch_norm"):
            layers.insert(1, nn.BatchNorm1d(16))
        self.model = nn.Sequential(*layers)
        if config.get("batch_norm") == "sync":
            self.sync_batch_norm(self.model)
        if config.get("optimizer", "sgd") == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=0.01, weight_decay=0.1
            )
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.loader = self.make_loader(
            points(config.get("samples", 65)), batch_size=config.get("batch_size", 13), seed=3
        )
        self.seen = 0

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        x, y = batch
        self.before_batch()
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        if self.config.get("clip"):
            with self.sync():
                pass
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config["clip"])
        self.optimizer.step()
        self.seen += 1
        return {"loss": loss}

    def before_batch(self) -> None:
        """Where something goes wrong, in subclasses."""

    def end_iteration(self, metrics: dict[str, float]) -> Mapping[str, Any]:
        self.scheduler.step()
        metrics["done"] = self.iteration + 1 >= self.config.get("last", 1_000)
        return {**metrics, "lr": self.optimizer.param_groups[0]["lr"], "sums": fingerprint(self), "seen": self.seen}

    def extra_state(self) -> Any:
        return self.seen

    def load_extra_state(self, state: Any) -> None:
        self.seen = state


class OnDevice(Regression):
    """Trains where its lane is."""

    def build(self, config: dict[str, Any]) -> None:
        super().build(config)
        self.model.to(self.device)

    def train_batch(self, batch: Any) -> Mapping[str, Any]:
        return super().train_batch([part.to(self.device) for part in batch])

    def end_iteration(self, metrics: dict[str, float]) -> Mapping[str, Any]:
        return metrics


class Dying(Regression):
    """Sends itself a signal, once, where its config says."""

    def before_batch(self) -> None:
        die = self.config["die"]
        if self.rank == die.get("rank") and self.seen == die.get("batch"):
            self.die()

    def load_extra_state(self, state: Any) -> None:
        super().load_extra_state(state)
        if self.config["die"].get("loading"):
            self.die()

    def die(self) -> None:
        try:
            os.close(os.open(self.config["once"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), self.config["die"].get("signal", signal.SIGKILL))


class Raising(Regression):
    """Raises on one rank."""

    def before_batch(self) -> None:
        if self.rank == self.config["rank"]:
            raise ValueError("on purpose")


class Unready(Regression):
    """Cannot be built."""

    def build(self, config: dict[str, Any]) -> None:
        raise OSError("no data today")


class Gan(ElasticTrainable):
    """Two models, two optimizers, batch normalization and a step with three backward passes, as DCGAN has."""

    def build(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        self.generator = self.sync_batch_norm(
            nn.Sequential(nn.ConvTranspose1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.ConvTranspose1d(8, 1, 3))
        )
        self.discriminator = self.sync_batch_norm(
            nn.Sequential(nn.Conv1d(1, 8, 3), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(24, 1))
        )
        self.optimizers = {
            "g": torch.optim.Adam(self.generator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
            "d": torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)),
        }
        data = torch.randn(44, 1, 5, generator=torch.Generator().manual_seed(0)).cumsum(-1)
        # The noise belongs to the sample, so that it does not depend on the width.
        noise = torch.randn(44, 4, 1, generator=torch.Generator().manual_seed(5))
        self.loader = self.make_loader(TensorDataset(data, noise), 11)

    def train_iteration(self) -> Mapping[str, Any]:
        means = self.means()
        for real, noise in self.loader.take(3):
            self.optimizers["d"].zero_grad()
            real_loss = self.judge(self.discriminator(real), 1.0)
            real_loss.backward()
            fake = self.generator(noise)
            fake_loss = self.judge(self.discriminator(fake.detach()), 0.0)
            fake_loss.backward()
            self.optimizers["d"].step()
            self.optimizers["g"].zero_grad()
            g_loss = self.judge(self.discriminator(fake), 1.0)
            g_loss.backward()
            self.optimizers["g"].step()
            means.add({"d": real_loss + fake_loss, "g": g_loss}, self.count)
        return means.result()

    @staticmethod
    def judge(scores: torch.Tensor, label: float) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label))


class LanguageModel(ElasticTrainable):
    """A recurrent network over columns of text, whose hidden state outlives the iteration; the rate is annealed."""

    batch_state: ClassVar = {"hidden": 1}
    columns, window, windows = 5, 7, 4

    def build(self, config: dict[str, Any]) -> None:
        torch.manual_seed(2)
        self.model = nn.ModuleDict({"embed": nn.Embedding(12, 8), "lstm": nn.LSTM(8, 8, 2), "decode": nn.Linear(8, 12)})
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        text = torch.randint(
            12, (12 * self.window * self.columns + self.columns,), generator=torch.Generator().manual_seed(4)
        )
        self.text = text.view(self.columns, -1).t().contiguous()
        self.hidden: Any = None
        self.at, self.best = 0, float("inf")

    def train_iteration(self) -> Mapping[str, Any]:
        means = self.means()
        for _ in range(self.windows):
            if self.at + self.window >= len(self.text):
                self.at, self.hidden = 0, None
            x = self.shard(self.text[self.at : self.at + self.window], dim=1)
            y = self.shard(self.text[self.at + 1 : self.at + self.window + 1], dim=1)
            self.at += self.window
            hidden = None if self.hidden is None else tuple(part.detach() for part in self.hidden)
            self.optimizer.zero_grad()
            output, self.hidden = self.model["lstm"](self.model["embed"](x), hidden)
            loss = F.cross_entropy(self.model["decode"](output).flatten(0, 1), y.flatten())
            with self.sync(self.optimizer):
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
            self.optimizer.step()
            means.add({"loss": loss}, self.count)
        metrics = means.result()
        if metrics["loss"] > 0.995 * self.best:
            self.optimizer.param_groups[0]["lr"] /= 4.0
        self.best = min(self.best, metrics["loss"])
        return {**metrics, "lr": self.optimizer.param_groups[0]["lr"]}

    def extra_state(self) -> Any:
        return self.at, self.best

    def load_extra_state(self, state: Any) -> None:
        self.at, self.best = state


def fingerprint(trainable: ElasticTrainable) -> list[int]:
    """Of every rank, a sum over the bytes of all weights and of all that the optimizer keeps."""
    total = 0
    for part in (trainable.model, trainable.optimizer):  # type: ignore[attr-defined]
        for tensor in tensors_in(part.state_dict()):
            raw = tensor.detach().reshape(-1).view(torch.uint8).to(torch.int64)
            total += int((raw * torch.arange(1, len(raw) + 1)).sum())
    sums = torch.zeros(trainable.size, dtype=torch.int64)
    sums[trainable.rank] = total
    trainable._elastic.group.all_reduce(sums)
    return list(sums.tolist())


def tensors_in(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors_in(child)]
