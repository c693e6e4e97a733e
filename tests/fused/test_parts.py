"""The parts of fused trainables: data, dropout, and the values of optimizers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fused.trainables import OwnData  # noqa: E402

from fluid.errors import FluidError, InvalidFieldError  # noqa: E402
from fluid.fused import SGD, Adam, AdamW, Data, Dropout, TensorData  # noqa: E402
from fluid.fused.data import Position, batches_from, row_train_batches, structure_key  # noqa: E402
from fluid.fused.dropout import CountedMasks, MaskPlan, Site, drawing, handing_out, recording  # noqa: E402

CPU = torch.device("cpu")

# -- data ---------------------------------------------------------------------------------------------------------


def tensor_data(seed: int = 0, **options: Any) -> TensorData:
    return TensorData([torch.arange(10), torch.arange(10) * 2], batch_size=4, seed=seed, **options)


def test_structures_are_told_apart_also_where_they_have_no_hash() -> None:
    """PyTorch 2.4's have none; a list stands for one."""
    assert structure_key([tuple, ["*"]]) == structure_key([tuple, ["*"]]) != structure_key([tuple, ["*", "*"]])
    structures = [torch.utils._pytree.tree_flatten(batch)[1] for batch in ((1, 2), (1, (2,)), {"x": 1}, {"y": 1})]
    assert len({structure_key(structure) for structure in structures}) == 4


def test_an_epoch_has_each_sample_once_in_an_order_of_its_own() -> None:
    data = tensor_data()
    epochs = [torch.cat([x for x, _ in data.train_batches(epoch, 0)]).tolist() for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2 and epochs[0] != epochs[1]
    assert epochs[0] != torch.cat([x for x, _ in tensor_data(seed=1).train_batches(0, 0)]).tolist()
    assert all(torch.equal(2 * x, y) for x, y in data.train_batches(0, 0))
    assert [len(x) for x, _ in tensor_data(drop_last=True).train_batches(0, 0)] == [4, 4]


@pytest.mark.parametrize("data", [tensor_data(), tensor_data(drop_last=True), OwnData(3)])
def test_batches_from_a_position_are_those_that_follow(data: Data) -> None:
    whole = list(batches_from(data, Position(), 9))
    position = Position().after(5, len(data))
    assert list(map(str, batches_from(data, position, 4))) == list(map(str, whole[5:]))


@pytest.mark.parametrize("shared", [True, False])
def test_rows_have_batches_at_positions_of_their_own(shared: bool) -> None:
    datas, positions = (
        [tensor_data(seed, drop_last=True) for seed in range(3)],
        [Position(0, 1), Position(), Position(2)],
    )
    if shared:
        assert all(data.share(datas[0]) for data in datas)
    for number, batch in enumerate(row_train_batches(datas, positions, 5, CPU)):
        assert batch.samples == 4 and not batch.common
        for row, (data, position) in enumerate(zip(datas, positions, strict=True)):
            expected = list(batches_from(data, position, 5))[number]
            assert all(torch.equal(part[row], wanted) for part, wanted in zip(batch.batch, expected, strict=True))


def test_rows_with_batches_of_different_sizes_are_refused() -> None:
    datas = [tensor_data(), tensor_data()]
    datas[1].share(datas[0])
    with pytest.raises(FluidError, match="different sizes"):
        list(row_train_batches(datas, [Position(), Position(0, 1)], 3, CPU))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"train": []}, "train"),
        ({"train": [1, 2]}, "train"),
        ({"train": [torch.ones(3), torch.ones(4)]}, "train"),
        ({"train": [torch.ones(3)], "drop_last": True}, "train"),
        ({"evaluation": [torch.tensor(1)]}, "evaluation"),
        ({"batch_size": 0}, "batch_size"),
        ({"evaluation_batch_size": 0}, "evaluation_batch_size"),
        ({"seed": -1}, "seed"),
    ],
)
def test_wrong_data_is_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        TensorData(**{"train": [torch.ones(6)], "batch_size": 4, "seed": 0, **arguments})
    assert caught.value.field == field


# -- dropout ------------------------------------------------------------------------------------------------------


def plan_of(sites: list[Site], *each: list[float]) -> MaskPlan:
    plan = MaskPlan(sites, len(each), CPU)
    plan.set_probabilities(each)
    return plan


