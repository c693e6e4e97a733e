"""What a pool keeps of trainables."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

import pytest

from fluid.backends.base import Launcher
from fluid.backends.lanes import registry
from fluid.backends.lanes.registry import HostPayloads, Registry
from fluid.trainables.payload import LARGE_BYTES, TrainablePayload, TrialPayload
from fluid.trial_fields import TrialProcess

KEPT = registry._KEPT


def payloads(dropped: list[str]) -> HostPayloads:
    """Adds the names of those that are dropped to a list."""
    return HostPayloads(cast(Launcher, SimpleNamespace(drop=dropped.append)))


def payload(number: int) -> TrialPayload:
    return TrialPayload(TrainablePayload(pickled=b"%d" % number), b"")


def test_a_trainable_that_no_trial_uses_for_long_is_dropped_and_gets_another_key_when_it_comes_back() -> None:
    known = Registry(lambda modules: None, payloads([]))
    known.register("in use", payload(-1))
    dropped = []
    for number in range(KEPT + 2):
        known.register(f"trial {number}", payload(number))
        dropped.append(known.forget(f"trial {number}"))
    assert dropped == [[]] * KEPT + [[1], [2]]  # Those of the first two trials; key 0 is in use.
    assert known.look_up("in use") == (0, b"")
    known.register("again", payload(0))
    key, _ = known.look_up("again")
    assert key == KEPT + 3
    assert known.shipment(key).payload == b"0"


def test_trials_of_one_trainable_share_it_also_after_it_was_idle() -> None:
    known = Registry(lambda modules: None, payloads([]))
    known.register("a", payload(7))
    known.register("b", payload(7))
    known.forget("a")
    known.forget("b")
    known.register("c", payload(7))
    assert known.look_up("c")[0] == 0
    assert [known.forget("unknown"), known.forget("c")] == [[], []]


def large(number: int, config: bytes = b"") -> TrialPayload:
    return TrialPayload(TrainablePayload(pickled=b"%d" % number * LARGE_BYTES), config)


def test_idle_trainables_take_bounded_space_and_are_dropped_on_the_hosts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KEPT_BYTES", 2 * LARGE_BYTES)
    dropped: list[str] = []
    known = Registry(lambda modules: None, payloads(dropped))
    names = []
    for number in range(3):
        known.register(f"trial {number}", large(number))
        names.append(known.large_trainable(number))
    assert [known.forget("trial 0"), known.forget("trial 1")] == [[], []]
    known.register("again", large(0))
    assert [known.forget("again"), dropped] == [[], []]
    assert known.forget("trial 2") == [1]
    assert dropped == [names[1]]
    known.register("larger", TrialPayload(TrainablePayload(pickled=bytes(3 * LARGE_BYTES)), b""))
    assert known.forget("larger") == [0, 2]  # The last one stays.
    assert dropped == [names[1], names[0], names[2]]


def test_a_large_config_is_dropped_with_the_last_trial_that_has_it() -> None:
    dropped: list[str] = []
    known = Registry(lambda modules: None, payloads(dropped))
    for trial_id, config in {"a": b"1" * LARGE_BYTES, "b": b"1" * LARGE_BYTES, "c": b"small"}.items():
        known.register(trial_id, TrialPayload(TrainablePayload(pickled=b"t"), config))
    name = known.large_config("a")
    assert name is not None and known.large_config("b") == name and known.large_config("c") is None
    known.forget("a")
    assert dropped == [] and known.has_large_configs
    known.forget("b")
    assert dropped == [name] and not known.has_large_configs


def test_a_trial_keeps_the_number_of_threads_with_which_it_began() -> None:
    known = Registry(lambda modules: None, payloads([]))
    known.register("a", payload(1))
    known.register("asks", dataclasses.replace(payload(1), process=TrialProcess(threads=5)))
    assert [known.process("a", lane).threads for lane in (2, 3, 2)] == [None, 2, None], "None for the lane's own"
    assert [known.process("asks", lane).threads for lane in (2, 3)] == [5, 5]
    known.forget("a")
    known.register("a", payload(1))
    assert known.process("a", 3).threads is None
