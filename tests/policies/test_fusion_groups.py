"""Which config fields decide the fusion key is learnt from trials that contradict what is known."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.policies.fusing.groups import MOST_LEARNT, Config, FusionGroups, Group

KEY = "Net"


def config(**values: Any) -> Config:
    return tuple(values.items())


def test_nothing_is_known_before_the_first_trial() -> None:
    groups = FusionGroups()
    assert groups.group(KEY, config(width=32)) is None
    assert groups.name(KEY, config(width=32)) == KEY
    assert groups.fields(KEY) == ()
    groups.learn("another", config(width=32), "a")
    assert groups.group(KEY, config(width=32)) is None, "profile keys are learnt apart"


def test_no_field_decides_as_long_as_all_keys_are_equal() -> None:
    groups = FusionGroups()
    for lr in (0.1, 0.2, 0.3):
        assert not groups.learn(KEY, config(lr=lr, width=32), "a")
    assert groups.group(KEY, config(lr=0.4, width=64)) == ()
    assert groups.name(KEY, config(lr=0.4, width=64)) == KEY


def test_the_field_that_explains_unlike_keys_decides() -> None:
    groups = FusionGroups()
    groups.learn(KEY, config(width=32, layers=2, lr=0.1), "a")
    groups.learn(KEY, config(width=32, layers=2, lr=0.2), "a")
    assert groups.learn(KEY, config(width=64, layers=2, lr=0.1), "b")
    assert groups.group(KEY, config(width=64, layers=2, lr=0.3)) == (("width", "64"),)
    assert not groups.learn(KEY, config(width=64, layers=2, lr=0.4), "b")
    assert groups.learn(KEY, config(width=64, layers=3, lr=0.4), "c")
    assert groups.name(KEY, config(width=64, layers=2, lr=0.3)) == "Net [layers=2, width=64]"
    # A value that was not seen is a group of its own.
    assert groups.group(KEY, config(width=128, layers=2, lr=0.3)) == (("layers", "2"), ("width", "128"))


@pytest.mark.parametrize("irrelevant", ["lr", "seed", "flag"])
def test_a_field_chosen_by_accident_is_dropped_again(irrelevant: str) -> None:
    values = {"lr": [0.1, 0.2, 0.3, 0.4, 0.5], "seed": [0, 1, 2, 3, 4], "flag": [False, True, True, False, True]}
    groups = FusionGroups()
    # "flag", "lr" and "seed" come before "width" by name, and tell the first two trials apart as well as it does.
    for width, value in zip([32, 64, 32, 64, 64], values[irrelevant], strict=True):
        groups.learn(KEY, (("width", width), (irrelevant, value)), f"of {width}")
    assert groups.fields(KEY) == ("width",)


@pytest.mark.parametrize("seed", range(10))
def test_the_deciding_fields_of_a_mixed_space_are_found(seed: int) -> None:
    rng = random.Random(seed)
    groups = FusionGroups()
    trials = [
        config(
            lr=rng.uniform(1e-4, 1e-1),
            seed=number,
            optimizer=rng.choice(["sgd", "adam"]),
            dropout=rng.choice([0.1, 0.2]),
            augment=rng.choice([False, True]),
            batch_size=rng.choice([32, 64]),
            width=rng.choice([16, 32, 64]),
        )
        for number in range(64)
    ]

    def fusion_key(trial: Config) -> str:
        values = dict(trial)
        return f"{values['width']}, {values['batch_size']}, {values['optimizer']}"

    changes = [groups.learn(KEY, trial, fusion_key(trial)) for trial in trials]
    assert groups.fields(KEY) == ("batch_size", "optimizer", "width")
    assert not any(changes[48:]), "what is known is used, not doubted for ever"
    for one, other in itertools.combinations(trials, 2):
        assert (groups.group(KEY, one) == groups.group(KEY, other)) == (fusion_key(one) == fusion_key(other))


def test_a_continuous_field_decides_if_every_trial_has_its_own_key() -> None:
    groups = FusionGroups()
    for number in range(20):
        groups.learn(KEY, config(decay=number / 7, width=32 * (1 + number % 2)), f"{number}")
    assert groups.fields(KEY) == ("decay",)


def test_a_field_that_only_some_trials_have() -> None:
    groups = FusionGroups()
    for _ in range(3):
        groups.learn(KEY, config(layers=2, lr=0.1), "2")
        groups.learn(KEY, config(layers=3, third=8, lr=0.1), "3 of 8")
        groups.learn(KEY, config(layers=3, third=16, lr=0.1), "3 of 16")
    assert groups.group(KEY, config(lr=0.2, layers=2)) == (("third", "(absent)"),)
    assert groups.group(KEY, config(lr=0.2, layers=3, third=8)) == (("third", "8"),)


def test_values_of_any_type() -> None:
    class Loud:
        def __repr__(self) -> str:
            raise RuntimeError("not now")

    groups = FusionGroups()
    groups.learn(KEY, config(shape=[32, 32], loss=Loud(), width=np.int64(8)), "a")
    assert groups.learn(KEY, config(shape=[64], loss=Loud(), width=8), "b")
    assert groups.fields(KEY) == ("shape",), "np.int64(8) is 8"
    assert hash(groups.group(KEY, config(shape={"a": [1]}))) is not None
    assert groups.name(KEY, config(shape=list(range(100)))) == "Net [shape=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11...]"
    groups.learn(KEY, config(shape=[64], flag=True), "c")
    groups.learn(KEY, config(shape=[64], flag=1), "d")
    assert groups.group(KEY, config(shape=[64], flag=True)) != groups.group(KEY, config(shape=[64], flag=1))


def test_trials_of_equal_configs_with_unlike_keys_fuse_with_none() -> None:
    groups = FusionGroups()
    groups.learn(KEY, config(width=32), "a")
    assert groups.learn(KEY, config(width=32), "b"), "these trials are no group any more"
    assert groups.learn(KEY, config(width=64), "c")
    same = [groups.group(KEY, config(width=32)) for _ in range(3)]
    assert len(set(same)) == 3
    assert groups.group(KEY, config(width=64)) == groups.group(KEY, config(width=64)) == (("width", "64"),)
    assert groups.name(KEY, config(width=32)) == "Net [width=32]"


def test_hopeless_trials_cost_little() -> None:
    groups = FusionGroups()
    start = time.process_time()
    changes = [groups.learn(KEY, config(width=32, lr=0.1, layers=2), f"{number}") for number in range(3000)]
    assert sum(changes) == 1
    assert time.process_time() - start < 2.0, "fields are not chosen anew for each of them"


def test_learning_thousands_of_trials_is_cheap() -> None:
    groups = FusionGroups()
    start = time.process_time()
    for number in range(20 * MOST_LEARNT):
        groups.learn(KEY, config(width=number % 3, lr=number / 7, seed=number), f"{number % 3}")
    assert groups.fields(KEY) == ("width",)
    assert time.process_time() - start < 2.0


def fields(group: Group | None) -> tuple[str, ...]:
    return tuple(name for name, _ in group or ())


values = st.sampled_from([1, 2, 0.5, "x"])
trials = st.tuples(st.fixed_dictionaries({"a": values, "b": values}, optional={"c": values}), st.sampled_from("xyz"))


@given(st.lists(trials, max_size=20))
def test_equal_groups_have_equal_keys_unless_the_configs_are_equal(learnt: list[tuple[dict[str, Any], str]]) -> None:
    groups = FusionGroups()
    for number, (values, fusion_key) in enumerate(learnt):
        before = [fields(groups.group(KEY, config(**each))) for each, _ in learnt[:number]]
        if not groups.learn(KEY, config(**values), fusion_key):
            after = [fields(groups.group(KEY, config(**each))) for each, _ in learnt[:number]]
            assert after == before, "no change is kept quiet"
    for (one, key), (other, another) in itertools.combinations(learnt, 2):
        if groups.group(KEY, config(**one)) == groups.group(KEY, config(**other)):
            assert key == another
