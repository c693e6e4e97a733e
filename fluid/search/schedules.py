"""Schedules: values of a config that depend on the iteration, such as a learning rate that falls.

A schedule says from when on a value counts. So trials whose schedules agree at first can be one run until they differ,
which :mod:`fluid.search.prefixes` plans.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import inspect
import math
import numbers
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fluid.errors import InvalidFieldError, PrefixEndedError, require_integer, require_number, require_one_of
from fluid.search.conditions import When
from fluid.search.conversion import convert, require_constant
from fluid.search.domains import Choice, FloatRange, IntRange
from fluid.search.prefix_end import asks_address, note_ask, own_schedule, take_address
from fluid.user_calls import user_call
from fluid.user_values import is_same_value

#: How values between two starts are found.
_BETWEEN = ("step", "linear")
#: Most characters of a schedule's text, of which files make a schedule again; a longer one is cut, and has a digest.
_LONGEST = 1000
#: Types whose values have a hash that follows from the value.
_HASHABLE = (int, float, str, bool, bytes, type(None))
#: Stands for the name of a lambda, which no expression has.
_LAMBDA = "__lambda__"
#: In a pickle of a schedule of a shared run: where asks are to be told.
_ADDRESS = "asks"
#: What a text of a schedule begins with.
NAME = "schedule"


class Span(NamedTuple):
    """Iterations in which a schedule follows one law.

    Attributes:
        stop: the first iteration after them; ``None`` if they never end.
        law: the value, in a tuple of one; or the start, the value there, the end and the value there of a line.
    """

    stop: int | None
    law: tuple[Any, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A value that depends on the iteration; :func:`schedule` makes one. It never changes.

    Two schedules are equal if they are made alike: from the same values at the same iterations, or from the same
    function and arguments. A trial's code asks it by :meth:`at` only: nothing else of it is there in a run that several
    trials share.

    Example:
        >>> from fluid.search import Schedule, schedule
        >>> rate: Schedule = schedule({0: 0.1, 20: 0.01})
        >>> rate, rate.at(20), rate == schedule({20: 0.01, 0: 0.1})
        (schedule({0: 0.1, 20: 0.01}), 0.01, True)
    """

    _starts: tuple[int, ...] = ()
    _values: tuple[Any, ...] = ()
    _between: str = "step"
    _function: Callable[..., Any] | None = None
    _arguments: tuple[tuple[str, Any], ...] = ()
    #: Of a shared run: how many iterations it knows, its id, and the keys that lead to it in the config.
    _until: int | None = None
    _run: str = ""
    _place: tuple[Any, ...] = ()

    def at(self, iteration: int) -> Any:
        """Returns the value for the iteration that follows so many iterations done: 0 is the first one.

        Example:
            >>> from fluid.search import schedule
            >>> rate = schedule({0: 0.1, 20: 0.01})
            >>> [rate.at(iteration) for iteration in (0, 19, 20, 1000)]
            [0.1, 0.1, 0.01, 0.01]

        Raises:
            InvalidFieldError: the number is negative, or not whole.
            PrefixEndedError: this is a schedule of a run that trials share, and they do not all have a value there that
                is known to be the same. The trial is then run by itself.
        """
        number = iteration if type(iteration) is int and iteration >= 0 else _iteration_of("iteration", iteration)
        if self._until is not None and number >= self._until:
            self._end(f"asked for the value of iteration {number}")
        if self._function is not None:
            return self._function(number, **dict(self._arguments))
        place = bisect_right(self._starts, number) - 1
        value = self._values[place]
        if self._between == "step" or place + 1 == len(self._starts) or number == self._starts[place]:
            return value
        return _on_line(self._starts[place], value, self._starts[place + 1], self._values[place + 1], number)

    def until(self, iterations: int, run: str = "", place: tuple[Any, ...] = ()) -> Schedule:
        """Returns what a run knows that several trials share: the values of so many iterations, and nothing else.

        Args:
            iterations: how many, from the first one on; at least 1.
            run: id of the run: what :func:`fluid.search.prefix_end.asked_beyond` is asked for.
            place: the keys that lead to it in the run's config.

        Raises:
            InvalidFieldError: there is none.
            PrefixEndedError: this schedule does not know so many itself.
            Exception: what a function raises that is asked for its values.
        """
        known = require_integer("iterations", iterations, at_least=1)
        if self._until is not None and known > self._until:
            self._end(f"asked for the values of {known} iterations")
        points = self._points_until(known)
        return Schedule(tuple(points), tuple(points.values()), self._between, _until=known, _run=run, _place=place)

    @property
    def signs(self) -> tuple[str, ...]:
        """Its zeros, in order: 0.0 and -0.0 are equal, and may compute other values."""
        self._require_whole("the signs")
        values = (*self._values, *(value for _, value in self._arguments))
        return tuple(repr(value) for value in values if type(value) is float and value == 0.0)

    def span(self, iteration: int) -> Span | None:
        """The iterations around this one with one law, with which spans of other schedules are compared.

        ``None`` if there is no law but a function's.
        """
        self._require_whole("the law")
        if self._function is not None:
            return None
        place = bisect_right(self._starts, iteration) - 1
        is_last = place + 1 == len(self._starts)
        start, value = self._starts[place], self._values[place]
        stop, after = (None, value) if is_last else (self._starts[place + 1], self._values[place + 1])
        if self._between == "step" or value == after:
            return Span(stop, (value,))
        return Span(stop, (start, value, stop, after))

    def _points_until(self, known: int) -> dict[int, Any]:
        """Values by iteration, which tell of the first ones only; what lies between two follows as it does here."""
        if self._function is not None:
            return dict(_changes((number, self.at(number)) for number in range(known)))
        points = {start: value for start, value in zip(self._starts, self._values, strict=True) if start < known}
        last = max(points)
        if self._between == "linear" and len(points) < len(self._starts):
            # The line there leads to a value that is not to be known: its own values are given one by one.
            points |= {number: self.at(number) for number in range(last + 1, known)}
        return points

    def _require_whole(self, asked: str) -> None:
        if self._until is not None:
            self._end(f"asked for {asked}")

    def _end(self, asked: str) -> NoReturn:
        raise self._note(asked)

    def _note(self, asked: str) -> PrefixEndedError:
        return note_ask(
            self._run,
            f"a run that several trials share {asked} of a schedule, and they are known to agree on {self._until} "
            f"iterations, 0 to {(self._until or 0) - 1}",
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        if self is other:
            return True
        if (self._until is None) != (other._until is None):
            shared, whole = (other, self) if self._until is None else (self, other)
            if shared == whole.until(shared._until or 1):
                shared._end("asked for the equality")
            return False
        mine, theirs = ((one._between, one._starts, one._until) for one in (self, other))
        if mine != theirs or not _are_same_functions(self._function, other._function):
            return False
        return is_same_value(self._values, other._values) and is_same_value(
            dict(self._arguments), dict(other._arguments)
        )

    def __hash__(self) -> int:
        self._require_whole("the hash")
        values = (*self._values, *(value for _, value in sorted(self._arguments)))
        plain = tuple(value for value in values if type(value) in _HASHABLE and value == value)
        return hash((self._between, self._starts, plain))

    def __repr__(self) -> str:
        text = _call_text(dict(zip(self._starts, self._values, strict=True)), self)
        if len(text) > _LONGEST:
            digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=4).hexdigest()
            text = f"{text[: _LONGEST - 20]}... #{digest})"
        if self._until is None:
            return text
        if asks_address() is not None:  # In a lane. A seed or a name may be made of it: no error, but no shared run.
            self._note("asked for the text, as print(config) does,")
        return f"{text}.until({self._until})"

    def __getstate__(self) -> dict[str, Any]:
        address = None if self._until is None else asks_address()
        return self.__dict__ if address is None else {**self.__dict__, _ADDRESS: address}

    def __setstate__(self, state: dict[str, Any]) -> None:
        address = state.pop(_ADDRESS, None)
        if "_until" in state and (own := own_schedule(state["_run"], state["_place"])) is not None:
            state = own.__dict__  # A state of the run is restored that holds its config: this trial has its own.
        self.__dict__.update(state)
        if address is not None:
            take_address(address)

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedule:
        return self


