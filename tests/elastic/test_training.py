"""Elastic training with real processes: what comes out does not depend on the width, nor on changes of it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from elastic.quick import QuickRun  # noqa: E402
from elastic.trainables import Gan, LanguageModel, Raising, Regression, Unready  # noqa: E402

from fluid.elastic import ElasticRun  # noqa: E402
from fluid.elastic.groups.make import make_group  # noqa: E402
from fluid.elastic.run import ElasticResult  # noqa: E402
from fluid.errors import FluidError, InvalidFieldError, MissingDependencyError  # noqa: E402

BACKENDS = ["torch", "gloo", pytest.param("horovod", marks=pytest.mark.horovod)]
GROWING_AND_SHRINKING = (1, 2, 1, 2, 2)


def train(trainable: Any, config: dict[str, Any], widths: Sequence[int], backend: str = "gloo") -> list[ElasticResult]:
    """One iteration at each of these widths in turn."""
    results = []
    with QuickRun(trainable, config, widths[0], backend=backend) as run:
        for width in widths:
            run.resize(width)
            results += run.run(1)
    assert [(result.iteration, result.width) for result in results] == list(enumerate(widths, start=1))
    return results


def alone(trainable: Any, config: dict[str, Any], iterations: int) -> list[ElasticResult]:
    """Without Fluid, in this process."""
    made = trainable()
    made.setup(config)
    results = [ElasticResult(number + 1, made.step(), 1) for number in range(iterations)]
    made.cleanup()
    return results


def same(ours: list[ElasticResult], others: list[ElasticResult]) -> None:
    """Checks that the metrics agree, and that in each iteration all ranks have the same bits."""
    for our, other in zip(ours, others, strict=True):
        for result in (our, other):
            sums = result.metrics.get("sums", [0] * result.width)
            assert len(sums) == result.width and len(set(sums)) == 1
        numbers = [{k: v for k, v in result.metrics.items() if k != "sums"} for result in (our, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "config",
    [
        {"optimizer": "sgd"},
        {"optimizer": "adamw", "clip": 0.5},
        {"optimizer": "adamw", "batch_norm": "sync"},
    ],
    ids=str,
)
def test_the_same_at_width_1_at_width_2_and_in_between(config: dict[str, Any], backend: str) -> None:
    expected = alone(Regression, config, 5)
    assert expected[-1].metrics["loss"] < 0.9 * expected[0].metrics["loss"]
    assert expected[0].metrics["lr"] > expected[-1].metrics["lr"]
    same(train(Regression, config, [2] * 5, backend), expected)
    same(train(Regression, config, GROWING_AND_SHRINKING, backend), expected)


@pytest.mark.slow
def test_batches_that_do_not_suffice_for_all_ranks() -> None:
    # 7 samples in batches of 3: the last one has a single sample, which two of three ranks can only look at.
    config = {"samples": 7, "batch_size": 3}
    same(train(Regression, config, [3, 3, 2]), alone(Regression, config, 3))


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [Gan, LanguageModel])
def test_models_with_a_step_of_their_own(trainable: Any) -> None:
    # In iterations of less than an epoch, so that what the language model remembers passes from one to the next.
    same(train(trainable, {}, [1, 2, 1, 3, 3, 2]), alone(trainable, {}, 6))


@pytest.mark.slow
def test_batch_norm_of_a_shard_keeps_the_replicas_the_same() -> None:
    config = {"batch_norm": "local", "optimizer": "adamw"}
    results = train(Regression, config, GROWING_AND_SHRINKING)
    assert all(len(set(result.metrics["sums"])) == 1 for result in results)


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_any_width(tmp_path: Path) -> None:
    config = {"optimizer": "adamw", "batch_norm": "sync"}
    whole = alone(Regression, config, 4)
    for before, after in [(2, 1), (1, 3)]:
        folder = tmp_path / str(before)
        folder.mkdir()
        with QuickRun(Regression, config, before) as run:
            run.run(2)
            run.save(str(folder))
        with QuickRun(Regression, config, after, checkpoint=str(folder)) as run:
            results = run.run(2)
        assert [result.iteration for result in results] == [3, 4]
        same([*whole[:2], *results], whole)


@pytest.mark.slow
def test_a_trial_that_says_it_is_done() -> None:
    with ElasticRun(Regression, {"last": 2}, 2) as run:
        assert [result.iteration for result in run.run(10)] == [1, 2]


@pytest.mark.slow
def test_what_cannot_be_set_up_and_what_raises() -> None:
    with pytest.raises(FluidError, match="no data today"):
        QuickRun(Unready, {})
    with QuickRun(Raising, {"rank": 1}, 2) as run, pytest.raises(FluidError, match="on purpose"):
        run.run(1)
    with pytest.raises(InvalidFieldError, match="width"):
        ElasticRun(Regression, {}, 0)
    with pytest.raises(FluidError, match="must be a subclass of"):
        ElasticRun(object, {})


def test_without_horovod_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "fluid.elastic.groups.horovod_group"
    before = sys.modules.pop(name, None)
    monkeypatch.setitem(sys.modules, "horovod", None)
    try:
        with pytest.raises(MissingDependencyError, match=r"scripts/build_horovod\.py"):
            make_group("horovod", "cpu")
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
