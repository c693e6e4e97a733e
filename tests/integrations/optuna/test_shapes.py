"""The shapes of studies, for forecasts."""

from __future__ import annotations

import pytest

optuna = pytest.importorskip("optuna")

from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner, SuccessiveHalvingPruner  # noqa: E402

from fluid import SearchShape  # noqa: E402
from fluid.integrations.optuna.shapes import shape_of  # noqa: E402


def test_successive_halving_stops_trials_at_its_steps() -> None:
    pruner = SuccessiveHalvingPruner(min_resource=2, reduction_factor=3, min_early_stopping_rate=1)
    found = shape_of(pruner, 30, 4, is_asked=True)
    # Steps 6 and 18, counted from 0.
    assert found is not None and (found.algorithm, found.rungs, found.eta) == ("stopping", (7, 19, 30), 3)
    automatic = shape_of(SuccessiveHalvingPruner(), 20, 4, is_asked=True)
    assert automatic is not None and automatic.rungs == (2, 5, 17, 20)


def test_studies_without_pruner_run_to_the_end() -> None:
    full = SearchShape(algorithm="full", rungs=(9,), concurrency=4)
    assert shape_of(NopPruner(), 9, 4, is_asked=True) == full == shape_of(None, 9, 4, is_asked=True)
    assert shape_of(MedianPruner(), 1, 4, is_asked=True) == SearchShape(algorithm="full", rungs=(1,), concurrency=4)


def test_other_pruners_have_no_shape() -> None:
    assert shape_of(MedianPruner(), 9, 4, is_asked=True) is None
    assert shape_of(HyperbandPruner(), 9, 4, is_asked=True) is None
    assert shape_of(NopPruner(), 9, 4, is_asked=False) is None
