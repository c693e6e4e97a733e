"""Tests of fluid.trialgroup."""

from __future__ import annotations

import io
import math
import threading
from collections import OrderedDict
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from fluid.errors import InvalidFieldError
from fluid.resources import MemoryNeed
from fluid.trialgroup import Search, Shown, Trial, TrialGroup


def train(config: dict[str, Any]) -> None:
    """A trainable."""


class Net:
    """A trainable."""

    def step(self) -> dict[str, float]:
        """Never called."""
        return {}


def ids(group: TrialGroup) -> list[str]:
    return [trial.id for trial in group]


# --- Trial


def test_a_trial_needs_no_more_than_a_trainable() -> None:
    trial = Trial(train)
    assert (trial.budget, trial.priority, dict(trial.config)) == (1, 1.0, {})
    assert trial.max_width is trial.memory is trial.profile_key is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("budget", value) for value in (0, -1, -27, 2.5, math.nan, math.inf, -math.inf, True, "27", None, 10**400)),
        *(("priority", value) for value in (-0.1, math.nan, math.inf, True, "high", None)),
        *(("max_width", value) for value in (0, -1, 0.5, 1.5, math.nan, math.inf, True, "2")),
        *(("config", value) for value in (None, [("lr", 0.1)], "lr=0.1", 5, {"lr"})),
        *(("trial_id", value) for value in ("", 5, 0, ["a"], b"a")),
        *(("profile_key", value) for value in (5, ["a"], "")),
        *(("memory", value) for value in (5, 1e9, "1GB", {"persistent_bytes": 1})),
        *(("retry_errors", value) for value in (None, 1, "no")),
        *(("shown", value) for value in ("a", {"trial_id": "a"})),
    ],
)
def test_a_bad_field_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Trial(train, **{field: value})
    assert caught.value.field == field
    assert repr(value) in str(caught.value)


def test_numpy_scalars_are_numbers() -> None:
    trial = Trial(train, budget=np.int64(27), priority=np.float32(2.0), max_width=np.uint8(4))  # type: ignore[arg-type]
    assert (trial.budget, trial.priority, trial.max_width) == (27, 2.0, 4)
    assert [type(value) for value in (trial.budget, trial.priority, trial.max_width)] == [int, float, int]
    assert Trial(train, budget=27.0).budget == 27  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [{}, {"lr": 0.1}, OrderedDict(lr=0.1), MappingProxyType({"lr": 0.1})])
def test_any_mapping_is_a_config(config: Any) -> None:
    assert Trial(train, config).config == config


def test_a_zero_priority_and_a_width_of_one_are_fine() -> None:
    trial = Trial(train, priority=0, max_width=1)
    assert (trial.priority, trial.max_width) == (0.0, 1)


def test_ids_are_made_up_and_differ() -> None:
    made = {Trial(train).id for _ in range(100)}
    assert len(made) == 100
    assert all(isinstance(trial_id, str) and trial_id for trial_id in made)
    assert Trial(train, trial_id="mine").id == "mine"


def test_the_profile_key_is_the_trainable_unless_given() -> None:
    assert Trial(train).key == "train"
    assert Trial(Net).key == "Net"
    assert Trial(Net()).key == "Net", "an instance counts as its class"
    assert Trial(Net, profile_key="alexnet").key == "alexnet"
    assert Trial(lambda config: None).key == Trial(lambda config: None).key


def test_a_trial_cannot_be_changed() -> None:
    trial = Trial(train, budget=3)
    with pytest.raises(FrozenInstanceError):
        trial.budget = 4  # type: ignore[misc]


def test_two_trials_of_one_configuration_are_two_trials() -> None:
    one, other = (Trial(train, {"lr": 0.1}, trial_id="a") for _ in range(2))
    assert one != other
    assert len({one, other}) == 2


