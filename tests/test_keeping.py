"""What of a trial outlives the run: what users may ask for, and the rule that a lane is told."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy
import pytest

from fluid.errors import InvalidFieldError
from fluid.keeping import Keep, KeepRule, parse_bytes
from fluid.trainables.encoded_metrics import encode_metrics


@pytest.mark.parametrize(
    ("keep", "how", "k"),
    [(None, "auto", 0), ("none", "none", 0), ("last", "last", 0), ("best:1", "best", 1), ("best:25", "best", 25)],
)
def test_what_to_keep_is_read(keep: str | None, how: str, k: int) -> None:
    assert (Keep(keep).how, Keep(keep).k, Keep(keep).quota) == (how, k, None)


def test_by_default_the_best_of_each_search_that_keeps_its_best_stays() -> None:
    kept = Keep(checkpoint_bytes="7KB")
    assert kept.in_group(keeps_best=True) == Keep("best:1", checkpoint_bytes="7KB")
    assert kept.in_group(keeps_best=False) == Keep("none", checkpoint_bytes="7KB")
    assert kept.in_group(keeps_best=True).quota == 7000


@pytest.mark.parametrize("keep", ["none", "last", "best:3"])
def test_what_the_user_asks_for_holds_for_each_group(keep: str) -> None:
    kept = Keep(keep)
    assert kept.in_group(keeps_best=True) == kept.in_group(keeps_best=False) == kept


@pytest.mark.parametrize("keep", ["best", "best:0", "best:-1", "best:1.5", "all", "", 3, ["last"], "best:1 "])
def test_other_words_are_refused(keep: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"^keep=.*must be 'none', 'last' or 'best:k'"):
        Keep(keep)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0, 0),
        (1024, 1024),
        ("10GB", 10 * 10**9),
        ("512 MiB", 512 << 20),
        ("1.5k", 1500),
        ("7", 7),
        (" 2 tb ", 2 * 10**12),
    ],
)
def test_numbers_of_bytes(value: Any, expected: int | None) -> None:
    assert parse_bytes("checkpoint_bytes", value) == expected


@pytest.mark.parametrize("value", ["", "GB", "-1GB", "10 gigabytes", "1e9", -1, 1.5, True, [1]])
def test_other_bytes_are_refused(value: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"^checkpoint_bytes="):
        parse_bytes("checkpoint_bytes", value)


class Raises:
    def __float__(self) -> float:
        raise RuntimeError("no number")


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"eval/loss": 0.5}, 0.5),
        ({"eval": {"loss": 0.25}}, 0.25),
        ({"eval/loss": 0.5, "eval": {"loss": 0.25}}, 0.5),
        ({"eval": {"loss": 3}}, 3.0),
        ({"eval": 0.5}, None),
        ({"loss": 0.5}, None),
        ({}, None),
        ({"eval/loss": float("nan")}, None),
        ({"eval/loss": float("-inf")}, None),
        ({"eval/loss": None}, None),
        ({"eval/loss": "0.5"}, None),
        ({"eval/loss": True}, None),
        ({"eval/loss": [1.0, 2.0]}, None),
        ({"eval/loss": Raises()}, None),
        ({"eval/loss": numpy.array([0.5])}, 0.5),
        ({"eval": OrderedDict(loss=0.5)}, 0.5),
    ],
)
def test_the_value_of_a_result(metrics: dict[str, Any], expected: float | None) -> None:
    rule = KeepRule("best", "g", "eval/loss")
    inner = rule._replace(entry="metrics")
    assert rule.value(encode_metrics(metrics).numbers) == expected
    assert inner.value(encode_metrics({"metrics": metrics}).numbers) == expected
    assert inner.value(encode_metrics(metrics).numbers) is None


@pytest.mark.parametrize(("mode", "better"), [("min", 0.1), ("max", 0.9)])
def test_better_is_strictly_better(mode: str, better: float) -> None:
    rule = KeepRule("best", "g", "loss", mode)
    assert rule.is_better(better, 0.5) and not rule.is_better(0.5, better)
    assert not rule.is_better(0.5, 0.5) and rule.is_better(0.5, None)