@dataclass(frozen=True, repr=False)
class ScheduleNode:
    """A schedule of a search space, some of whose values are drawn: each config has a :class:`Schedule` there.

    Attributes:
        parts: what a space may hold, by the starts as text, or by the function's arguments.
        between: how values between two starts are found.
        function: the function, if it is one.
    """

    parts: Mapping[str, Any]
    between: str = "step"
    function: Callable[..., Any] | None = None

    def at(self, iteration: int) -> NoReturn:
        """Raises an error: what is drawn is known in a trial's config only."""
        reason = f"cannot be asked of {self!r}, of which each config of fluid.run draws its own; [[1, 2]] is one list"
        raise InvalidFieldError("iteration", iteration, reason)

    def made(self, values: Mapping[str, Any]) -> Schedule:
        """The schedule of a config.

        Args:
            values: of the parts; one under a condition may be absent.
        """
        if self.function is not None:
            return Schedule(_function=self.function, _arguments=tuple(values.items()))
        return _of_points({int(start): value for start, value in values.items()}, self.between)

    def values_of(self, field: str, value: Any) -> dict[str, Any]:
        """The values of the parts in a schedule of this form, in its text, or in a dict of some of them.

        Raises:
            InvalidFieldError: it has another form; the field is named.
        """
        if isinstance(value, Mapping):
            return {str(name): part for name, part in value.items()}
        read = (
            _read_text(value) if isinstance(value, str) else _parts_of(value) if isinstance(value, Schedule) else None
        )
        if read is None:
            starts = "arguments" if self.function is not None else "starts"
            raise InvalidFieldError(
                field, value, f"must be a schedule as in the space, or a dict of values by {starts}"
            )
        form, values = read
        always = {name for name, part in self.parts.items() if not isinstance(part, When)}
        if form != self._form or not always <= values.keys() <= self.parts.keys():
            raise InvalidFieldError(field, value, f"has another form than the one of the space, {self!r}")
        return values

    @property
    def _form(self) -> str:
        return self.between if self.function is None else _name_of(self.function)

    def __repr__(self) -> str:
        if self.function is None:
            return _call_text({int(start): part for start, part in self.parts.items()}, Schedule(_between=self.between))
        return _call_text({}, Schedule(_function=self.function, _arguments=tuple(self.parts.items())))


