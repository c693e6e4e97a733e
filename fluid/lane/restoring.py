"""Restores a trial from the best of its checkpoints that can be used: its newest, else an earlier one, else none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fluid.lane.checkpoint_files import iteration_of, locked_for_reading
from fluid.lane.checkpoint_seal import damage_by_lengths, damage_of
from fluid.lane.errors import one_line, print_exception

#: Most characters of a reason.
_LONGEST = 500


class Restored(NamedTuple):
    """What a trial was restored from.

    Attributes:
        path: the checkpoint; ``None`` if the trial begins afresh.
        iteration: iterations done by its state.
        reason: why it was not the checkpoint wanted, in one line; empty if it was one of the same iteration.
        cannot_load: whether the trial's own code raised for every checkpoint that is not damaged.
    """

    path: str | None
    iteration: int
    reason: str
    cannot_load: bool


def restore_best(
    places: Iterable[str],
    iteration: int,
    load: Callable[[str], None],
    renew: Callable[[], None],
    is_innocent: Callable[[BaseException], bool],
    problem: str = "",
    is_in_memory: Callable[[str], bool] = lambda path: False,
) -> Restored:
    """Restores a trial that was set up.

    Args:
        places: folders of its checkpoints, the best first; some may not exist.
        iteration: that of the checkpoint wanted.
        load: restores the trial from a folder.
        renew: sets the trial up anew; called before a ``load`` that follows one that raised, and in the end if no
            checkpoint could be used and one had raised.
        is_innocent: whether an error of ``load`` says nothing about the checkpoint, such as a lack of memory.
        problem: why the checkpoint wanted is not among the places, if that is known.
        is_in_memory: whether a folder is in host memory: its files are then read once, by ``load``, and not summed.

    Raises:
        BaseException: what ``renew`` raised, and errors of ``load`` that say nothing about the checkpoint.
        OSError: this process cannot open files at the moment.
    """
    problems = [problem] if problem else []
    is_soiled = cannot_load = False
    for path in places:
        with locked_for_reading(path) as exists:
            if not exists:
                continue
            damage = damage_by_lengths(path) if is_in_memory(path) else damage_of(path)
            if damage is not None:
                problems.append(f"the checkpoint of iteration {iteration_of(path)} is damaged: {damage}")
                continue
            if is_soiled:
                renew()
            try:
                load(path)
            except BaseException as error:
                if is_innocent(error):
                    raise
                print_exception()
                problems.append(f"loading the checkpoint of iteration {iteration_of(path)} raised {one_line(error)}")
                is_soiled = cannot_load = True
            else:
                found = iteration_of(path)
                return Restored(path, found, _reason(problems, iteration) if found < iteration else "", False)
    if is_soiled:
        renew()
    return Restored(None, 0, _reason(problems, iteration), cannot_load)


def _reason(problems: list[str], iteration: int) -> str:
    wanted = f"checkpoint of iteration {iteration} "
    if not any(wanted in problem for problem in problems):
        problems = [f"the {wanted}is gone", *problems]
    return "; ".join(problems)[:_LONGEST]
