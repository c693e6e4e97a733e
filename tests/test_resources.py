"""Tests of fluid.resources."""

from __future__ import annotations

import math
import pickle
import random
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.errors import InvalidFieldError
from fluid.resources import DEFAULT_MEMORY_WATERMARK, MOST_DEVICES, Cluster, Device, MemoryNeed, Placement, Requires

# --- Device


def test_a_device_is_a_plain_cpu_core_unless_told_otherwise() -> None:
    device = Device(3)
    assert device == Device(3, host="localhost", kind="cpu", speed=1.0, memory_bytes=None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("index", value) for value in (-1, 0.5, math.nan, True, "0", None)),
        *(("kind", value) for value in ("tpu", "", None, 1)),
        *(("speed", value) for value in (0, 0.0, -1, math.nan, math.inf, True, "fast", None)),
        *(("memory_bytes", value) for value in (-1, math.nan, math.inf, True, "16GB")),
        *(("host", value) for value in (None, 5, ["a"])),
    ],
)
def test_a_bad_device_is_refused_by_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Device(**{"index": 0, field: value})
    assert caught.value.field == field
    assert repr(value) in str(caught.value)


def test_numpy_scalars_describe_a_device() -> None:
    device = Device(np.int64(2), speed=np.float32(2.0), memory_bytes=np.uint64(2**35))  # type: ignore[arg-type]
    assert device == Device(2, speed=2.0, memory_bytes=2**35)
    assert hash(device) == hash(Device(2, speed=2.0, memory_bytes=2**35))


# --- MemoryNeed


def test_the_peak_is_what_is_held_plus_what_an_iteration_takes() -> None:
    assert MemoryNeed().peak_bytes == 0
    assert MemoryNeed(3, 4).peak_bytes == 7


@given(st.lists(st.floats(0.0, 1e12), min_size=1), st.randoms(use_true_random=False))
def test_needs_are_whole_bytes_so_that_what_was_added_can_be_taken_away(sizes: list[float], rng: random.Random) -> None:
    needs = [MemoryNeed(size, size / 3.0) for size in sizes]
    assert all(need.persistent_bytes >= size for need, size in zip(needs, sizes, strict=True)), "rounded up"
    taken = sum(need.peak_bytes for need in needs)
    rng.shuffle(needs)
    for need in needs:
        taken -= need.peak_bytes
    assert taken == 0.0


@pytest.mark.parametrize("field", ["persistent_bytes", "ephemeral_bytes"])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, "1", None])
def test_a_bad_memory_need_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        MemoryNeed(**{field: value})
    assert caught.value.field == field


# --- Cluster


def test_a_cluster_of_a_number_of_devices() -> None:
    cluster = Cluster.of(3)
    assert len(cluster) == 3
    assert [device.index for device in cluster.devices] == [0, 1, 2]
    assert {device.kind for device in cluster.devices} == {"gpu"}
    assert {device.kind for device in Cluster.of(2, kind="cpu").devices} == {"cpu"}


def test_devices_are_sorted_and_found_by_index() -> None:
    cluster = Cluster.of([Device(7), Device(2, host="b"), Device(5)])
    assert [device.index for device in cluster.devices] == [2, 5, 7]
    assert cluster[2].host == "b"
    assert cluster == Cluster((Device(2, host="b"), Device(5), Device(7)))
    with pytest.raises(KeyError):
        cluster[0]


def test_a_generator_of_devices_will_do() -> None:
    assert Cluster.of(Device(index) for index in (1, 0)) == Cluster((Device(0), Device(1)))


@given(indices=st.permutations(range(8)))
def test_the_order_of_the_devices_does_not_matter(indices: list[int]) -> None:
    one, other = Cluster.of(Device(index) for index in indices), Cluster.of(Device(index) for index in range(8))
    assert one == other
    assert hash(one) == hash(other)


def test_an_empty_cluster_is_refused() -> None:
    for devices in (0, [], ()):
        with pytest.raises(InvalidFieldError, match="devices"):
            Cluster.of(devices)  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [-1, True, False, 2.5, math.nan, None, "ab", [0, 1], [Device(0), None]], ids=repr)
def test_what_is_neither_a_count_nor_devices_is_refused(devices: Any) -> None:
    with pytest.raises(InvalidFieldError, match="devices"):
        Cluster.of(devices)


def test_a_slip_of_the_keyboard_is_refused_before_it_fills_the_memory() -> None:
    with pytest.raises(InvalidFieldError, match="devices") as caught:
        Cluster.of(MOST_DEVICES + 1)
    assert caught.value.value == MOST_DEVICES + 1


@pytest.mark.parametrize("count", [np.int64(4), np.uint8(4), 4.0])
def test_any_whole_number_counts_devices(count: Any) -> None:
    assert Cluster.of(count) == Cluster.of(4)


def test_repeated_indices_are_refused_and_named() -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Cluster.of([Device(4), Device(1), Device(4), Device(1), Device(0)])
    assert caught.value.field == "devices"
    assert caught.value.value == [1, 4]