@user_call
def schedule(values: Any, /, *, between: str = "step", **arguments: Any) -> Any:
    """Makes a value of a config that depends on the iteration: ``config["lr"].at(iteration)``.

    Trials whose schedules agree on their first iterations, and whose configs agree otherwise, need not each compute
    these: Fluid runs them once where the trainable can save.

    Example:
        >>> from fluid.search import make_sampler, make_space, schedule
        >>> warm_up = schedule({0: 0.0, 10: 0.1}, between="linear")
        >>> warm_up.at(5), warm_up.at(40)
        (0.05, 0.1)
        >>> def decay(iteration, lr, rate=0.9):
        ...     return lr * rate**iteration
        >>> schedule(decay, lr=0.5).at(0)
        0.5
        >>> grid = make_sampler("grid", make_space({"lr": schedule({0: 0.1, 20: [0.1, 0.01]})}))
        >>> [grid.ask().config["lr"] for _ in range(grid.size)]
        [schedule({0: 0.1, 20: 0.1}), schedule({0: 0.1, 20: 0.01})]

    Args:
        values: a dict of values by the iterations from which on they count, 0 the first; a function that is called
            with the iteration and ``arguments``, and gives the same value each time; or one value for all iterations.
        between: ``"step"``, so that a value holds until the next start; or ``"linear"``, so that values between two
            starts lie on a line. The last value holds for ever.
        arguments: of the function.

    The dict's values and the arguments may be what a search space may hold: distributions, lists of choices,
    :func:`~fluid.search.conditions.when`. The result is then a part of a space, and configs have the schedule. Without
    them, the result is a :class:`Schedule`, which a config and a space may hold as they hold any other value.

    Raises:
        InvalidFieldError: there is no value for iteration 0, a start is no whole number of at least 0, a value is none,
            or the function does not take the arguments.
    """
    require_one_of("between", between, _BETWEEN)
    if callable(values) and not isinstance(values, type):
        if between != "step":
            raise InvalidFieldError("between", between, "is for values by their starts, not for a function")
        for name, part in arguments.items():
            _require_part(name, part)
        try:
            if (signature := _signature_of(values)) is not None:
                signature.bind(0, **arguments)
        except TypeError as error:
            reason = f"must be a function that takes an iteration and the arguments given: {error}"
            raise InvalidFieldError("values", values, reason) from error
        if arguments and all(isinstance(part, When) for part in arguments.values()):
            reason = "is in some configs only, as are all arguments: put when(...) around the schedule"
            raise InvalidFieldError(*next(iter(arguments.items())), reason)
        parts, function = arguments, values
    else:
        if arguments:
            raise InvalidFieldError(next(iter(arguments)), next(iter(arguments.values())), "is for a function only")
        is_dict = isinstance(values, Mapping) and list(values) != ["grid_search"]
        parts, function = _parts_by_start(values if is_dict else {0: values}, between), None
    node = ScheduleNode(dict(parts), between, function)
    return node if any(_is_drawn("values", part) for part in parts.values()) else node.made(parts)