@pytest.mark.parametrize("size", [3, 20_000])
def test_a_row_has_the_same_masks_alone_and_beside_others(size: int) -> None:
    sites = [Site("a", (2, 3), torch.float32), Site("b", (size,), torch.float64)]
    alone, both = plan_of(sites, [0.2, 0.6]), plan_of(sites, [0.5, 0.1], [0.2, 0.6])
    keys, begun = torch.tensor([2**60 + 3, 2**62 + 4]), torch.tensor([7, 100])
    of_one, of_both = CountedMasks(keys[1:], begun[1:], 5), CountedMasks(keys, begun, 5)
    begins_later = CountedMasks(keys, begun + 2, 3)
    seen = []
    for step in range(5):
        masks = of_both.of(step, both)
        for single, mask in zip(of_one.of(step, alone), masks, strict=True):
            assert torch.equal(single[0], mask[1]) and single.dtype == mask.dtype
        if step >= 2:
            assert all(map(torch.equal, masks, begins_later.of(step - 2, both)))
        seen += [tuple(row.tolist()) for row in masks[1]] if size > 3 else []
    assert len(set(seen)) == len(seen)


def test_steps_may_have_batches_of_other_shapes() -> None:
    one, two = (plan_of([Site("a", (size,), torch.float32)], [0.5]) for size in (40, 30))
    masks = CountedMasks(torch.tensor([5]), torch.tensor([0]), 4)
    found = [masks.of(step, plan) for step, plan in enumerate([one, two, one, two])]
    for step, (plan, (mask,)) in enumerate(zip([one, two, one, two], found, strict=True)):
        assert torch.equal(mask, CountedMasks(torch.tensor([5]), torch.tensor([step]), 1).of(0, plan)[0])


@pytest.mark.parametrize("p", [0.0, 0.25, 0.9, 1 - 2**-40])
def test_masks_keep_the_mean(p: float) -> None:
    plan = plan_of([Site("a", (400_000,), torch.float64)], [p])
    (mask,) = CountedMasks(torch.tensor([11]), torch.tensor([0]), 1).of(0, plan)
    assert set(mask.unique().tolist()) <= {0.0, 1 / (1 - p)}
    assert (mask == 0).double().mean().item() == pytest.approx(p, abs=0.003)


def test_the_module_takes_masks_in_the_order_of_its_calls() -> None:
    model = torch.nn.Sequential(Dropout(0.5), Dropout(0.1), torch.nn.Dropout(0.0))
    x = torch.ones(3)
    with recording(model) as sites:
        assert torch.equal(model(x), x)
    assert [site.module for site in sites] == ["0", "1"]
    with handing_out([torch.tensor([1.0, 0.0, 2.0]), torch.tensor([3.0, 1.0, 1.0])]):
        assert model(x).tolist() == [3.0, 0.0, 2.0]
        with pytest.raises(FluidError, match="more often"):
            model(x)
    with handing_out([torch.ones(2)]), pytest.raises(FluidError, match="another shape"):
        model(x)


def test_outside_a_fused_trainable_it_is_dropout() -> None:
    dropout = Dropout(0.5)
    assert set(dropout(torch.ones(1000)).tolist()) == {0.0, 2.0}
    assert dropout.eval()(torch.ones(3)).tolist() == [1.0] * 3


def test_masks_may_be_drawn_as_they_are_needed() -> None:
    x, dropout = torch.ones(10_000), Dropout(0.2)

    def draw(seed: int) -> torch.Tensor:
        with drawing(torch.Generator().manual_seed(seed)):
            return dropout(x)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert draw(1).unique().tolist() == [0.0, 1.25] and draw(1).mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("p", [-0.1, 1.0, "x"])
def test_a_wrong_p_is_refused(p: Any) -> None:
    with pytest.raises(InvalidFieldError, match="p="):
        Dropout(p)


# -- optimizers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [SGD(lr=0.1, momentum=0.9, nesterov=True), Adam(weight_decay=0.1), AdamW(betas=(0.8, 0.9))]
)
def test_the_values_are_those_of_pytorchs_optimizer(spec: Any) -> None:
    optimizer = spec.make({"weight": torch.nn.Parameter(torch.ones(2))})
    assert type(optimizer).__name__ == type(spec).__name__
    (group,) = optimizer.param_groups
    assert {name: group[name] for name in spec.values()} == spec.values()


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_defaults_are_pytorchs(kind: Any) -> None:
    spec, theirs = kind(lr=0.25), getattr(torch.optim, kind.__name__)([torch.nn.Parameter(torch.ones(2))], lr=0.25)
    assert spec.values().items() <= theirs.param_groups[0].items()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SGD(lr=-1), "lr"),
        (lambda: SGD(lr=0.1, momentum=-1), "momentum"),
        (lambda: SGD(lr=0.1, nesterov=True), "nesterov"),
        (lambda: SGD(lr=0.1, weight_decay=-0.1), "weight_decay"),
        (lambda: SGD(lr=0.1, clip_norm=-1), "clip_norm"),
        (lambda: SGD(lr=0.1, schedule=0.5), "schedule"),
        (lambda: Adam(betas=(0.9, 1.0)), "betas"),
        (lambda: Adam(betas=0.9), "betas"),
        (lambda: AdamW(eps=-1), "eps"),
    ],
)
def test_values_that_pytorch_cannot_use_are_refused(make: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        make()
    assert caught.value.field == field
