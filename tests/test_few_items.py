"""A mapping of which most have one item is like a dict."""

from __future__ import annotations

import copy
import pickle
import random

import pytest

from fluid.few_items import FewItems


def test_it_is_like_a_dict() -> None:
    drawn = random.Random(0)
    for _ in range(200):
        items, expected = FewItems[str, int](), dict[str, int]()
        for step in range(12):
            key = drawn.choice("abc")
            if drawn.random() < 0.5:
                items[key] = expected[key] = step
            elif key in expected:
                del items[key], expected[key]
            assert list(items.items()) == list(expected.items()) == list(items.copy().items())
            assert (len(items), items.get("a"), "b" in items) == (len(expected), expected.get("a"), "b" in expected)
            assert copy.deepcopy(items) == pickle.loads(pickle.dumps(items)) == expected
    with pytest.raises(KeyError):
        FewItems[str, int]()["a"]
