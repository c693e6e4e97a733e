"""A line on stderr that says how far a long command is; only where stderr is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

T = TypeVar("T")


def track(items: Sequence[T], describe: Callable[[T], str]) -> Iterator[T]:
    """Yields the items, and shows which one is at work; the line is gone at the end.

    Args:
        items: what there is to do.
        describe: says in a few words what is done for an item.
    """
    console = Console(stderr=True, markup=False)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            progress.update(task, description=describe(item))
            yield item
            progress.advance(task)
