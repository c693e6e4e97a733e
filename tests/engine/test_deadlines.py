"""Deadlines: one per key, the earliest first, and none that was replaced or cleared comes due."""

from __future__ import annotations

import random

from fluid.engine.core import Deadlines


def test_the_earliest_is_named_and_what_is_due_is_popped_in_order() -> None:
    deadlines = Deadlines()
    assert deadlines.earliest is None and deadlines.pop_due(1e9) == []
    for key, at in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        deadlines.set(key, at)
    assert deadlines.earliest == 1.0
    assert deadlines.pop_due(0.5) == []
    assert deadlines.pop_due(2.0) == ["b", "c"] and deadlines.earliest == 3.0 and len(deadlines) == 1


def test_one_that_was_replaced_or_cleared_does_not_come_due() -> None:
    deadlines = Deadlines()
    deadlines.set("a", 1.0)
    deadlines.set("a", 5.0)
    deadlines.set("b", 2.0)
    deadlines.clear("b")
    deadlines.clear("unknown")
    assert deadlines.earliest == 5.0 and deadlines.pop_due(4.0) == []
    deadlines.set("a", 3.0)
    assert deadlines.pop_due(4.0) == ["a"] and deadlines.earliest is None


def test_any_order_of_changes_gives_what_a_dictionary_gives_and_no_more_is_kept() -> None:
    rng, deadlines, known = random.Random(0), Deadlines(), dict[int, float]()
    for _ in range(5000):
        key, at = rng.randrange(20), rng.random()
        if rng.random() < 0.7:
            deadlines.set(key, at)
            known[key] = at
        elif rng.random() < 0.5:
            deadlines.clear(key)
            known.pop(key, None)
        else:
            due = [key for key, at in sorted(known.items(), key=lambda item: item[1]) if at <= 0.2]
            assert deadlines.pop_due(0.2) == due
            for gone in due:
                del known[gone]
        assert deadlines.earliest == min(known.values(), default=None)
        assert len(deadlines) == len(known) and len(deadlines._heap) <= 2 * len(known) + 100
