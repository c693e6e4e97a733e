"""What is found before trials are fused: reasons in one line."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from fused.trainables import (  # noqa: E402
    OPTIMIZERS,
    Classifier,
    Convolutions,
    Single,
    SingleConvolutions,
    Steps,
    Streamed,
    images,
    made,
)
from torch import nn  # noqa: E402

import fluid.fused.check  # noqa: E402
from fluid.errors import InvalidFieldError  # noqa: E402
from fluid.fused import SGD, FusedPack, FusionError, TensorData, fusion_key, why_not_fused  # noqa: E402
from fluid.fused.key import key_of  # noqa: E402
from fluid.lane.process.settings import ProcessSettings  # noqa: E402


class Made(Single):
    """Its model is ``net()``, in float32."""

    def net(self, config: dict[str, Any]) -> nn.Module:
        raise NotImplementedError

    def build(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Flatten(), self.net(config), nn.Linear(5, 5))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("cls", [Classifier, Single, SingleConvolutions, Streamed])
def test_trials_that_can_be_fused(cls: Any, kind: str) -> None:
    assert why_not_fused(cls, {"kind": kind}, {"kind": kind, "optimizer": {"lr": 0.02}, "seed": 3}) is None


def test_bfloat16_is_compared_more_loosely() -> None:
    class Half(Classifier):
        dtype = torch.bfloat16

    assert why_not_fused(Half, {}) is None


class Attending(Made):
    """Attention, of whose kernels vmap has a rule for that of mathematics only."""

    class Net(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.rows = nn.Linear(6, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True) if kind == "module" else None
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) if kind == "encoder" else None
            self.out = nn.Linear(48, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.rows(x.view(len(x), 6, 6))
            if self.encoder is not None:
                found = self.encoder(rows)  # Alone it is one operation in evaluation.
            elif self.attention is not None:
                found, _ = self.attention(rows, rows, rows, need_weights=False)
            else:
                found = nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
            return self.out(found.flatten(1))

    def net(self, config: dict[str, Any]) -> nn.Module:
        return self.Net(config["with"])


@pytest.mark.parametrize("kind", ["function", "module", "encoder"])
def test_attention_can_be_fused(kind: str) -> None:
    assert why_not_fused(Attending, {"with": kind}, {"with": kind, "seed": 3}) is None


# -- what vmap cannot do ------------------------------------------------------------------------------------------


class Renormed(Made):
    """An operation that has no batching rule."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.renorm = Renorm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.renorm(x)[:, :5]

    def net(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(36, 6), self.Net())


class Renorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.renorm(x, 2, 0, 1.0)


class Branching(Made):
    """Control flow that depends on data."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    def net(self, config: dict[str, Any]) -> nn.Module:
        return self.Net(36, 5)


class Noisy(Made):
    """Randomness that no module's type tells of."""

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    def net(self, config: dict[str, Any]) -> nn.Module:
        return self.Net(36, 5)


class Several(Made):
    """Any of PyTorch's modules."""

    def net(self, config: dict[str, Any]) -> nn.Module:
        return nn.Sequential(nn.Linear(36, 5), config["layer"])


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Renormed,
            r"^loss\(\) cannot run for several trials at once in 1.1.renorm \(Renorm\): vmap has no batching rule for ",
        ),
        (Branching, r"^loss\(\) cannot run for several trials at once in 1 \(Net\): "),
        (Noisy, r"^loss\(\) cannot run for several trials at once in 1 \(Net\): .*random"),
    ],
)
def test_what_cannot_run_for_rows_at_once_is_named_with_its_module(cls: Any, message: str) -> None:
    reason = why_not_fused(cls, {})
    assert reason is not None and "\n" not in reason
    with pytest.raises(FusionError, match=message):
        FusedPack.of(cls, [{}, {"seed": 1}]).step()
    with pytest.raises(FusionError, match=message):
        raise FusionError(reason)
    assert np.isfinite(made(cls, {}).step()["loss"])


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.RReLU(), nn.AlphaDropout(0.5)])
def test_other_random_modules_are_named(layer: nn.Module) -> None:
    reason = f"1.1 ({type(layer).__name__}) draws random numbers: only fluid.fused.Dropout can be fused"
    assert why_not_fused(Several, {"layer": layer}) == reason
    assert why_not_fused(Several, {"layer": nn.Dropout(0.0)}) is None


