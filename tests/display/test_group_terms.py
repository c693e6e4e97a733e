"""Whose a group is, how urgent, its place in line, and the devices that it waits for, in the live view."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from fluid.display.dashboard import render
from fluid.session.status import GroupStatus, Status

WANTED = "a device with model 'H100'"


def group(name: str, **said: Any) -> GroupStatus:
    trials = {"RUNNING": 1, "QUEUED": 2}
    return GroupStatus(name=name, trials=trials, iterations_done=1, iterations=6, eta=None, **said)


def shown(*groups: GroupStatus, width: int = 110) -> str:
    status = Status(at=1.0, groups=groups, devices=(), alpha={}, packing={})
    console = Console(file=(text := io.StringIO()), width=width)
    console.print(render(status, width, 24))
    return text.getvalue()


def test_a_group_is_shown_with_what_was_said_of_it_and_its_place() -> None:
    text = shown(group("a", owner="ann", priority=2.0, preempt=True, place=1), group("b", place=2))
    assert "a  of ann, priority 2, preempts, no. 1 in line" in text
    assert "b  no. 2 in line" in text
    plain = shown(group("a"), group("b"))
    assert "line" not in plain and "of" not in plain, "nothing is shown where nothing was said"


def test_the_devices_that_groups_wait_for_are_shown() -> None:
    text = shown(group("a", awaited=(WANTED,), place=1), group("b"))
    assert f"waits for  a: {WANTED}" in text and "in line" not in text
    assert f"waits for  {WANTED}" in shown(group("a", awaited=(WANTED,))), "of one group, the name says nothing"


def test_what_was_said_gives_way_on_a_narrow_terminal() -> None:
    said: dict[str, Any] = {"owner": "ann", "priority": 2.0, "preempt": True, "place": 1}
    lines = shown(group("a", **said), group("b"), width=40).splitlines()
    assert max(map(len, lines)) <= 40 and "ETA ?" in "\n".join(lines)