@pytest.mark.parametrize("trainable", [None, 5, "resnet", {"lr": 0.1}, object()])
def test_a_trainable_that_is_none_is_refused(trainable: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Trial(trainable, {})
    assert (caught.value.field, caught.value.value) == ("trainable", trainable)


HALF = "half \ud800"


@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("trial_id", lambda: Trial(train, trial_id=HALF)),
        ("profile_key", lambda: Trial(train, profile_key=HALF)),
        ("config", lambda: Trial(train, {HALF: 1})),
        ("config", lambda: Trial(train, {"model": {"layers": {HALF: 1}}})),
        ("trial_id", lambda: Shown(HALF)),
        ("config", lambda: Shown("a", {HALF: 1})),
        ("metric", lambda: Search(HALF)),
        ("name", lambda: TrialGroup(name=HALF)),
    ],
)
def test_text_that_no_file_can_hold_is_refused(field: str, make: Any) -> None:
    with pytest.raises(InvalidFieldError, match="lone surrogate") as caught:
        make()
    assert caught.value.field == field
    str(caught.value).encode("utf-8")


def test_text_of_any_script_is_fine() -> None:
    group = TrialGroup([Trial(train, {"größe": {"\N{GRINNING FACE}": 1, 5: 2}}, trial_id="ä")], name="")
    assert group["ä"].config["größe"] == {"\N{GRINNING FACE}": 1, 5: 2} and group.name == ""


# --- What reports are told


