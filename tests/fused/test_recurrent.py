"""Recurrent layers, which packs compute by cells."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.trainables import Classifier, difference, images, made  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_flatten  # noqa: E402

from fluid.fused import FusedPack, FusionError, TensorData, why_not_fused  # noqa: E402
from fluid.fused.recurrent import RecurrenceByCells  # noqa: E402

LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm of two layers in two directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "lstm with projections": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 3}),
    "lstm with projections, without biases": (nn.LSTM, {"proj_size": 3, "bias": False}),
    "gru": (nn.GRU, {"batch_first": True}),
    "gru of two layers in two directions": (nn.GRU, {"num_layers": 2, "bidirectional": True, "bias": False}),
    "rnn": (nn.RNN, {"num_layers": 3, "bidirectional": True}),
    "rnn with relu": (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
}
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}


def assert_near(one: Any, two: Any) -> None:
    ours, theirs = tree_flatten(one), tree_flatten(two)
    assert ours[1] == theirs[1]
    for our, their in zip(ours[0], theirs[0], strict=True):
        assert our.shape == their.shape and our.dtype == their.dtype
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("samples", [None, 3])
@pytest.mark.parametrize("layer", LAYERS)
def test_cells_compute_what_a_layer_does(layer: str, samples: int | None, has_states: bool) -> None:
    kind, options = LAYERS[layer]
    torch.manual_seed(0)
    module = kind(4, 5, **options).double()
    inner = () if samples is None else (samples,)
    x = torch.randn(*((3, 6) if inner and module.batch_first else (6, *inner)), 4, dtype=torch.float64)
    _, states = module(x)
    states = tree_flatten(states)[0] if has_states else []
    arguments = [x, *([tuple(states) if isinstance(module, nn.LSTM) else states[0]] if has_states else [])]
    expected = module(*arguments)
    with RecurrenceByCells():
        assert_near(module(*arguments), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_under_autocast_the_types_are_pytorchs(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    module, x = kind(4, 5), torch.randn(6, 3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = tree_flatten(module(x))[0]
        with RecurrenceByCells():
            found = tree_flatten(module(x))[0]
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("cell", CELLS)
def test_cells_that_are_modules(cell: str) -> None:
    torch.manual_seed(0)
    module, x = CELLS[cell](4, 5).double(), torch.randn(6, 4, dtype=torch.float64)
    states = module(x)
    expected = module(x, states)
    with RecurrenceByCells():
        assert_near(module(x, states), expected)


class Recurrent(Classifier):
    """Takes the lines of an image as a sequence."""

    class Net(nn.Module):
        def __init__(self, layer: str) -> None:
            super().__init__()
            kind, options = LAYERS[layer]
            self.layer = kind(12, 5, **options)
            self.out = nn.Linear(3 * (self.layer.proj_size or 5) * (2 if self.layer.bidirectional else 1), 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            lines = x.view(len(x), 3, 12)
            if self.layer.batch_first:
                return self.out(self.layer(lines)[0].flatten(1))
            return self.out(self.layer(lines.transpose(0, 1))[0].transpose(0, 1).flatten(1))

    def build(self, config: dict[str, Any]) -> nn.Module:
        return self.Net(config["layer"]).to(self.dtype)

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x, y = images(20)
        return TensorData([x.to(self.dtype), y], [x.to(self.dtype), y], batch_size=10, seed=seed)


class Single(Recurrent):
    dtype = torch.float32


@pytest.mark.parametrize("layer", LAYERS)
def test_rows_equal_their_trials_alone_and_are_recorded_once(layer: str) -> None:
    configs = [{"layer": layer, "optimizer": {"lr": 0.1 * seed}, "seed": seed} for seed in range(1, 4)]
    pack = FusedPack.of(Recurrent, configs)
    results = [pack.step() for _ in range(2)]
    for row, config in enumerate(configs):
        alone = made(Recurrent, config)
        for result in results:
            assert result[row] == pytest.approx(alone.step(), rel=1e-9)
        assert difference(pack.trials[row], alone) <= 1e-10
    pack.leave([0])
    pack.step()
    assert pack.traced == 2  # The loss, and the evaluation.


@pytest.mark.parametrize("layer", ["lstm of two layers in two directions", "gru"])
def test_the_self_check_accepts_them(layer: str) -> None:
    assert why_not_fused(Single, {"layer": layer, "kind": "adam"}) is None


def test_a_recording_is_not_kept_in_the_model() -> None:
    class Own(Recurrent):
        pass

    pack = FusedPack.of(Own, [{"layer": "lstm", "seed": seed} for seed in range(2)])
    pack.step()
    flat = pack._programs._model.layer._flat_weights
    assert [weight.device.type for weight in flat] == ["meta"] * 4  # And not those that were recorded.


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_a_gpu_trains_them_in_graphs(layer: str, recwarn: pytest.WarningsRecorder) -> None:
    pack = FusedPack.of(Single, [{"layer": layer, "seed": seed} for seed in range(3)])
    alone = made(Single, {"layer": layer, "seed": 1})
    for _ in range(2):
        assert pack.step()[1] == pytest.approx(alone.step(), rel=1e-3)
    assert pack._graphs is not None and all(pack._graphs._graphs.values())
    (left,) = pack.leave([1])
    assert left.step() == pytest.approx(alone.step(), rel=1e-3) and not recwarn.list
    assert why_not_fused(Single, {"layer": layer}) is None


def test_sequences_of_other_lengths_are_refused() -> None:
    class Packed(Recurrent):
        class Net(Recurrent.Net):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                lines, lengths = x.view(len(x), 3, 12), torch.full((len(x),), 3)
                lines = nn.utils.rnn.pack_padded_sequence(lines, lengths, batch_first=True)
                return self.out(nn.utils.rnn.pad_packed_sequence(self.layer(lines)[0], True)[0].flatten(1))

    reason = why_not_fused(Packed, {"layer": "gru"})
    assert reason is not None and reason.endswith("sequences that are packed differ in length between rows: pad them")


def test_dropout_between_layers_is_refused() -> None:
    class Functional(Recurrent):
        class Net(nn.GRU):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                begin, weights = x.new_zeros(2, len(x), 12), list(self.parameters())
                return torch.gru(x.view(len(x), 3, 12), begin, weights, True, 2, 0.5, True, False, True)[0][:, 0, :5]

        def build(self, config: dict[str, Any]) -> nn.Module:
            return self.Net(12, 12, 2).to(self.dtype)

    with pytest.raises(FusionError, match="dropout between layers draws random numbers"):
        FusedPack.of(Functional, [{}, {}]).step()