@pytest.mark.parametrize("watermark", [0, 0.0, -0.5, 1.0001, 90, math.nan, math.inf, True, "0.9", None])
def test_a_bad_watermark_is_refused(watermark: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Cluster((Device(0),), memory_watermark=watermark)
    assert caught.value.field == "memory_watermark"
    assert repr(watermark) in str(caught.value) or caught.value.value == watermark


def test_the_watermark_is_the_share_of_memory_that_trials_may_fill() -> None:
    device = Device(0, memory_bytes=1000)
    assert Cluster((device,)).usable_bytes(device) == pytest.approx(1000 * DEFAULT_MEMORY_WATERMARK)
    assert Cluster((device,), memory_watermark=1.0).usable_bytes(device) == 1000
    assert Cluster((device,), memory_watermark=0.25).usable_bytes(device) == 250
    assert Cluster.of(1).usable_bytes(Device(0)) == math.inf, "memory that is not known bounds nothing"


def test_a_cluster_cannot_be_changed_but_copied_with_changes() -> None:
    cluster = Cluster.of([Device(0), Device(1)])
    with pytest.raises(FrozenInstanceError):
        cluster.devices = ()  # type: ignore[misc]
    larger = replace(cluster, devices=(*cluster.devices, Device(9, host="b")))
    assert larger[9].host == "b"
    assert len(cluster) == 2


def test_a_cluster_crosses_processes() -> None:
    cluster = Cluster.of([Device(3, host="b", speed=2.0, memory_bytes=1e9), Device(1)])
    twin = pickle.loads(pickle.dumps(cluster))
    assert twin == cluster
    assert twin[3] == cluster[3]


# --- Placement


@pytest.mark.parametrize(("width", "count"), [(0.25, 1), (1 / 3, 1), (0.5, 1), (1, 1), (1.0, 1), (2.0, 2), (5, 5)])
def test_a_placement_has_as_many_devices_as_its_width_takes(width: float, count: int) -> None:
    assert Placement(width, tuple(range(count))).width == width
    for wrong in (count - 1, count + 1):
        with pytest.raises(InvalidFieldError, match="device_ids"):
            Placement(width, tuple(range(wrong)))


# --- Requires

A100 = Device(0, host="n1", kind="gpu", memory_bytes=80 * 2**30, model="NVIDIA A100-SXM4-80GB", tags=("nvlink", "b"))


@pytest.mark.parametrize(
    ("requires", "met"),
    [
        (Requires(), True),
        (Requires(kind="gpu"), True),
        (Requires(kind="cpu"), False),
        *((Requires(model=name), True) for name in ("A100", "a100", "A100-80G", "H100|A100", "NVIDIA A100-SXM4-80GB")),
        *((Requires(model=name), False) for name in ("H100", "A10", "A100-40G", "80GB A100", "H100|V100", "100")),
        (Requires(host="n1"), True),
        (Requires(host="n2 | n1"), True),
        (Requires(host="n"), False),
        (Requires(tags="nvlink"), True),
        (Requires(tags=("nvlink", "b")), True),
        (Requires(tags=("nvlink", "c")), False),
        (Requires(memory_bytes=80 * 2**30), True),
        (Requires(memory_bytes=81 * 2**30), False),
        (Requires(kind="gpu", model="A100", host="n2"), False),
    ],
)
def test_a_device_meets_what_is_required_or_does_not(requires: Requires, met: bool) -> None:
    assert requires.met_by(A100) is met


def test_a_device_of_unknown_memory_has_enough_and_one_of_unknown_model_is_no_model() -> None:
    assert Requires(memory_bytes=1e12).met_by(Device(0))
    assert not Requires(model="A100").met_by(Device(0))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes", -1),
        ("kind", "tpu"),
        ("model", ""),
        ("model", "A100|"),
        ("host", 5),
        ("host", "a||b"),
        ("tags", 5),
        ("tags", ("a", 1)),
        ("tags", ("",)),
    ],
)
def test_a_bad_requirement_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Requires(**{field: value})
    assert caught.value.field == field


def test_tags_are_a_set_however_they_are_given() -> None:
    assert Device(0, tags=["b", "a", "b"]) == Device(0, tags=("a", "b"))  # type: ignore[arg-type]
    assert hash(Requires(tags={"b", "a"})) == hash(Requires(tags=("a", "b")))  # type: ignore[arg-type]
    assert Requires(tags="ab").tags == ("ab",)  # type: ignore[arg-type]


def test_devices_and_requirements_print_and_pickle() -> None:
    assert repr(A100) == (
        "Device(index=0, host='n1', kind='gpu', speed=1.0, memory_bytes=85899345920, "
        "model='NVIDIA A100-SXM4-80GB', tags=('b', 'nvlink'))"
    )
    assert str(Requires()) == "nothing"
    assert str(Requires(kind="gpu", host="n1", tags=("a",))) == "kind 'gpu', host 'n1', tag 'a'"
    assert pickle.loads(pickle.dumps((A100, Requires(model="A100")))) == (A100, Requires(model="A100"))