def schedules_in(config: Any, above: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Schedule]:
    """The schedules in the dicts, lists and tuples of a config, by the keys that lead to them."""
    if isinstance(config, Schedule):
        return {above: config}
    if not isinstance(config, Mapping | list | tuple):
        return {}
    entries = config.items() if isinstance(config, Mapping) else enumerate(config)
    found: dict[tuple[Any, ...], Schedule] = {}
    for key, value in entries:
        if isinstance(value, Schedule | Mapping | list | tuple):
            found |= schedules_in(value, (*above, key))
    return found


def with_schedules(config: Any, change: Callable[[Schedule], Any]) -> Any:
    """A copy of a config's dicts, lists and tuples whose schedules are replaced; what holds none is shared."""
    if isinstance(config, Schedule):
        return change(config)
    if not schedules_in(config):
        return config
    if isinstance(config, Mapping):
        changed: Any = copy.copy(config)  # It may be of a class of the user's.
        changed.update({key: with_schedules(value, change) for key, value in config.items()})
        return changed
    parts = [with_schedules(value, change) for value in config]
    # A named tuple takes its fields one by one.
    return type(config)(*parts) if hasattr(config, "_fields") else type(config)(parts)


def functions_in(value: Any) -> list[Callable[..., Any]]:
    """The functions of schedules in a config, or of what a space holds."""
    if isinstance(value, ScheduleNode):
        return [] if value.function is None else [value.function]
    held = list(value.choices) if isinstance(value, Choice) else value
    return [one._function for one in schedules_in(held).values() if one._function is not None]


