"""A recurrent language model, which predicts the next word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from models.data import load_wikitext2
from models.trial import FIXED, now, plain, shrunk
from torch import nn

import fluid
from fluid.elastic import ElasticTrainable

#: Columns of the validation text.
_VALIDATION_COLUMNS = 10
#: A worse loss, or NaN, is reported as this: schedulers and searchers compare losses.
_WORST = 15.0
#: The learning rate is divided by this whenever a validation is no better than the best one before.
_ANNEALING = 4.0


class Recurrent(nn.Module):
    """An embedding, recurrent layers, and a score for each word as the next one.

    Args:
        kind: ``"LSTM"``, ``"GRU"``, ``"RNN_TANH"`` or ``"RNN_RELU"``.
        vocabulary: number of words.
        embedding: size of a word's embedding.
        hidden: size of a layer's hidden state.
        layers: number of recurrent layers.
        dropout: between all layers.
    """

    def __init__(self, kind: str, vocabulary: int, embedding: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.Embedding(vocabulary, embedding)
        if kind in ("LSTM", "GRU"):
            self.memory: nn.RNNBase = getattr(nn, kind)(embedding, hidden, layers, dropout=dropout)
        else:
            nonlinearity = kind.removeprefix("RNN_").lower()
            self.memory = nn.RNN(embedding, hidden, layers, nonlinearity=nonlinearity, dropout=dropout)
        self.decoder = nn.Linear(hidden, vocabulary)
        for weight in (self.encoder.weight, self.decoder.weight):
            nn.init.uniform_(weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        """Returns scores ``(time * columns, vocabulary)`` for words ``(time, columns)``, and the new hidden state."""
        remembered, hidden = self.memory(self.dropout(self.encoder(words)), hidden)
        return self.decoder(self.dropout(remembered)).flatten(0, 1), hidden


class LanguageModel(ElasticTrainable):
    """Trains :class:`Recurrent` by SGD with clipped gradients; reports ``loss`` and the validation's ``perplexity``.

    Each column of a batch continues where it stopped; after the end of the text it starts again. The config has
    ``batch``, the number of columns, ``bptt``, the number of words between two steps, ``clip``, ``model``,
    ``emsize``, ``nhid``, ``nlayers``, ``dropout``, ``lr`` and ``seed``; under ``fixed`` ``data``, ``shrink``,
    ``words`` and ``vocabulary``.
    """

    #: The hidden state, with one column per column of the text.
    batch_state: ClassVar[Mapping[str, int]] = {"hidden": 1}

    def build(self, config: dict[str, Any]) -> None:
        torch.set_num_threads(1)  # A trial has one core; more threads would compete for it.
        torch.manual_seed(config["seed"])
        self.config = config = plain(config)
        fixed = config[FIXED]
        train, validation, vocabulary = fluid.shared(load_texts, fixed["data"], fixed["words"], fixed["vocabulary"])
        self.text = self._columns(train, config["batch"])
        self.validation = self._columns(validation, _VALIDATION_COLUMNS)
        self.hidden: Any = None
        self.model = Recurrent(
            config["model"],
            vocabulary,
            shrunk(config["emsize"], fixed),
            shrunk(config["nhid"], fixed),
            config["nlayers"],
            config["dropout"],
        ).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"])
        self.best = math.inf
        self.annealed = 0

    def set_rates(self) -> None:
        """Sets the learning rate: after another trial's checkpoint, the optimizer's is that trial's."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config["lr"] / _ANNEALING**self.annealed

    def extra_state(self) -> dict[str, Any]:
        return {"best": self.best, "annealed": self.annealed}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.best, self.annealed = state["best"], state["annealed"]
        self.set_rates()

    def train_iteration(self) -> Mapping[str, Any]:
        means = self.means()
        for words, following in self._chunks(self.text):
            self.hidden = _detached(self.hidden)
            self.optimizer.zero_grad()
            with self.sync(self.optimizer):
                scores, self.hidden = self.model(words, self.hidden)
                loss = F.cross_entropy(scores, following.flatten())
                loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config["clip"])
            self.optimizer.step()
            means.add({"loss": loss}, self.count * len(words))
        self.hidden = _detached(self.hidden)
        validation = self._validate()
        if validation < self.best:
            self.best = validation
        else:
            self.annealed += 1
            self.set_rates()
        metrics = {name: _bounded(value) for name, value in means.result().items()}
        return {**metrics, "perplexity": math.exp(validation), "annealed": self.annealed, **now()}

    @torch.no_grad()
    def _validate(self) -> float:
        """Returns the mean loss on the validation text."""
        self.model.eval()
        means, hidden = self.means(), None
        for words, following in self._chunks(self.validation):
            scores, hidden = self.model(words, hidden)
            means.add({"loss": F.cross_entropy(scores, following.flatten())}, self.count * len(words))
        self.model.train()
        return _bounded(means.result()["loss"])

    def _columns(self, words: torch.Tensor, columns: int) -> torch.Tensor:
        """Returns the text in ``columns`` columns, one after another, without the remainder; a view on the CPU."""
        length = len(words) // columns
        return words[: length * columns].view(columns, length).t().to(self.device)

    def _chunks(self, text: torch.Tensor) -> Any:
        """Yields this device's columns of some rows of the text, and the words that follow them."""
        for start in range(0, len(text) - 1, self.config["bptt"]):
            end = min(start + self.config["bptt"], len(text) - 1)
            yield self.shard(text[start:end], dim=1), self.shard(text[start + 1 : end + 1], dim=1)


def load_texts(folder: str, count: int | None, vocabulary: int | None) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the training text, the validation text and the size of the vocabulary: ``load_wikitext2`` as tensors."""
    words = load_wikitext2(folder, count, vocabulary)
    return torch.from_numpy(words.train), torch.from_numpy(words.validation), words.vocabulary


def _detached(hidden: Any) -> Any:
    """Returns the hidden state without its gradient graph."""
    if hidden is None:
        return None
    return tuple(part.detach() for part in hidden) if isinstance(hidden, tuple) else hidden.detach()


def _bounded(loss: float) -> float:
    return loss if loss < _WORST else _WORST  # NaN is not below any number.
