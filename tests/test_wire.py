"""Frames as data: all that passes comes back as it was, and what is no frame of those expected is refused by name."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import lane_messages as to
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluid.backends.ray.remote_host import FromHost, ToHost
from fluid.elastic.messages import ForMember, OfMember, WriteCheckpoint
from fluid.engine.events import (
    Checkpoint,
    Failure,
    IterationDone,
    PausePurpose,
    TrialFailed,
    TrialPaused,
    TrialReleased,
    TrialSaved,
)
from fluid.lane.protocol import CleanUpBegun, FromLane, LaneWarming, ToLane
from fluid.resources import MemoryNeed
from fluid.trainables.encoded_metrics import NO_METRICS, EncodedMetrics, IterationRun, encode_metrics
from fluid.wire import VERSION, Frame, decoder, encode, version_problem

UNIONS = {
    "ToLane": ToLane,
    "FromLane": FromLane,
    "ToHost": ToHost,
    "FromHost": FromHost,
    "ForMember": ForMember,
    "OfMember": OfMember,
}
CASES = [
    pytest.param(union, kind, id=f"{name}-{kind.__name__}")
    for name, union in UNIONS.items()
    for kind in get_args(union)
]

# -- what comes back -------------------------------------------------------------------------------------------------

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    type(None): st.none(),
    MemoryNeed: st.builds(MemoryNeed, *[st.integers(0, 1 << 50).map(float)] * 2),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, as a frame has them."""
    if kind in PLAIN:
        return PLAIN[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin in (dict, Mapping):
        return st.dictionaries(*map(values, arguments), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    hints = get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else hints
    return st.builds(kind, **{name: values(hints[name]) for name in names})


@pytest.mark.parametrize(("union", "kind"), CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_every_frame_comes_back_as_it_was(union: Any, kind: type[Frame], data: st.DataObject) -> None:
    frames = data.draw(st.lists(values(kind), min_size=1, max_size=2))
    assert decoder(union)(encode(frames)) == frames


def test_frames_of_many_kinds_share_a_batch_in_order() -> None:
    batch = [to.run("a", 3), to.pause("a"), to.shut_down(), to.run("a", 3)]
    assert decoder(ToLane)(encode(batch)) == batch
    assert decoder(ToLane)(encode(())) == []


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS)
def test_frames_are_told_apart_by_name(union: Any) -> None:
    names = [kind.__name__ for kind in get_args(union)]
    assert len(set(names)) == len(names) and all(issubclass(kind, Frame) for kind in get_args(union))


def done(**facts: Any) -> IterationDone:
    return IterationDone(1.0, "a", 0, iteration=3, seconds=0.5, **facts)


def there_and_back(event: Any) -> Any:
    (back,) = decoder(FromLane)(encode([event]))
    return back


def test_no_metrics_stay_the_same_object() -> None:
    assert there_and_back(done()).metrics is NO_METRICS
    assert there_and_back(done(metrics=NO_METRICS)).metrics is NO_METRICS
    assert there_and_back(done(metrics=encode_metrics({}))).metrics == NO_METRICS


def test_what_is_infinite_or_no_number_is_so_there() -> None:
    metrics = encode_metrics({"loss": math.nan, "most": math.inf})
    run = IterationRun((0.5, -math.inf), (0.1, math.inf), (metrics, NO_METRICS))
    back = there_and_back(done(metrics=metrics, busy=-math.inf, run=run))
    assert math.isnan(back.metrics.numbers["loss"]) and back.metrics.numbers["most"] == math.inf
    assert (back.busy, back.run.at, back.run.seconds) == (-math.inf, run.at, run.seconds)
    assert isinstance(back.metrics, EncodedMetrics) and math.isnan(back.metrics.decode()["loss"])


def test_whole_numbers_are_taken_for_others() -> None:
    assert (
        decoder(FromLane)(encode([{"what": "LaneMeasured", "at": 1, "lane_id": 0, "own_bytes": 7}]))[0].own_bytes == 7.0
    )


def test_half_a_character_comes_back_as_it_was() -> None:
    """The name of a folder may be no text: ``os.fsdecode`` makes half a character of each byte that is none."""
    path, pickled = "/runs/caf\udce9/\ud800\\ß\n\U0001f600", b"\x80\xff\x00"
    batch = [
        TrialSaved(1.0, "ä", 0, Checkpoint(2, path)),
        TrialFailed(2.0, "a", 0, Failure("error", "\ud800", exception=pickled)),
        done(metrics=EncodedMetrics("{}", {"\udfff": math.inf})),
    ]
    assert decoder(FromLane)(encode(batch)) == batch
    assert decoder(Any)(memoryview(encode(["\ud800", 1]))) == ["\ud800", 1]
    with pytest.raises(msgspec.ValidationError, match=r"Expected `float`, got `str` - at `\$\[0\]\.at`"):
        decoder(FromLane)(encode([{**PAUSED, "at": "x", "trial_id": "\ud800"}]))
    with pytest.raises(ValueError, match="latin-1"):
        decoder(FromLane)(b"\xc1" + encode([{**PAUSED, "trial_id": "\u2603"}]))


class Name(str):
    """A text of the user's own class."""

    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


def test_values_of_other_classes_become_plain_ones() -> None:
    assert decoder(ToLane)(encode([to.run(Name("a"), np.int64(3))])) == [to.run("a", 3)]
    assert decoder(ToLane)(encode([to.limit(np.str_("a"), np.float32(0.5))])) == [to.limit("a", 0.5)]
    assert decoder(ForMember)(encode([WriteCheckpoint(Path("/x"))])) == [WriteCheckpoint("/x")]  # type: ignore[arg-type]
    (name,) = there_and_back(done(metrics=EncodedMetrics("{}", {Name("x"): np.float64(2.0)}))).metrics.numbers
    assert (name, type(name)) == ("x", str)
    (back,) = decoder(ToLane)(encode([to.run(Name("\ud800"), 3)]))
    assert back == to.run("\ud800", 3)


def test_a_count_above_all_numbers_is_the_largest_one() -> None:
    assert decoder(ToLane)(encode([to.run("a", 10**30)])) == [to.run("a", (1 << 63) - 1)]


@pytest.mark.parametrize(
    "value", [object(), iter([1]), 1j, lambda: None], ids=["object", "iterator", "complex", "function"]
)
def test_what_no_data_can_hold_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(value).__qualname__} is no data"):
        encode([CleanUpBegun(value)])


# -- what is refused ---------------------------------------------------------------------------------------------------

PAUSED = {"what": "TrialPaused", "at": 1.0, "trial_id": "a", "lane_id": 0, "iteration": 3, "purpose": "PREEMPT"}
SAVED = {"what": "TrialSaved", "at": 1.0, "trial_id": "a", "lane_id": 0, "checkpoint": {"iteration": 3, "path": "/x"}}


def without(message: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != name}


REFUSED: dict[str, tuple[Any, str]] = {
    "no batch": (PAUSED, r"Expected `array`, got `object`"),
    "no frame": ([3], r"Expected `object`, got `int` - at `\$\[0\]`"),
    "a text for a time": ([{**PAUSED, "at": "x"}], r"Expected `float`, got `str` - at `\$\[0\]\.at`"),
    "nothing for a time": ([{**PAUSED, "at": None}], r"Expected `float`, .* - at `\$\[0\]\.at`"),
    "a number for a text": ([{**PAUSED, "trial_id": 7}], r"Expected `str`, got `int` - at `\$\[0\]\.trial_id`"),
    "a truth value for a number": ([{**PAUSED, "iteration": True}], r"got `bool` - at `\$\[0\]\.iteration`"),
    "half an iteration": ([{**PAUSED, "iteration": 3.5}], r"got `float` - at `\$\[0\]\.iteration`"),
    "an unknown purpose": ([{**PAUSED, "purpose": "FUN"}], r"Invalid enum value 'FUN' - at `\$\[0\]\.purpose`"),
    "a missing field": ([without(PAUSED, "purpose")], r"missing required field `purpose` - at `\$\[0\]`"),
    "no class": ([without(PAUSED, "what")], r"missing required field `what` - at `\$\[0\]`"),
    "an unknown class": ([{**PAUSED, "what": "Nobody"}], r"Invalid value 'Nobody' - at `\$\[0\]\.what`"),
    "one of the engine's own": ([{"what": "DeviceLost", "at": 1.0, "device_id": 0}], r"Invalid value 'DeviceLost'"),
    "a command": ([to.shut_down()], r"Invalid value 'StopLane' - at `\$\[0\]\.what`"),
    "the second one": ([PAUSED, {**PAUSED, "at": "x"}], r"at `\$\[1\]\.at`"),
    "a part of another type": (
        [{**SAVED, "checkpoint": {"iteration": "3", "path": "/x"}}],
        r"got `str` - at `\$\[0\]\.checkpoint\.iteration`",
    ),
    "a part that lacks something": ([{**SAVED, "checkpoint": {"iteration": 3}}], r"`path` - at `\$\[0\]\.checkpoint`"),
    "a part that is too short": (
        [{"what": "IterationDone", **without(without(PAUSED, "what"), "purpose"), "seconds": 1.0, "metrics": ["{}"]}],
        r"at `\$\[0\]\.metrics`",
    ),
    "memory that is none": (
        [{"what": "FromMember", "at": 1.0, "trial_id": "a", "epoch": 1, "message": {"what": "Left"}, "memory": [1.0]}],
        r"at `\$\[0\]\.memory`",
    ),
    "a message that no member sends": (
        [{"what": "FromMember", "at": 1.0, "trial_id": "a", "epoch": 1, "message": {"what": "Leave"}}],
        r"Invalid value 'Leave' - at `\$\[0\]\.message\.what`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_frame_is_refused_with_its_place(case: str) -> None:
    data, wanted = REFUSED[case]
    with pytest.raises(msgspec.ValidationError, match=wanted):
        decoder(FromLane)(encode(data))


def test_the_examples_are_frames_but_for_what_is_wrong_with_them() -> None:
    assert decoder(FromLane)(encode([PAUSED, SAVED])) == [
        TrialPaused(1.0, "a", 0, iteration=3, purpose=PausePurpose.PREEMPT),
        TrialSaved(1.0, "a", 0, Checkpoint(3, "/x")),
    ]


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_half_of_a_batch_is_none(cut: int) -> None:
    data = encode([LaneWarming(), TrialReleased(1.0, "a", 0)])
    with pytest.raises(msgspec.DecodeError):
        decoder(FromLane)(data[:cut])


# -- versions ----------------------------------------------------------------------------------------------------------


def test_an_end_of_another_version_is_told_in_one_sentence() -> None:
    assert version_problem(VERSION, "the host on node-1") == ""
    told = version_problem("0.0.1", "the host on node-1")
    assert told == f"the host on node-1 runs Fluid 0.0.1 and the driver Fluid {VERSION}: install the same"
    assert version_problem("", "it").startswith("it runs Fluid of an unknown version and the driver Fluid ")