# -- what would give other results --------------------------------------------------------------------------------


def test_a_loss_that_does_not_use_the_model_it_is_given_is_found() -> None:
    class OwnModel(Classifier):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            return super().loss(self.model, batch)

    assert why_not_fused(OwnModel, {}) is not None


def test_an_evaluation_that_does_not_use_the_model_it_is_given_is_found() -> None:
    class OwnModel(Classifier):
        def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            return super().evaluate(self.model, batch)

    reason = why_not_fused(OwnModel, {"optimizer": {"lr": 3.0}})
    assert reason is not None and reason.startswith("evaluate() gives ")


def test_a_model_that_counts_its_calls_is_found() -> None:
    class Counting(Made):
        class Net(nn.Linear):
            calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return super().forward(x) * self.calls

        def net(self, config: dict[str, Any]) -> nn.Module:
            return self.Net(36, 5)

    reason = why_not_fused(Counting, {})
    assert reason is not None and "where 1e-05 is allowed" in reason


def test_a_parameter_without_gradient_that_only_fusion_would_decay_is_found() -> None:
    class Unused(Made):
        def net(self, config: dict[str, Any]) -> nn.Module:
            net = nn.Linear(36, 5)
            net.register_parameter("unused", nn.Parameter(torch.ones(3)))
            return net

    assert why_not_fused(Unused, {"optimizer": {"lr": 0.1, "weight_decay": 0.0}}) is None
    reason = why_not_fused(Unused, {"optimizer": {"lr": 0.1, "weight_decay": 0.1}})
    assert reason is not None and "1.unused differs" in reason


def test_a_loop_of_ones_own_is_refused() -> None:
    class OwnLoop(Classifier):
        def train_iteration(self) -> dict[str, Any]:
            return {}

    assert (
        why_not_fused(OwnLoop, {})
        == "OwnLoop defines train_iteration(), which belongs to the loop that fused trials share"
    )


def test_rows_at_other_positions_need_batches_of_one_size() -> None:
    class Ragged(Steps):
        def data(self, config: dict[str, Any], seed: int) -> TensorData:
            x, y = images()
            return TensorData([x.double(), y], batch_size=8, seed=seed)

    reason = why_not_fused(Ragged, {})
    assert reason is not None and "drop_last=True" in reason
    assert why_not_fused(Steps, {}) is None


def test_it_changes_no_state_and_raises_what_the_user_raises() -> None:
    class Broken(Classifier):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            raise KeyError("no such column")

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert why_not_fused(Convolutions, {}) is None
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    with pytest.raises(KeyError, match="no such column"):
        why_not_fused(Broken, {})
    with pytest.raises(InvalidFieldError, match="trainable"):
        why_not_fused(dict, {})  # type: ignore[arg-type]
    with pytest.raises(InvalidFieldError, match="steps=0"):
        why_not_fused(Classifier, {}, steps=0)


# -- rounding -----------------------------------------------------------------------------------------------------


