"""A recurrent network that learns which word comes next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from models.data import load_wikitext2
from models.trial import SweptTrial, shrunk
from torch import nn

#: Columns that the text for validation is cut into.
_VALIDATION_COLUMNS = 10
#: A loss that is worse than this, or no number, counts as this: schedulers and searchers compare losses.
_WORST = 15.0
#: The learning rate is divided by this whenever a validation was no better than the best one before.
_ANNEALING = 4.0


class Recurrent(nn.Module):
    """Embeds words, remembers, and scores each word as the next one.

    Args:
        kind: ``"LSTM"``, ``"GRU"``, ``"RNN_TANH"`` or ``"RNN_RELU"``.
        vocabulary: how many words there are.
        embedding: numbers that stand for a word.
        hidden: numbers that a layer remembers.
        layers: how many layers remember.
        dropout: between them all.
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
        """Scores ``(time * columns, vocabulary)`` for words ``(time, columns)``, and what is remembered then."""
        remembered, hidden = self.memory(self.dropout(self.encoder(words)), hidden)
        return self.decoder(self.dropout(remembered)).flatten(0, 1), hidden


class LanguageModel(SweptTrial):
    """Trains :class:`Recurrent` by SGD with clipped gradients; reports ``loss`` and ``perplexity`` of the validation.

    Each column of a batch reads on where it stopped, and at the end of the text from its beginning. Its config has
    ``batch``, the number of columns, ``bptt``, how many words are read between two steps, ``clip``, ``model``,
    ``emsize``, ``nhid``, ``nlayers``, ``dropout`` and ``lr``; under ``fixed`` ``data``, ``seed``, ``shrink``,
    ``words`` and ``vocabulary``.
    """

    #: What is remembered, a column for each column of the text.
    batch_state: ClassVar[Mapping[str, int]] = {"hidden": 1}

    def build_model(self, config: dict[str, Any], fixed: dict[str, Any]) -> None:
        words = load_wikitext2(fixed["data"], fixed["words"], fixed["vocabulary"])
        self.text = self._columns(words.train, config["batch"])
        self.validation = self._columns(words.validation, _VALIDATION_COLUMNS)
        self.hidden: Any = None
        self.model = Recurrent(
            config["model"],
            words.vocabulary,
            shrunk(config["emsize"], fixed),
            shrunk(config["nhid"], fixed),
            config["nlayers"],
            config["dropout"],
        ).to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["lr"])
        self.best = math.inf
        self.annealed = 0

    def set_rates(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config["lr"] / _ANNEALING**self.annealed

    def extra_state(self) -> dict[str, Any]:
        return {"best": self.best, "annealed": self.annealed}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self.best, self.annealed = state["best"], state["annealed"]
        super().load_extra_state(state)

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
        return {**metrics, "perplexity": math.exp(validation), "annealed": self.annealed}

    @torch.no_grad()
    def _validate(self) -> float:
        """The mean loss on the text for validation."""
        self.model.eval()
        means, hidden = self.means(), None
        for words, following in self._chunks(self.validation):
            scores, hidden = self.model(words, hidden)
            means.add({"loss": F.cross_entropy(scores, following.flatten())}, self.count * len(words))
        self.model.train()
        return _bounded(means.result()["loss"])

    def _columns(self, words: Any, columns: int) -> torch.Tensor:
        """The text in ``columns`` columns, one after the other; what is left over is left out."""
        length = len(words) // columns
        return torch.from_numpy(words[: length * columns]).view(columns, length).t().contiguous().to(self.device)

    def _chunks(self, text: torch.Tensor) -> Any:
        """Pairs of words, this device's columns of some rows of the text, and the words that follow them."""
        for start in range(0, len(text) - 1, self.config["bptt"]):
            end = min(start + self.config["bptt"], len(text) - 1)
            yield self.shard(text[start:end], dim=1), self.shard(text[start + 1 : end + 1], dim=1)


def _detached(hidden: Any) -> Any:
    """What is remembered, without what it came from."""
    if hidden is None:
        return None
    return tuple(part.detach() for part in hidden) if isinstance(hidden, tuple) else hidden.detach()


def _bounded(loss: float) -> float:
    return loss if loss < _WORST else _WORST  # No number is not below anything.
