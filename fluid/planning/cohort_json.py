"""The tree of cohorts as JSON: its trials, oldest first, and its splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluid.errors import InvalidFieldError, require_number
from fluid.planning.cohort_nodes import CohortNode, CohortSample
from fluid.planning.cohort_words import NameSets, Split, Threshold, words
from fluid.planning.measurements import member
from fluid.resources import MemoryNeed


def trial_to_json(trial_id: str, sample: CohortSample) -> dict[str, object]:
    """A trial, as JSON."""
    need = sample.need
    parts = None if need is None else [need.persistent_bytes, need.ephemeral_bytes]
    return {"id": trial_id, "config": dict(sample.config), "seconds": sample.seconds, "bytes": parts}


def trial_from_json(where: str, data: object) -> tuple[str, CohortSample]:
    """The trial that :func:`trial_to_json` wrote, and its id."""
    trial_id, config, seconds, parts = (member(where, data, name) for name in ("id", "config", "seconds", "bytes"))
    if not isinstance(trial_id, str):
        raise InvalidFieldError(f"{where}.id", trial_id, "must be a string")
    if not isinstance(config, Mapping):
        raise InvalidFieldError(f"{where}.config", config, "must be a JSON object")
    for name, text in config.items():
        if not isinstance(text, str):
            raise InvalidFieldError(f"{where}.config.{name}", text, "must be a string")
    if seconds is not None and require_number(f"{where}.seconds", seconds, at_least=0.0) == 0.0:
        raise InvalidFieldError(f"{where}.seconds", seconds, "must be above 0")
    if seconds is None and parts is None:
        raise InvalidFieldError(f"{where}.seconds", None, "is missing, and bytes are, too")
    return trial_id, CohortSample(tuple(config.items()), dict(config), seconds, _need(f"{where}.bytes", parts))


def _need(where: str, parts: object) -> MemoryNeed | None:
    if parts is None:
        return None
    if not isinstance(parts, list) or len(parts) != 2:
        raise InvalidFieldError(where, parts, "must be a list of two numbers, persistent and ephemeral bytes")
    return MemoryNeed(*(require_number(f"{where}[{place}]", part, at_least=0.0) for place, part in enumerate(parts)))


def node_to_json(node: CohortNode) -> dict[str, object]:
    """A node and those below it, without their trials, as JSON."""
    if node.split is None:
        return {"searched": node.searched}
    below: dict[str, object] = {"feature": node.split.feature, "sides": [node_to_json(each) for each in node.children]}
    if isinstance(node.split, Threshold):
        return {**below, "at": node.split.at}
    return {**below, "names": [sorted(side) for side in node.split.sides]}


def node_from_json(where: str, data: object, node: CohortNode, depth: int) -> None:
    """Parts a node without trials as :func:`node_to_json` wrote it.

    Args:
        where: the place in the file.
        data: what is there.
        node: the node.
        depth: most splits below it.
    """
    if "sides" not in (data if isinstance(data, Mapping) else ()):
        searched = member(where, data, "searched")
        if isinstance(searched, bool) or not isinstance(searched, int) or searched < 0:
            raise InvalidFieldError(f"{where}.searched", searched, "must be a whole number, at least 0")
        node.searched = searched
        return
    if depth == 0:
        raise InvalidFieldError(where, data, "has too many splits above it")
    sides = member(where, data, "sides")
    if not isinstance(sides, list) or len(sides) != 2:
        raise InvalidFieldError(f"{where}.sides", sides, "must be a list of two nodes")
    split = _split(where, data)
    if words([*node.path, (split, 0)]) == words([*node.path, (split, 1)]):
        raise InvalidFieldError(where, data, "both sides have the same conditions")
    node.part(split)
    for place, (child, side) in enumerate(zip(node.children, sides, strict=True)):
        node_from_json(f"{where}.sides[{place}]", side, child, depth - 1)


def _split(where: str, data: object) -> Split:
    feature = member(where, data, "feature")
    if not isinstance(feature, str):
        raise InvalidFieldError(f"{where}.feature", feature, "must be a string")
    if isinstance(data, Mapping) and "at" in data:
        return Threshold(feature, require_number(f"{where}.at", data["at"], at_least=-float("inf")))
    names: Any = member(where, data, "names")
    is_list = isinstance(names, list) and len(names) == 2 and all(isinstance(side, list) and side for side in names)
    if not is_list or not all(isinstance(name, str) for side in names for name in side):
        raise InvalidFieldError(f"{where}.names", names, "must be two lists of strings")
    if len({*names[0], *names[1]}) < len(names[0]) + len(names[1]):
        raise InvalidFieldError(f"{where}.names", names, "hold a name twice")
    return NameSets(feature, (frozenset(names[0]), frozenset(names[1])))