def _signature_of(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:  # Of some that are built in.
        return None


def _parts_by_start(values: Mapping[Any, Any], between: str) -> dict[str, Any]:
    """The parts of a node, in the order of the starts."""
    starts = [_iteration_of("values", start, "starts at") for start in values]
    if 0 not in starts:
        raise InvalidFieldError(
            "values", dict(values), "has no value for iteration 0: give one, as in {0: 0.1, 20: 0.01}"
        )
    found = dict(sorted(zip(starts, values.values(), strict=True), key=lambda one: one[0]))
    for start, part in found.items():
        field = f"values[{start}]" if len(values) > 1 else "values"
        _require_part(field, part)
        if between == "linear":
            _require_on_line(field, part)
    if isinstance(found[0], When):
        reason = "must be in every config: put when(...) around the schedule, or give the value without it"
        raise InvalidFieldError("values[0]", found[0], reason)
    return {str(start): part for start, part in found.items()}


def _require_part(field: str, part: Any) -> None:
    while isinstance(part, When):
        part = part.then
    if _is_drawn(field, part):
        return
    if isinstance(part, Schedule | ScheduleNode | Mapping):
        what = (
            "a dict: give each of its names a schedule of its own" if isinstance(part, Mapping) else "a schedule itself"
        )
        raise InvalidFieldError(field, part, f"is {what}")
    require_constant(field, part)
    if isinstance(part, float | np.floating) and math.isnan(part):
        raise InvalidFieldError(field, part, "must be a value, not NaN")


def _is_drawn(field: str, part: Any) -> bool:
    try:
        found = Choice(tuple(part)) if isinstance(part, list) else part
        return isinstance(found, FloatRange | IntRange | Choice | When) or convert(found) is not None
    except InvalidFieldError as error:
        raise InvalidFieldError(field, part, str(error)) from error


def _require_on_line(field: str, part: Any) -> None:
    """Refuses what is no number, between which there are no others."""
    while isinstance(part, When):
        part = part.then
    domain = Choice(tuple(part)) if isinstance(part, list) else part if isinstance(part, Choice) else convert(part)
    if isinstance(domain, Choice):
        for one in domain.choices:
            require_number(field, one, at_least=-math.inf)
    elif domain is None and not isinstance(part, FloatRange | IntRange):
        require_number(field, part, at_least=-math.inf)


def _of_points(points: Mapping[int, Any], between: str) -> Schedule:
    values = tuple(points.values())
    if between == "linear":
        values = tuple(require_number("values", value, at_least=-math.inf) for value in values)
    return Schedule(tuple(points), values, between)


def _iteration_of(field: str, value: Any, what: str = "is") -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise InvalidFieldError(field, value, f"{what} no iteration: those are whole numbers from 0, without quotes")
    return int(value)


def _on_line(start: int, value: float, stop: int, after: float, number: int) -> float:
    if value == after:
        return value
    share = (number - start) / (stop - start)
    # Not value + share * (after - value): the difference of two large floats may be infinite.
    return value * (1.0 - share) + after * share


def _changes(values: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Values by iteration, without those that are the one before."""
    before: Any = None
    for number, value in values:
        if number == 0 or not is_same_value(before, value):
            yield number, value
        before = value


# -- functions and texts -------------------------------------------------------------------------


def _are_same_functions(one: Any, other: Any) -> bool:
    """Whether two functions are surely the same; one that was pickled by value is another object each time."""
    if one is other:
        return True
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return one is not None and other is not None and is_same_value(one, other)
    mine, theirs = (
        (it.__module__, it.__qualname__, it.__code__, it.__defaults__, it.__kwdefaults__) for it in (one, other)
    )
    # What they refer to may have changed since, so that it must be the same object or value, too.
    return mine[:3] == theirs[:3] and is_same_value(mine[3:], theirs[3:]) and is_same_value(_used(one), _used(other))


def _used(function: FunctionType) -> list[Any]:
    """What a function refers to by names of its own and of its module, in the order of the names."""
    found = inspect.getclosurevars(function)
    return [*sorted(found.nonlocals.items()), *sorted(found.globals.items())]


def _name_of(function: Any) -> str:
    if isinstance(function, functools.partial):
        given = [*map(repr, function.args), *(f"{name}={value!r}" for name, value in function.keywords.items())]
        return f"partial({', '.join([_name_of(function.func), *given])})"
    return str(getattr(function, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2]


def _call_text(points: Mapping[int, Any], made: Schedule) -> str:
    """The call that makes a schedule."""
    if made._function is not None:
        given = [_name_of(made._function), *(f"{name}={_shown(value)}" for name, value in made._arguments)]
    else:
        pairs = ", ".join(f"{start}: {_shown(value)}" for start, value in points.items())
        given = [_shown(points[0]) if list(points) == [0] else f"{{{pairs}}}"]
        given += [] if made._between == "step" else [f"between={made._between!r}"]
    return f"{NAME}({', '.join(given)})"


def _shown(value: Any) -> str:
    return repr(value.item() if isinstance(value, np.generic) else value)


def _parts_of(made: Schedule) -> tuple[str, dict[str, Any]]:
    """A schedule's form, and the values of its parts."""
    if made._function is not None:
        return _name_of(made._function), dict(made._arguments)
    return made._between, {str(start): value for start, value in zip(made._starts, made._values, strict=True)}


def with_parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """A flat config in which each text of a schedule is replaced by the values of its parts.

    Example:
        >>> from fluid.search.schedules import with_parts
        >>> with_parts({"lr": "schedule({0: 0.1, 20: 0.01})", "size": 8})
        {'lr/0': 0.1, 'lr/20': 0.01, 'size': 8}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        read = _read_text(value) if isinstance(value, str) and value.startswith(f"{NAME}(") else None
        found.update({name: value} if read is None else {f"{name}/{part}": each for part, each in read[1].items()})
    return found


def _read_text(text: str) -> tuple[str, dict[str, Any]] | None:
    """The form and the parts of a schedule of which files have the text; ``None`` if it is none, or was cut."""
    try:
        call = ast.parse(text.replace(f"{NAME}(<lambda>", f"{NAME}({_LAMBDA}", 1), mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != NAME or len(call.args) != 1:
            return None
        given = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        if not isinstance(call.args[0], ast.Name | ast.Attribute | ast.Call):
            points = ast.literal_eval(call.args[0])
            points = points if isinstance(points, dict) else {0: points}
            return given.get("between", "step"), {str(start): value for start, value in points.items()}
        return ast.unparse(call.args[0]).replace(_LAMBDA, "<lambda>"), given
    except (SyntaxError, ValueError, RecursionError):
        return None
