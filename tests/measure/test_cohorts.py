"""The tree of cohorts: what it learns, and what it predicts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fluid.errors import InvalidFieldError
from fluid.measure.cohorts.tree import MARGIN, MOST_TRIALS, CohortTree, ConfigTexts
from fluid.resources import MemoryNeed


def config_of(**values: Any) -> ConfigTexts:
    return tuple((name, value if isinstance(value, str) else repr(value)) for name, value in values.items())


def two_sizes(trials: int = 40, seed: int = 0) -> CohortTree:
    """Small trials of 1 s and 1 GB, large ones of 8 s and 4 GB, with learning rates that change nothing."""
    random, tree = np.random.default_rng(seed), CohortTree()
    for number in range(trials):
        size, seconds, need = (32, 1.0, MemoryNeed(8e8, 2e8)) if number % 2 else (256, 8.0, MemoryNeed(3e9, 1e9))
        config = config_of(batch_size=size, lr=float(random.uniform()))
        tree.learn(f"t{number}", config, seconds=seconds * float(np.exp(0.05 * random.standard_normal())), need=need)
    return tree


def test_nothing_is_predicted_of_no_trials() -> None:
    tree = CohortTree()
    prediction = tree.predict(config_of(batch_size=32))
    assert (prediction.cohort, prediction.seconds, prediction.need, prediction.typical_bytes) == ("", None, None, None)
    assert tree.cohorts == []


def test_trials_are_parted_where_their_seconds_and_bytes_differ() -> None:
    tree = two_sizes()
    assert [each.conditions for each in tree.cohorts] == ["batch_size <= 91", "batch_size > 91"]
    assert [each.trials for each in tree.cohorts] == [20, 20]
    large = tree.predict(config_of(batch_size=256, lr=0.3))
    assert large.cohort == "batch_size > 91"
    assert large.seconds == pytest.approx(8.0, rel=0.1)
    assert large.need is not None and large.need.peak_bytes == pytest.approx(4e9 * MARGIN)
    assert tree.need_of("batch_size <= 91") == MemoryNeed(8e8, 2e8)
    assert len(tree.seconds_of("batch_size > 91")) == 20
    assert tree.seconds_of("batch_size > 7") == []


def test_a_config_that_a_split_cannot_decide_has_the_estimate_of_all() -> None:
    tree = two_sizes()
    unknown = tree.predict(config_of(lr=0.3))
    assert unknown.cohort == "" and unknown.seconds is not None and unknown.need is not None
    assert unknown.sigma > 1.0
    assert unknown.need.peak_bytes >= 4e9


def test_the_newest_trials_are_kept() -> None:
    tree = two_sizes(2 * MOST_TRIALS)
    assert sum(each.trials for each in tree.cohorts) == MOST_TRIALS


def test_trials_without_what_parts_the_others_take_their_places_and_no_more() -> None:
    tree = two_sizes(MOST_TRIALS)
    for number in range(3 * MOST_TRIALS):
        seconds = (1.0, 8.0)[number % 2]  # As unlike as the others: what parts those goes on to pay.
        tree.learn(f"n{number}", config_of(depth=5), seconds=seconds, need=MemoryNeed(1e9, 1e8))
    assert len(tree) == MOST_TRIALS
    small, large = tree.predict(config_of(batch_size=32)), tree.predict(config_of(batch_size=256))
    assert small.seconds == pytest.approx(1.0, rel=0.1) and large.seconds == pytest.approx(8.0, rel=0.1)


def test_a_tree_is_the_same_after_it_was_saved() -> None:
    tree = two_sizes()
    loaded = CohortTree.from_json("cohorts['Net']", json.loads(json.dumps(tree.to_json())))
    assert loaded.cohorts == tree.cohorts
    assert loaded.to_json() == tree.to_json()
    for size in (16, 64, 128, 1024):
        assert loaded.predict(config_of(batch_size=size)) == tree.predict(config_of(batch_size=size))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), "2"])
def test_seconds_that_cannot_be_are_refused(seconds: Any) -> None:
    with pytest.raises(InvalidFieldError, match="seconds"):
        CohortTree().learn("t", (), seconds=seconds)


def test_a_trial_that_is_learnt_again_counts_once() -> None:
    tree = CohortTree()
    for seconds in (5.0, 2.0, 1.0):
        tree.learn("t", config_of(lr=0.1), seconds=seconds)
    tree.learn("t", config_of(lr=0.1), need=MemoryNeed(1.0, 2.0))
    (cohort,) = tree.cohorts
    assert (cohort.trials, cohort.seconds, cohort.peak_bytes) == (1, 1.0, 3.0)
    tree.learn("t", config_of(lr=0.1), need=MemoryNeed(0.5, 1.0))
    assert tree.need_of("") == MemoryNeed(0.5, 1.0)
    assert not tree.learn("u", config_of(lr=0.1))
    assert len(tree.seconds_of("")) == 1


def test_news_are_told_while_there_are_some() -> None:
    """Trials are predicted anew when cohorts or predictions change, which steady figures do no longer."""
    tree = CohortTree()
    assert tree.learn("first", config_of(lr=0.5), seconds=1.0)
    told = sum(tree.learn(f"t{number}", config_of(lr=1 / (number + 2)), seconds=1.0) for number in range(100))
    assert told == 0
    assert any(tree.learn(f"u{number}", config_of(lr=number), seconds=2.0) for number in range(200))


def test_a_need_above_what_is_reserved_is_told_at_once() -> None:
    tree = CohortTree()
    for number in range(50):
        tree.learn(f"t{number}", config_of(lr=number), seconds=1.0, need=MemoryNeed(1e9, 1e8))
    assert not tree.learn("equal", config_of(lr=0.3), seconds=1.0, need=MemoryNeed(1e9, 1e8))
    assert tree.learn("larger", config_of(lr=0.4), seconds=1.0, need=MemoryNeed(2e9, 1e8))
    need = tree.predict(config_of(lr=0.9)).need
    assert need is not None and need.persistent_bytes == pytest.approx(MARGIN * 2e9)


def test_cohorts_keep_their_words_while_trials_come_in() -> None:
    """They are profile keys: thresholds stay though further values appear between those that were known."""
    random, tree = np.random.default_rng(7), two_sizes()
    before = [each.conditions for each in tree.cohorts]
    for number in range(100):
        size = int(random.choice([32, 80, 100, 256]))
        seconds = (1.0 if size <= 91 else 8.0) * float(np.exp(0.05 * random.standard_normal()))
        config = config_of(batch_size=size, lr=float(random.uniform()))
        tree.learn(f"n{number}", config, seconds=seconds, need=MemoryNeed(1e9 if size <= 91 else 4e9))
    assert [each.conditions for each in tree.cohorts] == before


def test_cohorts_whose_trials_have_become_alike_are_merged() -> None:
    tree = two_sizes()
    for number in range(2 * MOST_TRIALS):
        config = config_of(batch_size=32 if number % 2 else 256, lr=0.5)
        tree.learn(f"n{number}", config, seconds=2.0 + 0.1 * (number % 3), need=MemoryNeed(1e9, 1e8))
    assert [each.conditions for each in tree.cohorts] == [""]


@pytest.mark.parametrize("seed", range(4))
def test_cohorts_part_the_trials(seed: int) -> None:
    """Each trial is in one leaf, and the leaf that its config predicts; large differences are found in any order."""
    random = np.random.default_rng(seed)
    drawn = [(int(random.choice([16, 64, 256])), str(random.choice(["sgd", "adam"]))) for _ in range(90)]
    tree = CohortTree()
    for number in random.permutation(90).tolist():
        size, name = drawn[number]
        need = MemoryNeed(size * 1e7 * (3 if name == "adam" else 1), 1e6)
        seconds = size**2 * float(np.exp(0.05 * random.standard_normal()))
        tree.learn(f"t{number}", config_of(batch_size=size, optimizer=name), seconds=seconds, need=need)
    assert sum(each.trials for each in tree.cohorts) == 90
    assert len(tree.cohorts) == len({each.conditions for each in tree.cohorts}) >= 3
    for each in tree.cohorts:
        assert each.trials == len(tree.seconds_of(each.conditions))
    for size, name in drawn:
        said = tree.predict(config_of(batch_size=size, optimizer=name))
        assert size**2 in [pytest.approx(value, rel=0.3) for value in tree.seconds_of(said.cohort)]


def changed(place: list[Any], value: Any) -> Any:
    """A saved tree with another value at a place; ``...`` leaves it out."""
    data = json.loads(json.dumps(two_sizes().to_json()))
    inner = data
    for step in place[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return data


@pytest.mark.parametrize(
    ("place", "value", "field"),
    [
        (["tree"], ..., "cohorts.tree"),
        (["trials"], {}, "cohorts.trials"),
        (["trials"], [{}] * (MOST_TRIALS + 1), "cohorts.trials"),
        (["trials", 3, "id"], 7, "cohorts.trials[3].id"),
        (["trials", 3, "id"], "t2", "cohorts.trials[3].id"),
        (["trials", 3, "id"], ..., "cohorts.trials[3].id"),
        (["trials", 3, "config"], [], "cohorts.trials[3].config"),
        (["trials", 3, "config", "lr"], 0.5, "cohorts.trials[3].config['lr']"),
        (["trials", 3, "seconds"], 0.0, "cohorts.trials[3].seconds"),
        (["trials", 3, "seconds"], "1", "cohorts.trials[3].seconds"),
        (["trials", 3, "bytes"], [1.0], "cohorts.trials[3].bytes"),
        (["trials", 3, "bytes", 1], -1.0, "cohorts.trials[3].bytes[1]"),
        (["until_search"], 0, "cohorts.until_search"),
        (["until_search"], ..., "cohorts.until_search"),
        (["tree", "feature"], 3, "cohorts.tree.feature"),
        (["tree", "at"], "96", "cohorts.tree.at"),
        (["tree", "at"], ..., "cohorts.tree.names"),
        (["tree", "sides"], [], "cohorts.tree.sides"),
        (["tree", "sides"], ..., "cohorts.tree.searched"),
        (["tree", "sides", 1, "searched"], -1, "cohorts.tree.sides[1].searched"),
        (["tree", "sides", 1, "searched"], True, "cohorts.tree.sides[1].searched"),
        (["tree", "sides", 1], {"sides": [{}, {}], "feature": "lr", "names": [["a"], ["a"]]}, "cohorts.tree.sides[1]"),
    ],
)
def test_a_file_that_cannot_be_is_refused_with_the_place_in_it(place: list[Any], value: Any, field: str) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        CohortTree.from_json("cohorts", changed(place, value))
    assert raised.value.field.startswith(field)


def test_a_saved_tree_without_end_is_refused() -> None:
    data: dict[str, Any] = {"searched": 0}
    for at in range(20):
        data = {"feature": "x", "at": float(at), "sides": [data, {"searched": 0}]}
    with pytest.raises(InvalidFieldError, match="too many splits"):
        CohortTree.from_json("cohorts", {"trials": [], "until_search": 1, "tree": data})


def test_a_loaded_tree_goes_on_as_the_one_that_was_saved() -> None:
    """The same trials make the same cohorts and predictions from then on, names and values unknown to some included."""
    random, tree = np.random.default_rng(8), CohortTree()
    loaded = tree
    for number in range(160):
        if number == 70:
            loaded = CohortTree.from_json("cohorts", json.loads(json.dumps(tree.to_json())))
        size, name = int(random.choice([16, 64, 256])), str(random.choice(["sgd", "adam", "lamb"]))
        config = config_of(batch_size=size, lr=float(random.uniform()))
        config += config_of(optimizer=name) if random.uniform() < 0.8 else ()
        seconds = size * (2.0 if name == "adam" else 1.0) * float(np.exp(0.1 * random.standard_normal()))
        need = MemoryNeed(1e6 * size, 1e5) if number % 3 else None
        for each in {id(tree): tree, id(loaded): loaded}.values():
            each.learn(f"t{number}", config, seconds=seconds, need=need)
    assert loaded is not tree
    assert loaded.cohorts == tree.cohorts and len(tree.cohorts) > 2
    for size in (16, 100, 512):
        config = config_of(batch_size=size, lr=0.3, optimizer="adam")
        assert tree.predict(config) == loaded.predict(config)
    assert tree.to_json() == loaded.to_json()


def test_what_is_known_of_large_trials_outlives_many_small_ones() -> None:
    tree = CohortTree()
    sizes = [256] * 40 + [32] * 1500  # as the longest start first
    for number, size in enumerate(sizes):
        tree.learn(f"trial-{number}", (("batch_size", str(size)),), seconds=size / 32.0)
    assert [(each.conditions, each.seconds) for each in tree.cohorts] == [
        ("batch_size <= 91", 1.0),
        ("batch_size > 91", 8.0),
    ]
    assert sum(each.trials for each in tree.cohorts) == 200
    assert tree.predict((("batch_size", "256"),)).seconds == pytest.approx(8.0)