@pytest.mark.parametrize(
    ("field", "value"),
    [("trial_id", ""), ("trial_id", 5), ("config", None), ("iterations", -1), ("iterations", 0.5), ("metrics", 5)],
)
def test_what_is_shown_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Shown(**{"trial_id": "a", field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize(("field", "value"), [("metric", 5), ("mode", "least"), ("trials", 0), ("trials", "all")])
def test_a_search_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Search(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize(
    ("besides", "entry"),
    [
        (5, "besides=5"),
        ("cost", "besides='cost'"),
        (["cost"], r"besides\[0\]='cost'"),
        ([("cost", "min"), ("cost", "min", "max")], r"besides\[1\]=\('cost', 'min', 'max'\)"),
        ([("cost", "least")], r"besides\[0\]='least'"),
        ([(5, "min")], r"besides\[0\]=5"),
    ],
)
def test_further_metrics_of_a_search_are_refused_by_their_entry(besides: Any, entry: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"^{entry}: must be"):
        Search("loss", besides=besides)


def test_further_metrics_of_a_search_may_be_a_list() -> None:
    listed = Search("loss", besides=[["cost", "min"]])  # type: ignore[arg-type]
    assert listed == Search("loss", besides=(("cost", "min"),)) and hash(listed)


def test_a_group_knows_its_search() -> None:
    search = Search("loss", "min", 8)
    assert TrialGroup(search=search).search is search
    assert TrialGroup().search is None
    with pytest.raises(InvalidFieldError, match="search='loss'"):
        TrialGroup(search="loss")  # type: ignore[arg-type]


# --- TrialGroup


def test_a_group_keeps_the_order_of_its_trials() -> None:
    group = TrialGroup([Trial(train, trial_id=name) for name in "bca"], name="rung-0")
    assert group.name == "rung-0"
    assert len(group) == 3
    assert ids(group) == ["b", "c", "a"]
    assert "a" in group
    assert "z" not in group
    assert group["c"].id == "c"
    assert "rung-0" in repr(group)


def test_a_group_may_begin_empty_and_gets_a_name() -> None:
    one, other = TrialGroup(), TrialGroup()
    assert len(one) == 0
    assert list(one) == one.active == []
    assert one.name != other.name


@pytest.mark.parametrize("trials", [Trial(train, trial_id="a"), 5, None, "ab"])
def test_what_is_no_row_of_trials_is_refused(trials: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"TrialGroup\(\[trial\]\)") as caught:
        TrialGroup(trials)
    assert (caught.value.field, caught.value.value) == ("trials", trials)


@pytest.mark.parametrize("wrong", [[5], [None], ["a"], {"a": 1}])
def test_a_row_of_what_are_no_trials_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidFieldError, match="must be a Trial"):
        TrialGroup(wrong)


def test_two_trials_of_one_id_are_refused() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        TrialGroup([Trial(train, trial_id="a"), Trial(Net, trial_id="a")], name="rung-0")
    assert caught.value.field == "trial_id"
    assert caught.value.value == "a"
    assert "rung-0" in str(caught.value)


def test_adding_a_known_id_changes_nothing() -> None:
    first = Trial(train, trial_id="a")
    group = TrialGroup([first])
    with pytest.raises(InvalidFieldError):
        group.add(Trial(Net, trial_id="a"))
    assert group["a"] is first
    assert len(group) == 1


@pytest.mark.parametrize("wrong", ["a", None, 3, {"trainable": train}, train])
def test_what_is_no_trial_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        TrialGroup().add(wrong)
    assert (caught.value.field, caught.value.value) == ("trial", wrong)


@pytest.mark.parametrize("method", ["stop", "remove", "is_stopped", "__getitem__", "extend"])
def test_an_unknown_id_is_refused_and_named(method: str) -> None:
    group = TrialGroup([Trial(train, trial_id="a")], name="rung-0")
    arguments = ("z", 1) if method == "extend" else ("z",)
    with pytest.raises(InvalidFieldError, match="rung-0") as caught:
        getattr(group, method)(*arguments)
    assert (caught.value.field, caught.value.value) == ("trial_id", "z")
    assert ids(group) == ["a"]


def test_extending_adds_iterations_and_leaves_the_first_trial_as_it_was() -> None:
    trial = Trial(
        train, {"lr": 0.1}, budget=3, trial_id="a", priority=2.0, max_width=2, memory=MemoryNeed(5), retry_errors=False
    )
    group = TrialGroup([trial])
    extended = group.extend("a", 6)
    assert group["a"] is extended
    assert extended.budget == 9
    assert trial.budget == 3
    assert (extended.id, extended.config, extended.priority) == ("a", {"lr": 0.1}, 2.0)
    assert (extended.max_width, extended.memory, extended.retry_errors) == (2, MemoryNeed(5), False)
    assert group.extend("a", np.int32(1)).budget == 10  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", [0, -1, 1.5, math.nan, math.inf, True, "3", None, 10**400])
def test_extending_by_a_bad_budget_is_refused_and_changes_nothing(budget: Any) -> None:
    group = TrialGroup([Trial(train, budget=3, trial_id="a")])
    with pytest.raises(InvalidFieldError) as caught:
        group.extend("a", budget)
    assert caught.value.field == "budget"
    assert group["a"].budget == 3


def test_a_stopped_trial_stays_but_is_not_active() -> None:
    group = TrialGroup([Trial(train, trial_id=name) for name in "abc"])
    group.stop("b")
    group.stop("b")
    assert ids(group) == ["a", "b", "c"]
    assert [trial.id for trial in group.active] == ["a", "c"]
    assert [group.is_stopped(name) for name in "abc"] == [False, True, False]


def test_a_stopped_trial_cannot_be_extended() -> None:
    group = TrialGroup([Trial(train, budget=3, trial_id="a")])
    group.stop("a")
    with pytest.raises(InvalidFieldError, match="stopped") as caught:
        group.extend("a", 1)
    assert (caught.value.field, caught.value.value) == ("trial_id", "a")
    assert group["a"].budget == 3


def test_an_id_is_free_again_once_its_trial_was_removed() -> None:
    group = TrialGroup([Trial(train, trial_id="a")])
    group.stop("a")
    removed = group.remove("a")
    assert removed.id == "a"
    assert "a" not in group
    group.add(Trial(Net, trial_id="a"))
    assert not group.is_stopped("a"), "the newcomer has nothing to do with the one that was stopped"
    assert group.extend("a", 2).budget == 3


def test_a_group_can_change_while_it_is_iterated_over() -> None:
    group = TrialGroup([Trial(train, trial_id=name) for name in "abc"])
    for trial in group:
        group.remove(trial.id)
        group.add(Trial(train, trial_id=f"{trial.id}-again"))
    assert ids(group) == ["a-again", "b-again", "c-again"]


@given(budgets=st.lists(st.integers(1, 1000), min_size=1))
def test_extensions_add_up(budgets: list[int]) -> None:
    group = TrialGroup([Trial(train, budget=budgets[0], trial_id="a")])
    for budget in budgets[1:]:
        group.extend("a", budget)
    assert group["a"].budget == sum(budgets)


class GroupMachine(RuleBasedStateMachine):
    """Adding, extending, stopping and removing in any order, against two plain dictionaries."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.group = TrialGroup()
        self.budgets: dict[str, int] = {}
        self.stopped: set[str] = set()

    @rule(target=names, name=st.text("abc", min_size=1, max_size=2), budget=st.integers(1, 9))
    def add(self, name: str, budget: int) -> str:
        trial = Trial(train, trial_id=name, budget=budget)
        if name in self.budgets:
            with pytest.raises(InvalidFieldError):
                self.group.add(trial)
        else:
            assert self.group.add(trial) is trial
            self.budgets[name] = budget
        return name

    @rule(name=names, budget=st.integers(1, 9))
    def extend(self, name: str, budget: int) -> None:
        if name in self.budgets and name not in self.stopped:
            self.group.extend(name, budget)
            self.budgets[name] += budget
        else:
            with pytest.raises(InvalidFieldError):
                self.group.extend(name, budget)

    @rule(name=names)
    def stop(self, name: str) -> None:
        if name in self.budgets:
            self.group.stop(name)
            self.stopped.add(name)
        else:
            with pytest.raises(InvalidFieldError):
                self.group.stop(name)

    @rule(name=consumes(names))
    def remove(self, name: str) -> None:
        if name in self.budgets:
            assert self.group.remove(name).budget == self.budgets.pop(name)
            self.stopped.discard(name)
        else:
            with pytest.raises(InvalidFieldError):
                self.group.remove(name)

    @invariant()
    def agrees(self) -> None:
        assert {trial.id: trial.budget for trial in self.group} == self.budgets
        assert ids(self.group) == list(self.budgets)
        assert [trial.id for trial in self.group.active] == [n for n in self.budgets if n not in self.stopped]
        assert len(self.group) == len(self.budgets)


TestGroupMachine = GroupMachine.TestCase


@pytest.mark.parametrize("timeout", ["auto", None, 1, 0.5])
def test_the_limit_of_an_iteration(timeout: Any) -> None:
    assert Trial(print, iteration_timeout_s=timeout).iteration_timeout_s == timeout


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "never", True, [1]])
def test_a_limit_that_cannot_be_is_refused(timeout: Any) -> None:
    with pytest.raises(InvalidFieldError, match=r"iteration_timeout_s=.*must be a number of seconds above 0"):
        Trial(print, iteration_timeout_s=timeout)


@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), (1, 1), (4.0, 4), (0.5, 0.5), (1 / 3, 1 / 3), (np.float32(2.0), 2)]
)
def test_the_devices_of_a_trial_are_none_a_whole_number_or_a_fraction(given: Any, kept: Any) -> None:
    assert Trial(print, devices=given).devices == kept


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("devices", value) for value in (0, -1, 1.5, math.nan, True, "2", 10**9)),
        *(("threads", value) for value in (0, -1, 1.5, "2", True)),
        *(("requires", value) for value in ("A100", {"kind": "gpu"}, 3)),
    ],
)
def test_a_bad_request_for_devices_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Trial(print, **{field: value})
    assert caught.value.field == field


# --- configs


class Layer:
    """A value of the user's own class."""

    def __init__(self) -> None:
        self.sizes = [1]


def test_a_trial_has_its_own_config() -> None:
    layer, rows = Layer(), np.zeros(3)
    given: dict[str, Any] = {"lr": 0.1, "deep": {"a": [1, {"b": (2, [3])}]}, "layer": layer, "rows": rows, "set": {1}}
    trial, shown = Trial(train, given), Shown("a", given)
    given["lr"], rows[0] = 9.0, 9.0
    given["deep"]["a"][1]["b"][1].append(9)
    given["set"].add(9)
    layer.sizes.append(9)
    for config in (trial.config, shown.config):
        assert config["lr"] == 0.1 and config["rows"][0] == 0.0 and config["set"] == {1}
        assert config["deep"] == {"a": [1, {"b": (2, [3])}]}
        assert config["layer"].sizes == [1]


def test_what_values_of_a_config_share_stays_shared() -> None:
    layer = Layer()
    config = Trial(train, {"layer": layer, "again": [layer, layer.sizes]}).config
    assert config["layer"] is config["again"][0] is not layer
    assert config["layer"].sizes is config["again"][1]


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise SystemExit("no copies")


@pytest.mark.parametrize(
    "value",
    [
        threading.Lock(),
        (number for number in range(3)),
        math,
        MappingProxyType({"a": 1}),
        Uncopied(),
        [threading.Lock()],
        threading.current_thread(),
    ],
)
def test_what_cannot_be_copied_is_shared_and_the_rest_copied(value: Any) -> None:
    deep = {"a": [1]}
    config = Trial(train, {"value": value, "deep": deep, "pair": (deep, [value])}).config
    deep["a"].append(2)
    assert config["deep"] == {"a": [1]} == config["pair"][0]
    found = config["value"][0] if isinstance(value, list) else config["value"]
    assert found is (value[0] if isinstance(value, list) else value)


def test_any_mapping_is_a_dict_of_its_own() -> None:
    given = OrderedDict(a=1)
    trial = Trial(train, MappingProxyType(given))
    given["a"] = 2
    assert trial.config == {"a": 1} and type(trial.config) is dict


def test_deep_but_finite_configs_are_as_they_were() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert Trial(train, {"deep": deep}).config["deep"] is not None
    wide: list[Any] = [1]
    for _ in range(40):
        wide = [wide, wide, wide]  # 3**40 places, of 41 lists.
    config = Trial(train, {"wide": wide}).config
    assert config["wide"][0] is config["wide"][2]


def cyclic_dict() -> tuple[dict[str, Any], str]:
    config: dict[str, Any] = {"a": 1}
    config["me"] = config
    return config, "config['me']"


def cyclic_list() -> tuple[dict[str, Any], str]:
    x: list[Any] = []
    x.extend([x, x, x])
    return {"a": 1, "x": x}, "config['x'][0]"


def long_cycle() -> tuple[dict[str, Any], str]:
    config: dict[str, Any] = {"a": {"b": [0, ({},)]}}
    config["a"]["b"][1][0]["c"] = config["a"]
    return config, "config['a']['b'][1][0]['c']"


def wide_cycle() -> tuple[dict[str, Any], str]:
    layers: list[list[Any]] = [[] for _ in range(30)]
    for layer, inner in zip(layers, [*layers[1:], layers[0]], strict=True):
        layer.extend([inner, inner, inner])
    return {"x": layers[0]}, "config['x']" + "[0]" * 30


@pytest.mark.parametrize("make", [cyclic_dict, cyclic_list, long_cycle, wide_cycle])
@pytest.mark.parametrize("field", ["config", "shown"])
def test_a_config_that_holds_itself_is_refused_by_its_entry(make: Any, field: str) -> None:
    config, entry = make()
    with pytest.raises(InvalidFieldError) as caught:
        _ = Trial(train, config) if field == "config" else Shown("a", config)
    assert caught.value.field == entry
    assert "holds itself" in caught.value.reason


def test_an_extended_trial_keeps_its_config() -> None:
    group = TrialGroup([Trial(train, {"layers": [1]}, trial_id="a")])
    config = group["a"].config
    assert group.extend("a", 2).config is config
    assert group.show("a", {"lr": 1}).config is config
    assert group["a"].budget == 3 and group["a"].shown == Shown("a", {"lr": 1})


@pytest.mark.parametrize("mode", ["r", "w", "rb"])
def test_a_config_with_an_open_file_is_refused_by_its_entry(mode: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with (tmp_path / "data").open(mode) as file, pytest.raises(InvalidFieldError, match="give its path") as caught:
        Trial(train, {"lr": 0.1, "in": [{"data": file}]})
    assert caught.value.field == "config['in'][0]['data']"
    assert Trial(train, {"text": io.StringIO("x")}).config["text"].getvalue() == "x"


def test_a_trial_of_checked_fields_is_like_a_new_one() -> None:
    known: dict[str, Any] = {
        "trainable": print,
        "config": {"x": 1},
        "budget": 3,
        "trial_id": "a",
        "threads": 2,
        "shown": None,
    }
    made, new = Trial.of_checked(known), Trial(**known)
    names = [item.name for item in fields(Trial)]
    assert [getattr(made, name) for name in names] == [getattr(new, name) for name in names]
    with pytest.raises(AttributeError):
        Trial.of_checked({**known, "budgets": 3})