class Kinked(Single):
    """Rounding decides where ReLU and max pooling have their kinks: its trainings differ by far more than rounding."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        def block(channels: int, maps: int) -> list[nn.Module]:
            return [nn.Conv2d(channels, maps, 3, padding=1), nn.BatchNorm2d(maps), nn.ReLU(), nn.MaxPool2d(2)]

        return nn.Sequential(*block(3, 8), *block(8, 16), nn.Flatten(), nn.Linear(256, 5))

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x = torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return TensorData([x, torch.arange(64) % 5], batch_size=32, seed=seed)

    @classmethod
    def reasons(cls) -> list[str | None]:
        configs = [{"optimizer": {"lr": 0.1, "momentum": 0.5}, "seed": seed} for seed in range(0, 16, 2)]
        return [why_not_fused(cls, config, steps=6) for config in configs]


@pytest.mark.slow
def test_what_is_but_rounding_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Kinked.reasons() == [None] * 8
    monkeypatch.setattr("fluid.fused.check._AMPLIFIED", 0.0)
    refused = [reason for reason in Kinked.reasons() if reason is not None]
    assert refused and all("where 1e-05 is allowed" in reason for reason in refused)


def test_rounding_in_a_model_that_cannot_be_in_double_precision_is_refused() -> None:
    class Cast(Kinked):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            x, y = batch
            return super().loss(model, (x.float(), y))

    assert any(Cast.reasons())


def test_want_of_memory_in_double_precision_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Single):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            if batch[0].dtype == torch.float64:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return super().loss(model, batch)

    tolerances = {**fluid.fused.check._TOLERANCES, torch.float32: (0.0, 0.0)}
    monkeypatch.setattr("fluid.fused.check._TOLERANCES", tolerances)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        why_not_fused(Large, {"optimizer": {"lr": 0.5}}, steps=9)


def test_small_differences_that_are_not_rounding_are_refused_and_shared_parts_stay_as_they_are() -> None:
    shared = nn.Linear(36, 36).requires_grad_(False)

    class Counting(Single):
        class Net(nn.Linear):
            calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return super().forward(x) * (1 + 1e-3 * self.calls)

        def build(self, config: dict[str, Any]) -> nn.Module:
            return nn.Sequential(nn.Flatten(), shared, self.Net(36, 5))

    reason = why_not_fused(Counting, {})
    assert reason is not None and "where 1e-05 is allowed" in reason
    assert shared.weight.dtype == torch.float32


# -- keys ---------------------------------------------------------------------------------------------------------


class Keyed(Classifier):
    """Everything that a key has is in its config."""

    def build(self, config: dict[str, Any]) -> nn.Module:
        if "note" in config:
            self.note = config["note"]
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(36, config.get("width", 5)), nn.LeakyReLU(config.get("slope", 0.1))
        )
        return model.to(config.get("dtype", torch.float64))

    def data(self, config: dict[str, Any], seed: int) -> TensorData:
        x, y = images(config.get("samples", 50))
        return TensorData([x, y], batch_size=config.get("batch_size", 10), seed=seed)

    def optimizer(self, config: dict[str, Any]) -> Any:
        return config.get("spec", SGD(lr=0.1, momentum=0.9))


@pytest.mark.parametrize(
    ("config", "difference"),
    [
        ({"width": 6}, "parameters"),
        ({"dtype": torch.float32}, "parameters"),
        ({"slope": 0.2}, "modules"),
        ({"note": "other"}, "attributes"),
        ({"samples": 40}, "data"),
        ({"batch_size": 25}, "data"),
        ({"spec": OPTIMIZERS["adam"](lr=0.1)}, "optimizer"),
        ({"spec": SGD(lr=0.1, momentum=0.9, nesterov=True)}, "optimizer"),
    ],
)
def test_what_cannot_differ_is_in_the_key(config: dict[str, Any], difference: str) -> None:
    key, other = fusion_key(Keyed, {}), fusion_key(Keyed, config)
    assert key != other
    told = key.difference(other)
    assert told is not None and told.startswith("the trials differ in their ")
    if difference != "parameters" or "width" not in config:  # The width is an attribute of its module, too.
        assert told.startswith(f"the trials differ in their {difference}: ")
    with pytest.raises(FusionError, match="the trials differ"):
        FusedPack.of(Keyed, [{}, config])


def test_what_may_differ_is_not() -> None:
    one = fusion_key(Keyed, {"seed": 1})
    two = fusion_key(Keyed, {"seed": 2, "spec": SGD(lr=0.5, weight_decay=0.1, clip_norm=1.0)})
    assert one == two and one.difference(two) is None
    assert fusion_key(Convolutions, {"p": 0.1}) == fusion_key(Convolutions, {"p": 0.6})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "settings: default dtype"),
        (lambda: torch.set_default_device("meta"), "settings: default device"),
        (lambda: torch.set_float32_matmul_precision("medium"), "settings: matmul precision"),
        (lambda: torch.use_deterministic_algorithms(True, warn_only=True), "settings: deterministic"),
    ],
)
def test_settings_of_the_process_are_in_the_key(change: Any, said: str) -> None:
    trial = Keyed()
    trial.setup({})
    one, settings = key_of(trial), ProcessSettings()
    change()
    try:
        other = key_of(trial)
    finally:
        settings.put_back()
    assert said in (one.difference(other) or "") and one.digest != other.digest
    assert key_of(trial) == one


def test_attributes_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(FusionError, match=r"self\.note cannot be compared"):
        fusion_key(Keyed, {"note": (number for number in range(3))})
