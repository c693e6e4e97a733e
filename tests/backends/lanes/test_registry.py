"""What a pool keeps of trainables."""

from __future__ import annotations

from fluid.backends.lanes import registry
from fluid.backends.lanes.registry import Registry
from fluid.trainables.payload import TrainablePayload, TrialPayload

KEPT = registry._KEPT


def payload(number: int) -> TrialPayload:
    return TrialPayload(TrainablePayload(pickled=b"%d" % number), b"")


def test_a_trainable_that_no_trial_uses_for_long_is_dropped_and_gets_another_key_when_it_comes_back() -> None:
    known = Registry(lambda modules: None)
    known.register("in use", payload(-1))
    dropped = []
    for number in range(KEPT + 2):
        known.register(f"trial {number}", payload(number))
        dropped.append(known.forget(f"trial {number}"))
    assert dropped == [None] * KEPT + [1, 2]  # Those of the first two trials; key 0 is in use.
    assert known.look_up("in use") == (0, b"")
    known.register("again", payload(0))
    key, _ = known.look_up("again")
    assert key == KEPT + 3
    assert known.shipment(key).payload == b"0"


def test_trials_of_one_trainable_share_it_also_after_it_was_idle() -> None:
    known = Registry(lambda modules: None)
    known.register("a", payload(7))
    known.register("b", payload(7))
    known.forget("a")
    known.forget("b")
    known.register("c", payload(7))
    assert known.look_up("c")[0] == 0
    assert [known.forget("unknown"), known.forget("c")] == [None, None]
