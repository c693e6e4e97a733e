"""Adapters of several trials on one frozen model: in a pack against alone, padded against not."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.lora_trainables import Adapted, Transformer, matrices  # noqa: E402
from fused.trainables import made  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from fluid.errors import FluidError, InvalidFieldError  # noqa: E402
from fluid.fused import FusedPack, FusionError, LoraSpec, fusion_key, why_not_fused  # noqa: E402

EVERYWHERE = r"embed|.*\.(q_proj|v_proj)|.*mlp\.[02]"


def configs(kind: str = "adamw", **further: Any) -> list[dict[str, Any]]:
    """Rows of ranks 3, 4, 3, which are padded to 4, and that differ in all that may differ."""
    values = {"adamw": {"weight_decay": 0.3}, "adam": {"weight_decay": 0.1}, "sgd": {"momentum": 0.9}}[kind]
    return [
        {
            "seed": number,
            "rank": rank,
            "kind": kind,
            "optimizer": {"lr": 0.02 * (number + 1), "clip_norm": 0.5, **values},
            "lora": {"alpha": 6.0 / (number + 1), "dropout": 0.2 * number, "target_modules": EVERYWHERE, **further},
        }
        for number, rank in enumerate((3, 4, 3))
    ]


def difference(one: Any, two: Any) -> float:
    ours, theirs = matrices(one), matrices(two)
    assert ours.keys() == theirs.keys()
    return max(
        float(
            torch.linalg.vector_norm(ours[name] - theirs[name]) / torch.linalg.vector_norm(ours[name]).clamp(min=1e-3)
        )
        for name in ours
    )


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_every_row_equals_its_trial_alone(kind: str) -> None:
    each = configs(kind, modules_to_save=["classifier"])
    pack, alone = FusedPack.of(Adapted, each), [made(Adapted, config) for config in each]
    for _ in range(3):
        assert pack.step() == [pytest.approx(trial.step(), rel=1e-7) for trial in alone]
    assert all(difference(*pair) < 1e-7 for pair in zip(alone, pack.trials, strict=True))
    padded, full, _ = (trial.model.embed.lora_embedding_B for trial in pack.trials)
    assert not padded[:, 3].any() and padded[:, :3].all() and full.all()
    assert len({result["loss"] for result in pack.step()}) == 3


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_padding_changes_no_numbers_and_stays_zero(kind: str) -> None:
    (config, *_) = configs(kind)
    exact = copy.deepcopy(config)
    exact["lora"]["pad_to"] = 3
    wide = copy.deepcopy(config)
    wide["lora"]["pad_to"] = 16
    unpadded, padded, widest = (made(Adapted, each) for each in (exact, config, wide))
    for _ in range(4):
        expected = pytest.approx(unpadded.step(), rel=1e-9)
        assert padded.step() == expected and widest.step() == expected
    few, some, most = (matrices(trial) for trial in (unpadded, padded, widest))
    assert few["embed.lora_embedding_B"].shape[1] == 3 and most["embed.lora_embedding_B"].shape[1] == 16
    for name, matrix in few.items():
        for other in (some[name], most[name]):
            used = other[tuple(slice(0, size) for size in matrix.shape)]
            torch.testing.assert_close(used, matrix, rtol=1e-7, atol=1e-10)
            assert other.count_nonzero() == used.count_nonzero()  # The rest is exactly 0.
    assert few["blocks.0.attention.q_proj.lora_B"].norm() > 0


def test_without_training_the_numbers_are_those_of_the_base() -> None:
    trial = made(Adapted, configs()[0])
    tokens = torch.arange(11).view(1, 11)
    assert torch.equal(trial.model.eval()(tokens), trial._elastic_base.eval()(tokens))


# -- the base -----------------------------------------------------------------------------------------------------


def test_the_base_is_made_once_and_shared() -> None:
    before = Adapted.made
    trials = [made(Adapted, config) for config in configs()]
    assert Adapted.made - before <= 1
    pointers = {trial.model.get_parameter("blocks.0.attention.k_proj.weight").data_ptr() for trial in trials}
    assert len(pointers) == 1
    pack = FusedPack(trials)
    frozen = sum(not parameter.requires_grad for parameter in trials[0].model.parameters())
    assert len(pack._model.shared) == frozen > 20
    pack.step()
    base = trials[0]._elastic_base
    assert base.blocks[0].attention.k_proj.weight.data_ptr() in pointers
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in base.parameters())


def test_buffers_are_a_trials_own() -> None:
    one, two = (made(Adapted, config) for config in configs()[:2])
    one.model.factor.fill_(2.0)
    assert float(two.model.factor) == 1.0


class Sized(Adapted):
    """Bases of several widths."""

    base_fields = ("width",)

    def base(self, config: dict[str, Any]) -> nn.Module:
        assert config.keys() == {"width"}
        self.seen = config
        return Transformer(config["width"]).double()


@pytest.mark.slow
def test_the_base_follows_from_the_fields_it_names() -> None:
    small, again, large = (made(Sized, {"width": width, "seed": width}) for width in (4, 4, 8))
    assert small._elastic_base is again._elastic_base is not large._elastic_base
    assert not hasattr(small, "seen")
    reference = weakref.ref(small._elastic_base)
    del small, again
    gc.collect()
    assert reference() is None  # Only the newest is kept when no trial has it.
    with pytest.raises(InvalidFieldError, match="has no 'width'"):
        made(Sized, {})


def test_first_values_do_not_depend_on_who_made_the_base() -> None:
    class Fresh(Adapted):
        pass

    config = configs()[0]
    first, second = made(Fresh, config), made(Fresh, config)
    assert difference(first, second) == 0.0
    assert difference(first, made(Fresh, config | {"seed": 5})) > 0.1


# -- packs --------------------------------------------------------------------------------------------------------


@settings(max_examples=4)
@given(st.data())
def test_trials_leave_and_join(data: st.DataObject) -> None:
    each = configs()
    alone, fused = [made(Adapted, config) for config in each], [made(Adapted, config) for config in each]
    inside, outside = [0, 1], [2]
    pack = FusedPack([fused[number] for number in inside])
    for _ in range(data.draw(st.integers(2, 3))):
        results = dict(zip(inside, pack.step(), strict=True))
        results |= {number: fused[number].step() for number in outside}
        for number, trial in enumerate(alone):
            assert results[number] == pytest.approx(trial.step(), rel=1e-6)
        leaving = data.draw(st.lists(st.sampled_from(range(len(inside))), unique=True)) if inside else []
        joining, outside = outside, [inside[row] for row in leaving]
        pack.leave(leaving)
        inside = [number for row, number in enumerate(inside) if row not in leaving]
        pack.join(fused[number] for number in joining)
        inside += joining
    assert all(difference(*pair) < 1e-6 for pair in zip(alone, fused, strict=True))


@pytest.mark.parametrize(
    ("ranks", "fused"), [((1, 1), True), ((1, 2), False), ((3, 4), True), ((4, 5), False), ((33, 64), True)]
)
def test_ranks_are_fused_up_to_the_next_power_of_two(ranks: tuple[int, int], fused: bool) -> None:
    keys = [fusion_key(Adapted, {"rank": rank}) for rank in ranks]
    difference = keys[0].difference(keys[1])
    assert (difference is None) is fused
    assert fused or "padded_rank=" in difference


def test_reasons_say_what_differs() -> None:
    each = configs()
    assert why_not_fused(Adapted, each[0], each[1]) is None
    reason = why_not_fused(Adapted, each[0], each[1] | {"rank": 5})
    assert reason is not None and "padded_rank=4" in reason and "padded_rank=8" in reason
    with pytest.raises(FusionError, match="padded_rank"):
        FusedPack.of(Adapted, [each[0], each[0] | {"rank": 9}])
    wide = copy.deepcopy(each)
    for config in wide:
        config["lora"]["pad_to"] = 16
    assert fusion_key(Adapted, wide[0]) == fusion_key(Adapted, wide[1] | {"rank": 16})


def test_dropout_of_the_base_is_fused_too() -> None:
    trial = made(Adapted, configs()[0])
    assert type(trial.model.blocks[0].mlp[3]).__module__ == "fluid.fused.dropout"
    assert type(trial._elastic_base.blocks[0].mlp[3]) is nn.Dropout


def test_a_loss_may_index_by_positions() -> None:
    class Picking(Adapted):
        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            tokens, labels = batch
            return -model(tokens).log_softmax(-1)[torch.arange(len(labels)), labels].mean()

    assert why_not_fused(Picking, {}) is None


# -- checkpoints --------------------------------------------------------------------------------------------------


def test_a_checkpoint_has_the_adapters_and_not_the_base(tmp_path: Path) -> None:
    config = configs()[1]
    pack = FusedPack.of(Adapted, configs())
    pack.step()
    pack.trials[1].save_checkpoint(str(tmp_path))
    model = torch.load(tmp_path / "elastic.pt", weights_only=False)["parts"]["model"]
    assert {name.rpartition(".")[2][:5] for name in model} == {"lora_", "lora", "factor"[:5]}
    alone = made(Adapted, config)
    alone.load_checkpoint(str(tmp_path))
    assert alone.step() == pytest.approx(pack.step()[1], rel=1e-7)
    assert difference(alone, pack.trials[1]) < 1e-7


def test_a_trial_that_takes_anothers_checkpoint_keeps_its_alpha_and_needs_its_rank(tmp_path: Path) -> None:
    first, other, same = configs()
    donor = made(Adapted, first)
    donor.step()
    donor.save_checkpoint(str(tmp_path))
    taker = made(Adapted, same)
    scale = taker.model.embed.lora_scale.clone()
    taker.load_checkpoint(str(tmp_path))
    assert torch.equal(taker.model.embed.lora_scale, scale) and difference(taker, donor) == 0.0
    with pytest.raises(FluidError, match="rank 3, and this trial those of rank 4"):
        made(Adapted, other).load_checkpoint(str(tmp_path))


def test_a_state_without_adapters_is_refused() -> None:
    trial = made(Adapted, configs()[0])
    with pytest.raises(RuntimeError, match="lora_A"):
        trial.model.load_state_dict(Transformer().double().state_dict())


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 1.5}, "rank"),
        ({"alpha": "x"}, "alpha"),
        ({"alpha": -1}, "alpha"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": "("}, "target_modules"),
        ({"target_modules": [3]}, "target_modules"),
        ({"dropout": 1.0}, "dropout"),
        ({"modules_to_save": "classifier"}, "modules_to_save"),
        ({"pad_to": 3}, "pad_to"),
    ],
)
def test_wrong_specs_are_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        LoraSpec(**{"rank": 4, "alpha": 8, "target_modules": ["q_proj"], **values})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_modules": ["query"]}, "the base has no such layer"),
        ({"target_modules": ["first"]}, "first is a LayerNorm"),
        ({"target_modules": ["classifier"], "modules_to_save": ["classifier"]}, "has an adapter already"),
        ({"modules_to_save": ["head"]}, "has no module 'head'"),
    ],
)
def test_specs_that_do_not_fit_the_base_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        made(Adapted, {"lora": values})


class Other(Adapted):
    """Its base is ``config["make"]()``."""

    base_fields = ("make",)

    def base(self, config: dict[str, Any]) -> nn.Module:
        return config["make"]()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.embed, self.classifier = nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4)
        self.classifier.weight = self.embed.weight


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, dropout=0.0)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (attention, {"target_modules": ["out_proj"]}, "part of a MultiheadAttention"),
        (Tied, {"modules_to_save": ["classifier"]}, r"embed\.weight is one of its parameters, too"),
        (int, {}, "must return a torch.nn.Module"),
    ],
)
def test_bases_that_cannot_be_adapted_are_refused(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        made(Other, {"make": make, "lora": values})


def test_what_lora_returns_is_checked() -> None:
    class Wrong(Adapted):
        def lora(self, config: dict[str, Any]) -> Any:
            return {"r": 4}

    with pytest.raises(InvalidFieldError, match="must return a LoraSpec"):
        made(Wrong, {})
