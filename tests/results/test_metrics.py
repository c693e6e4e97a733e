"""Values of metrics: which can be compared, wherever they stand in a result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fluid.errors import InvalidFieldError
from fluid.keeping import finite_number
from fluid.results.metrics import Goal, goals_of


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0.5, 0.5),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(0.5), 0.5),
        (True, None),
        ("0.5", None),
        (None, None),
        (np.array([0.5]), 0.5),
        (float("nan"), None),
        (float("inf"), None),
        (10**400, None),
        ([0.5], None),
    ],
)
def test_what_can_be_compared(value: Any, number: float | None) -> None:
    assert finite_number(value) == number
    assert Goal("loss", less=True).value_in({"loss": value}) == number
    assert Goal("eval/loss", less=True).value_in({"eval": {"loss": value}}) == number


def test_a_metric_is_named_once() -> None:
    with pytest.raises(InvalidFieldError, match=r"^metric=\['loss', 'loss'\]: names a metric twice"):
        goals_of(["loss", "loss"], ["min", "max"])
