"""The trainables of the three sweeps learn, are saved and restored bit by bit, and can be reused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
import torch
from elastic.groups import make_groups, together
from models.trial import ENDED
from sweep_configs import WORKLOADS, config

from fluid.elastic import as_tune_trainable

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray raises warnings of its own.

NAMES = pytest.mark.parametrize("name", WORKLOADS)
#: A loss for each, and hyperparameters with which it falls at the smallest scale.
LEARNS = {
    "cifar10": ("loss", {"lr": 0.1, "momentum": 0.9}),
    "wlm": ("loss", {"model": "GRU", "lr": 10.0}),
}


def trial(name: str, data: str, **changes: Any) -> Any:
    made = WORKLOADS[name].trainable()
    made.setup(config(WORKLOADS[name], data, **changes))
    return made


def without_times(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns what a trial reported, without the time."""
    assert ENDED in metrics
    return {key: value for key, value in metrics.items() if key != ENDED}


def assert_same_bits(one: Any, other: Any) -> None:
    """Compares states: nested containers with tensors in them."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same_bits(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for ours, theirs in zip(one, other, strict=True):
            assert_same_bits(ours, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("name", LEARNS)
def test_it_learns(name: str, data: str) -> None:
    loss, changes = LEARNS[name]
    made = trial(name, data, **changes)
    losses = [made.step()[loss] for _ in range(10)]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.99 * losses[0]


@pytest.mark.slow
@NAMES
def test_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(name: str, data: str, tmp_path: Path) -> None:
    first, second = trial(name, data), trial(name, data)
    for _ in range(2):
        first.step()
    first.save_checkpoint(str(tmp_path))
    second.load_checkpoint(str(tmp_path))
    assert_same_bits(second.elastic_state(), first.elastic_state())
    assert without_times(second.step()) == without_times(first.step())
    assert_same_bits(second.elastic_state(), first.elastic_state())


@pytest.mark.slow
@NAMES
def test_one_that_was_reset_is_like_a_new_one(name: str, data: str) -> None:
    workload = WORKLOADS[name]
    cls = as_tune_trainable(workload.trainable)
    request = config(workload, data, **{workload.changing[0]: 0.75 * config(workload, data)[workload.changing[0]]})
    used, fresh = cls(config=config(workload, data)), cls(config=request)
    used.train()
    assert used.reset(request)
    results = [one.train() for one in (used, fresh)]
    metrics = [{key: result[key] for key in fresh.elastic.step() if key != ENDED} for result in results]
    assert metrics[0] == metrics[1]
    for one in (used, fresh):
        one.stop()


@pytest.mark.slow
@NAMES
def test_rates_are_those_of_the_config_after_another_trials_checkpoint(name: str, data: str, tmp_path: Path) -> None:
    rates = [key for key in WORKLOADS[name].changing if key.endswith(("lr", "momentum"))]
    middle = config(WORKLOADS[name], data)
    donor, heir = trial(name, data), trial(name, data, **{key: 0.5 * middle[key] for key in rates})
    donor.step()
    donor.save_checkpoint(str(tmp_path))
    heir.load_checkpoint(str(tmp_path))
    optimizer = heir.optimizer if name == "wlm" else heir.torch_optimizer
    names = ("netD_lr", "netG_lr") if name == "dcgan" else ("lr",)
    found = {rate: group["lr"] for rate, group in zip(names, optimizer.param_groups, strict=True)}
    found |= {"momentum": optimizer.param_groups[0]["momentum"]} if "momentum" in rates else {}
    annealed = 4.0 ** getattr(heir, "annealed", 0)
    assert found == {key: 0.5 * middle[key] / (annealed if key == "lr" else 1.0) for key in rates}


def test_the_learning_rate_is_annealed_when_validation_stalls(data: str, tmp_path: Path) -> None:
    made = trial("wlm", data, lr=16.0)
    made.step()
    assert made.annealed == 0
    made.best = 0.0  # Nothing is better than that.
    assert made.step()["annealed"] == 1
    assert made.optimizer.param_groups[0]["lr"] == 4.0
    made.save_checkpoint(str(tmp_path))
    other = trial("wlm", data, lr=16.0)
    other.load_checkpoint(str(tmp_path))
    assert other.optimizer.param_groups[0]["lr"] == 4.0
    assert other.step()["annealed"] == 2


def test_a_language_model_that_diverged_says_so_in_numbers(data: str) -> None:
    made = trial("wlm", data)
    with torch.no_grad():
        made.model.decoder.bias.fill_(math.nan)
    metrics = made.step()
    assert metrics["loss"] == 15.0
    assert metrics["perplexity"] == math.exp(15.0)


def test_each_network_of_the_two_learns_from_its_own_loss(data: str) -> None:
    from models.gan import _loss

    one, two, each = (trial("dcgan", data) for _ in range(3))
    batch = next(one._fused.data.train_batches(0, 0))
    one.loss(one.model, batch).backward()
    draw, judge = two.model["G"], two.model["D"]
    drawn = draw(batch[1])
    loss_d = _loss(judge(batch[0]), 1.0) + _loss(judge(drawn.detach()), 0.0)
    of_judge = torch.autograd.grad(loss_d, list(judge.parameters()))
    of_drawing = torch.autograd.grad(_loss(judge(drawn), 1.0), list(draw.parameters()))
    for parameter, gradient in zip(one.model.parameters(), (*of_judge, *of_drawing), strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    for buffer, other in zip(one.model.buffers(), two.model.buffers(), strict=True):
        torch.testing.assert_close(buffer, other)
    before = _separated(each, batch)
    for _ in range(20):
        each.step()
    assert _separated(each, batch) > before


def _separated(made: Any, batch: Any) -> float:
    """How much surer the discriminator is that images are real than that drawings are."""
    made.model.eval()
    with torch.no_grad():
        judge = made.model["D"]
        return float(judge(batch[0]).mean() - judge(made.model["G"](batch[1])).mean())


def test_the_score_of_drawings_is_one_where_all_are_alike_and_ten_at_most(data: str) -> None:
    made = trial("dcgan", data)
    (noise,) = made._fused.data.evaluation
    noise.zero_()
    assert made.step()["inception"] == pytest.approx(1.0)
    noise.normal_()
    assert 1.0 < made.step()["inception"] <= 10.0


def test_the_classifier_is_trained_once_and_tells_digits_apart(data: str, cache: Path) -> None:
    from models.data import load_mnist
    from models.gan import _enlarged, load_classifier, train_classifier

    path = train_classifier(data)
    assert Path(path).is_relative_to(cache)
    made = Path(path).stat().st_mtime_ns
    assert train_classifier(data) == path
    assert Path(path).stat().st_mtime_ns == made
    digits = load_mnist(data).first(500)
    with torch.no_grad():
        told = load_classifier(path, "cpu")(_enlarged(torch.from_numpy(digits.images))).argmax(1)
    assert (told.numpy() == digits.labels).mean() > 0.8


def test_images_are_moved_and_mirrored_and_nothing_else() -> None:
    from models.alexnet import cropped_and_flipped

    generator = torch.Generator().manual_seed(0)
    image = torch.arange(1.0, 1.0 + 2 * 8 * 8).view(1, 2, 8, 8)
    changed = cropped_and_flipped(image.expand(200, -1, -1, -1), generator)
    padded = torch.nn.functional.pad(image, (4,) * 4)[0]
    shifted = [padded[:, y : y + 8, x : x + 8] for y in range(9) for x in range(9)]
    possible = {tuple(one.flatten().tolist()) for crop in shifted for one in (crop, crop.flip(2))}
    seen = {tuple(one.flatten().tolist()) for one in changed}
    assert seen <= possible
    assert len(seen) > 80


def test_networks_are_those_of_the_paper_at_full_scale(data: str) -> None:
    from models.alexnet import alexnet
    from models.gan import discriminator, generator

    sizes = {"conv_1": 64, "conv_2": 256, "dense_1": 1024, "dropout_1": 0.05, "dropout_2": 0.1}
    network = alexnet(sizes, {"shrink": 1})
    weights = [part.weight for part in network if isinstance(part, torch.nn.Conv2d)]
    assert [tuple(weight.shape[:2]) for weight in weights] == [
        (32, 3), (64, 32), (256, 64), (128, 256), (256, 128), (256, 256)
    ]  # fmt: skip
    linear = [part for part in network if isinstance(part, torch.nn.Linear)]
    assert [(part.in_features, part.out_features) for part in linear] == [(4096, 1024), (1024, 512), (512, 10)]
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    drawings = generator(32)(torch.zeros(2, 100, 1, 1))
    assert drawings.shape == (2, 1, 32, 32)
    assert discriminator(32)(drawings).shape == (2,)
    made = trial("wlm", data, model="LSTM", nhid=300, emsize=200, nlayers=2)
    assert (made.model.memory.input_size, made.model.memory.hidden_size) == (200 // 16, 300 // 16)


@NAMES
def test_random_numbers_follow_from_the_seed(name: str, data: str) -> None:
    first, same, other = (without_times(trial(name, data, seed=seed).step()) for seed in (1, 1, 2))
    assert first == same != other


@NAMES
def test_two_devices_learn_the_same(name: str, data: str) -> None:
    workload = WORKLOADS[name]
    # Without random draws, the width changes only rounding.
    chosen = config(workload, data, **({"dropout": 0.0, "model": "GRU"} if name == "wlm" else {}))
    groups = make_groups(2)
    ranks = [workload.trainable() for _ in groups]
    for made, group in zip(ranks, groups, strict=True):
        made.setup(chosen)
        made._elastic.group = group
    first, second = [together(ranks, lambda made: made.step()) for _ in range(2)][-1]
    assert without_times(first) == without_times(second)
    parts = [made.elastic_state()["parts"] for made in ranks]
    states = [{part: state for part, state in each.items() if "model" in part} for each in parts]
    assert len(states[0]) == 1
    assert_same_bits(*states)
    for made in ranks:
        made.cleanup()
    if name == "wlm":
        alone = trial("wlm", data, dropout=0.0, model="GRU")
        assert [alone.step(), alone.step()][-1]["perplexity"] == pytest.approx(first["perplexity"], rel=1e-3)
