"""Tests of what the engine is told of a trial's config."""

from __future__ import annotations

from typing import Any

import numpy as np

from fluid.search import schedule
from fluid.session.specs import ISOLATING, spec_of
from fluid.trialgroup import Shown, Trial


def train(config: dict[str, Any]) -> Any:
    yield {"loss": 0.0}


def config_of(config: dict[str, Any], **fields: Any) -> dict[str, str]:
    return dict(spec_of(Trial(train, config, **fields), 1, keep_last=False, isolating=ISOLATING, search=None).config)


def test_the_engine_knows_numbers_names_and_short_lists_by_dotted_name() -> None:
    config = {"lr": 0.1, "model": {"width": 64, "act": "relu"}, "sizes": [32, 32], "amp": True, "seed": None}
    known = {"lr": "0.1", "model.width": "64", "model.act": "relu", "sizes": "[32, 32]", "amp": "True", "seed": "None"}
    assert config_of(config) == known


def test_numpys_numbers_are_those_of_python() -> None:
    assert config_of({"width": np.int64(64), "lr": np.float32(0.5)}) == {"width": "64", "lr": "0.5"}


def test_a_schedule_is_a_choice_by_its_text() -> None:
    config = {"lr": schedule({0: 0.1, 20: 0.01}), "batch": [schedule(8)], "long": schedule(dict.fromkeys(range(99), 1))}
    known = config_of(config)
    assert known["lr"] == "schedule({0: 0.1, 20: 0.01})"
    assert known["batch"] == "[schedule(8)]"
    assert "long" not in known


def test_data_is_no_choice_and_is_left_out() -> None:
    data = {"rows": np.zeros(1000), "table": list(range(1000)), "text": "x" * 1000, "loader": object(), "k": 3}
    assert config_of(data) == {"k": "3"}


def test_what_a_trial_shows_as_its_config_counts() -> None:
    assert config_of({"wrapped": object()}, shown=Shown("a", config={"lr": 0.1})) == {"lr": "0.1"}
