"""A trial's fields, checked."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from fluid.errors import InvalidFieldError, parse_duration, require_integer, require_text
from fluid.random_state import Seeds

#: When an iteration counts as hung: seconds, ``"auto"`` for a limit measured on its like, or ``None`` for never.
IterationTimeout = Annotated[float, Meta(gt=0.0)] | Literal["auto"] | None
#: Mappings within mappings whose names are checked.
_DEEPEST = 20
#: Types whose values nothing can change.
_ATOMS = frozenset({int, float, str, bool, bytes, type(None)})
#: What is looked at: containers that may hold themselves, and open files.
_LOOKED_AT = (dict, list, tuple, Mapping, io.IOBase)


class TrialProcess(NamedTuple):
    """What a trial asks of the process that runs it.

    Attributes:
        threads: CPU threads; ``None`` for those of the lane.
        seeds: of its random number generators; ``None`` for others every time.
        chdir: whether its working directory is its own folder at first.
        alone: whether no other trial runs in it.
    """

    threads: int | None = None
    seeds: Seeds | None = None
    chdir: bool = False
    alone: bool = False


#: Of a trial that asks for nothing.
ANY_PROCESS = TrialProcess()


class StartFrom(NamedTuple):
    """The state from which a trial starts, as its user says it.

    Attributes:
        parent: id of the trial whose state it is; empty if only a path is known.
        at: iterations done by it; ``None`` for the newest one.
        path: the checkpoint's folder; empty for a trial of this session.
        is_shared: whether the iterations until then are this trial's, too.
    """

    parent: str
    at: int | None = None
    path: str = ""
    is_shared: bool = False

    @property
    def text(self) -> str:
        """Which state it is: ``"trial 'a' after 8 iterations"``; of another run, with the path of its checkpoint."""
        whose = f"trial {self.parent!r}" if self.parent else "the checkpoint"
        whose += f" ({self.path})" if self.parent and self.path else f" {self.path}" if self.path else ""
        if self.at is None:
            return f"{whose}, its newest state"
        return f"{whose} after {self.at} iteration{'' if self.at == 1 else 's'}"


#: The part of a checkpoint that users see.
_STATE = "state"


def start_from_of(value: object, at: object) -> StartFrom | None:
    """Returns from which state a trial starts.

    Args:
        value: a :class:`StartFrom`; a trial's id or the path of a checkpoint; a checkpoint of
            :attr:`fluid.TrialResult.checkpoints`; or what has such checkpoints, as the best trial of a sweep.
        at: iterations done by it, at least 1; ``None`` for the best iteration, or the newest state.

    Raises:
        InvalidFieldError: it is none of these, has no checkpoint of that iteration, or ``at`` is no number of
            iterations.
    """
    wanted = None if at is None else require_integer("at", at, at_least=1)
    if value is None:
        if wanted is not None:
            raise InvalidFieldError("at", at, "says which state of start_from: name a trial there, too")
        return None
    if isinstance(value, StartFrom):
        return value if wanted is None else value._replace(at=wanted)
    if isinstance(value, str) and os.sep not in value:
        return StartFrom(require_text("start_from", value), wanted)
    if isinstance(value, (str, os.PathLike)):
        return _of_path(value, wanted)
    path, iteration = getattr(value, "path", None), getattr(value, "iteration", None)
    if isinstance(path, Path) and isinstance(iteration, int):
        return _of_path(path, iteration if wanted is None else wanted)
    trial = getattr(value, "trial", value)
    kept, trial_id = getattr(trial, "checkpoints", None), getattr(trial, "trial_id", None)
    if not isinstance(kept, tuple) or not isinstance(trial_id, str):
        reason = "must be a trial's id, the path of a checkpoint, or a trial with checkpoints, as result.best"
        raise InvalidFieldError("start_from", value, reason)
    if wanted is None and trial is not value:
        wanted = iteration
    found = [each for each in kept if wanted is None or each.iteration == wanted]
    if not found:
        there = ", ".join(str(each.iteration) for each in kept)
        which = f"of iteration {wanted}; there are those of {there}: say which by at=" if kept else "on disk"
        hint = "" if kept else "; run its sweep with FluidExecutor(keep='best:1') or keep='last'"
        raise InvalidFieldError("start_from", trial_id, f"has no checkpoint {which}{hint}")
    return _of_path(found[-1].path, found[-1].iteration)._replace(parent=trial_id)


def _of_path(path: str | os.PathLike[str], at: int | None) -> StartFrom:
    folder = Path(path).expanduser().absolute()
    folder = folder.parent if folder.name == _STATE else folder
    number = folder.name.partition("-")[0]
    if not number.isdecimal() or not (folder / _STATE).is_dir():
        reason = "is no checkpoint: give one of a trial's checkpoints, as result.best.checkpoint, or a trial's id"
        raise InvalidFieldError("start_from", str(path), reason)
    if at is not None and at != int(number):
        raise InvalidFieldError("at", at, f"the checkpoint {str(path)!r} is of iteration {int(number)}")
    return StartFrom("", int(number), str(folder))


def own_config(config: object) -> dict[str, Any]:
    """Returns a copy of a config, so that the user may change the original afterwards.

    The copy is deep, as a whole: what its values share stays shared, as in the pickle that lanes get. It takes about as
    much memory as that. Where a value cannot be copied, as a lock, only dicts, lists, tuples and sets are.

    Raises:
        InvalidFieldError: it is no mapping, holds itself or an open file, or has a name in it that no file can hold.
    """
    if not isinstance(config, Mapping):
        raise InvalidFieldError("config", config, "must be a mapping of hyperparameters")
    plain = dict(config)
    if all(type(value) in _ATOMS for value in plain.values()):
        _require_names(plain, 0)
        return plain
    require_finite("config", config)
    _require_names(plain, 0)
    try:
        return copy.deepcopy(plain)
    except (Exception, SystemExit, GeneratorExit):  # The values' classes are the user's; a lock cannot be copied.
        return {name: _with_own_containers(value, _DEEPEST) for name, value in plain.items()}


def require_finite(field: str, value: Any) -> None:
    """Refuses a value whose mappings, lists and tuples, nested in each other, hold one that they are in, or a file.

    Each is looked at once, however deep it is and however often it is there; objects of other classes are not.

    Example:
        >>> from fluid.trial_fields import require_finite
        >>> config = {"a": 1, "b": [2, {}]}
        >>> require_finite("config", config)
        >>> config["b"][1]["c"] = config
        >>> require_finite("config", config)
        Traceback (most recent call last):
        fluid.errors.InvalidFieldError: config['b'][1]['c']=<class 'dict'>: holds itself

    Raises:
        InvalidFieldError: it does; the field names the entry.
    """
    #: From the outside in: each value, its key in the one before, and those in it that are still to be looked at.
    within, seen = [(value, None, _nested(value))], {id(value)}
    while within:
        _, _, rest = within[-1]
        if not rest:
            within.pop()
            continue
        key, part = rest.pop()
        is_file = isinstance(part, io.IOBase)
        if is_file or any(part is above for above, _, _ in within):
            entry = "".join(f"[{key!r}]" for key in (*(key for _, key, _ in within[1:]), key))
            reason = "is an open file, of which a trial would get a copy of what is in it: give its path"
            # Not the value itself: its repr may take as long as any other walk through all of its paths.
            raise InvalidFieldError(f"{field}{entry}", type(part), reason if is_file else "holds itself")
        if id(part) not in seen:
            seen.add(id(part))
            within.append((part, key, _nested(part)))


def _nested(value: Any) -> list[tuple[Any, Any]]:
    """The mappings, lists, tuples and open files in one, and their keys; the last one first."""
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    nested = [(key, part) for key, part in parts if type(part) not in _ATOMS and isinstance(part, _LOOKED_AT)]
    return [(key, part) for key, part in nested if not isinstance(part, (io.BytesIO, io.StringIO))][::-1]


def _with_own_containers(value: Any, depth: int) -> Any:
    """A value whose dicts, lists, tuples and sets, down to some level, are copies; all else is shared."""
    kind = type(value)
    if depth > 0 and kind is dict:
        return {key: _with_own_containers(part, depth - 1) for key, part in value.items()}
    if depth > 0 and (kind is list or kind is tuple):
        return kind(_with_own_containers(part, depth - 1) for part in value)
    return set(value) if kind is set else value


def _require_names(config: Mapping[Any, Any], depth: int) -> None:
    for name, value in config.items():
        if isinstance(name, str) and not name.isascii():
            require_text("config", name, empty=True)
        if isinstance(value, Mapping) and depth < _DEEPEST:
            _require_names(value, depth + 1)


def require_timeout(name: str, value: object) -> IterationTimeout:
    """Returns a limit of an iteration.

    Raises:
        InvalidFieldError: it is not ``"auto"``, ``None`` or a finite time above 0.
    """
    if value is None or value == "auto":
        return None if value is None else "auto"
    try:
        return parse_duration(name, value)
    except InvalidFieldError as error:
        reason = "must be a number of seconds above 0, text such as \"90s\", 'auto' or None"
        raise InvalidFieldError(name, value, reason) from error
