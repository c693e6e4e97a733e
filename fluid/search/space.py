"""Search spaces: the hyperparameters of a sweep and the values that they may take."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fluid.errors import InvalidFieldError
from fluid.search.conditions import Condition, When, idle_names, in_order, parents_first
from fluid.search.conversion import TuneFunction, convert, require_constant
from fluid.search.domains import Choice, Domain, FloatRange, IntRange
from fluid.search.schedules import NAME, Schedule, ScheduleNode
from fluid.trial_fields import require_finite
from fluid.user_values import dotted, is_equal_value

Path = tuple[str, ...]

#: Stands for a value that a config does not have.
_ABSENT = object()


@dataclass(frozen=True)
class Space:
    """A search space of fixed hyperparameters.

    A hyperparameter's name is its key; the keys of nested dicts are joined by "/".

    Example:
        >>> from fluid.search import make_space, uniform
        >>> space = make_space({"layers": [1, 2], "optimizer": {"momentum": uniform(0, 1), "nesterov": True}})
        >>> space.names
        ('layers', 'optimizer/momentum')
        >>> space.config({"layers": 2, "optimizer/momentum": 0.9})
        {'layers': 2, 'optimizer': {'momentum': 0.9, 'nesterov': True}}

    Attributes:
        domains: the values of each hyperparameter, by name, in the order of the mapping.
        functions: what is computed from the rest of the config (Ray Tune's ``sample_from``), by name.
        paths: every name, also those of constants, with its keys.
        constants: values that are the same in every config, by name; an empty dict of a nested space is one.
        conditions: with which values of others a name is in a config at all, parents before children.
        schedules: schedules whose values are among these, by name; the values have names below it (``lr/20``).
    """

    domains: Mapping[str, Domain]
    functions: Mapping[str, TuneFunction]
    paths: Mapping[str, Path]
    constants: Mapping[str, Any]
    conditions: tuple[Condition, ...] = ()
    schedules: Mapping[str, ScheduleNode] = dataclasses.field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the hyperparameters: of all that is neither a constant nor computed."""
        return tuple(self.domains)

    @property
    def parents_first(self) -> tuple[str, ...]:
        """:attr:`names`, each behind those that it depends on."""
        return tuple(in_order(self.names, [one for one in self.conditions if one.child in self.domains]))

    def is_idle(self, name: str, values: Mapping[str, Any]) -> bool:
        """Whether a config of these values does not have a name; those that the name depends on must be there."""
        return bool(self.conditions) and name in idle_names({**self.constants, **values}, self.conditions)

    def values_in(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the hyperparameters in a config, by name; of those that the config has."""
        found = {}
        for name in self.domains:
            value: Any = config
            for depth, key in enumerate(self.paths[name]):
                node = self.schedules.get(_name(self.paths[name][:depth])) if self.schedules else None
                if node is not None and value is not _ABSENT:
                    value = _values_in(node, value)
                value = value.get(key, _ABSENT) if isinstance(value, Mapping) else _ABSENT
            if value is not _ABSENT:
                found[name] = value
        return found

    def sample(self, rng: np.random.Generator, fixed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A config whose values are drawn in the order of the mapping.

        Args:
            rng: what the values are drawn with. Functions of Ray Tune's ``sample_from`` bring their own randomness.
            fixed: values by name that are not drawn, as :meth:`check_point` returns them.
        """
        given = fixed or {}
        drawn = {name: given[name] if name in given else domain.sample(rng) for name, domain in self.domains.items()}
        return self.config({**given, **drawn})

    def config(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The config, nested as the space, of a value for each hyperparameter.

        Args:
            values: values by name: one for each of :attr:`names`, also of those that the config does not have, whose
                values are left aside; for a name of ``functions`` one may be given.

        Raises:
            InvalidFieldError: a function of ``sample_from`` raised an error.
        """
        config: dict[str, Any] = {}
        idle = idle_names({**self.constants, **values}, self.conditions) if self.conditions else ()
        paths = {name: path for name, path in self.paths.items() if name not in idle}
        for name, path in paths.items():
            if name in self.constants:
                # Every config has its own empty dicts.
                value = self.constants[name]
                _set(config, path, {} if type(value) is dict else value)
            elif name in values:
                _set(config, path, values[name])
        waiting = [name for name in self.functions if name not in values and name in paths]
        if not self.schedules:
            self._compute(config, waiting)
            return _in_order(config, paths.values())
        whole = [name for name in self.schedules if not any(one.startswith(f"{name}/") for one in waiting)]
        self._make_schedules(config, whole)  # What is computed may ask them.
        self._compute(config, waiting)
        self._make_schedules(config, [name for name in self.schedules if name not in whole])
        above = (path[:-1] if _name(path[:-1]) in self.schedules else path for path in paths.values())
        return _in_order(config, dict.fromkeys(above))

    def _make_schedules(self, config: dict[str, Any], names: Sequence[str]) -> None:
        """Puts schedules in the place of their values."""
        for name in names:
            path = next(path for path in self.paths.values() if _name(path[:-1]) == name)[:-1]
            within: Any = config
            for key in path[:-1]:
                within = within.get(key, {})
            if path[-1] in within:  # Else a condition does not hold.
                node, parts = self.schedules[name], within[path[-1]]
                within[path[-1]] = node.made({part: parts[part] for part in node.parts if part in parts})

    def read(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config of the space as it was before JSON made texts of its schedules.

        Raises:
            InvalidFieldError: a text is that of no schedule of the space, or was cut.
        """
        if not any(isinstance(value, str) and value.startswith(f"{NAME}(") for _, value in dotted(config)):
            return config
        return self.config(self.check_point("config", config))

    def check_point(self, field: str, point: object) -> dict[str, Any]:
        """The values by name of a config, or of a part of one, that the user gave.

        Raises:
            InvalidFieldError: the point has a name that the space does not have, or a value that it does not allow; or
                a name that no config has with the other values of the point.
        """
        if not isinstance(point, Mapping):
            raise InvalidFieldError(field, point, "must be a dict of names and values")
        values = dict(self._point_values(field, point, ()))
        known = {**self.constants, **values}
        for condition in self.conditions:
            name, parent = condition.child, condition.parent
            if name in values and not (parent in known and condition.holds(known[parent])):
                but = f", not {known[parent]!r}" if parent in known else f": give {parent!r}, too"
                where = field + "".join(f"[{key!r}]" for key in self.paths[name])
                raise InvalidFieldError(where, values[name], f"is in a config only if {condition.text}{but}")
        return values

    def _point_values(self, field: str, point: Mapping[Any, Any], above: Path) -> Iterator[tuple[str, Any]]:
        for key, value in point.items():
            where, path = f"{field}[{key!r}]", (*above, key)
            name = next((name for name, known in self.paths.items() if known == path), None)
            if name is None and isinstance(key, str) and _name(path) in self.schedules:
                yield from self._point_values(where, self.schedules[_name(path)].values_of(where, value), path)
            elif name is None and any(known[: len(path)] == path for known in self.paths.values()):
                if not isinstance(value, Mapping):
                    raise InvalidFieldError(where, value, "must be a dict, as in the space")
                yield from self._point_values(where, value, path)
            elif name is None:
                raise InvalidFieldError(where, value, f"is not in the space, which has {', '.join(self.paths)}")
            elif name in self.domains:
                yield name, self.domains[name].check(where, _read_again(self.domains[name], value))
            elif name in self.functions:
                yield name, value
            else:
                constant = Choice((self.constants[name],))
                constant.check(where, _read_again(constant, value))

    def _compute(self, config: dict[str, Any], waiting: list[str]) -> None:
        """Sets the values of ``sample_from``; one may need another, in whatever order they stand."""
        while waiting:
            failed: list[tuple[str, Exception]] = []
            for name in waiting:
                try:
                    _set(config, self.paths[name], self.functions[name].call(config))
                except Exception as error:
                    failed.append((name, error))
            if len(failed) == len(waiting):
                name, first = failed[0]
                problem = f"raised {type(first).__name__}: {first}"
                raise InvalidFieldError(field_of(self.paths[name]), self.functions[name].source, problem) from first
            waiting = [name for name, _ in failed]


@dataclass(frozen=True)
class ConditionalSpace:
    """A search space given as a function of an Optuna trial: which hyperparameters there are may depend on others.

    Example:
        >>> from fluid.search import make_sampler, make_space
        >>> def space(trial):
        ...     if trial.suggest_categorical("optimizer", ["adam", "sgd"]) == "sgd":
        ...         trial.suggest_float("momentum", 0.0, 1.0)
        >>> sampler = make_sampler("random", make_space(space), seed=0)
        >>> configs = [sampler.ask().config for _ in range(10)]
        >>> all(("momentum" in config) == (config["optimizer"] == "sgd") for config in configs)
        True

    Attributes:
        function: takes an Optuna trial and returns a config, or None if the config is ``trial.params``.
    """

    function: Callable[[Any], Mapping[str, Any] | None]

    def check_point(self, field: str, point: object) -> dict[str, Any]:
        """The values by name that the user gave; whether the function suggests these names is known when it ran.

        Raises:
            InvalidFieldError: the point is not a dict of names and values.
        """
        if not isinstance(point, Mapping) or not all(isinstance(key, str) for key in point):
            raise InvalidFieldError(field, point, "must be a dict of names and values")
        return dict(point)

    def config(self, trial: Any) -> dict[str, Any]:
        """The config of an Optuna trial; raises what the user's function raises.

        Raises:
            InvalidFieldError: the function returned neither a dict nor None.
        """
        config = self.function(trial)
        if config is None:
            return dict(trial.params)
        if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
            raise InvalidFieldError("space", config, "must return a dict of names and values, or None")
        return dict(config)


def make_space(space: object) -> Space | ConditionalSpace:
    """Reads a search space.

    A mapping has a value for each name: an Optuna distribution, a domain of Ray Tune or of :mod:`fluid.search`, a list
    of choices, a constant, a schedule (:func:`~fluid.search.schedules.schedule`), a mapping again, or one of these
    under a condition (:func:`~fluid.search.conditions.when`). Tuples, sets and arrays are refused, because they could
    mean choices, a range or one value.

    Args:
        space: the mapping, or a function of an Optuna trial.

    Raises:
        InvalidFieldError: the space, or something in it, means nothing; the error names it
            (``space['optimizer']['lr']``).

    Example:
        >>> from fluid.search import loguniform, make_space
        >>> make_space({"lr": loguniform(1e-5, 1e-1), "layers": [1, 2, 3], "epochs": 10}).names
        ('lr', 'layers')
        >>> make_space({"lr": (1e-5, 1e-1)})
        Traceback (most recent call last):
        fluid.errors.InvalidFieldError: space['lr']=(1e-05, 0.1): a tuple may mean choices, a range or one value; \
write [a, b] for choices, uniform(low, high) for a range, and a list of this one value for a constant
    """
    if isinstance(space, Mapping) and convert(space) is None:
        require_finite("space", space)
        found = list(_read(space, ()))
        made = Space(
            domains={_name(one.path): one.value for one in found if one.kind == "domain"},
            functions={_name(one.path): one.value for one in found if one.kind == "function"},
            paths=_named(one.path for one in found if one.kind != "schedule"),
            constants={_name(one.path): one.value for one in found if one.kind == "constant"},
            schedules={_name(one.path): one.value for one in found if one.kind == "schedule"},
        )
        return replace(made, conditions=_conditions_of(found, made)) if any(one.whens for one in found) else made
    if inspect.isroutine(space) or (callable(space) and not isinstance(space, type)):
        try:
            inspect.signature(space).bind(object())
        except TypeError as error:
            raise InvalidFieldError("space", space, "must take one argument, an Optuna trial") from error
        return ConditionalSpace(space)
    raise InvalidFieldError("space", space, "must be a dict of names and values, or a function of an Optuna trial")


class _Entry(NamedTuple):
    """An entry of a mapping.

    Attributes:
        path: its keys.
        kind: ``"domain"``, ``"function"``, ``"constant"`` or ``"schedule"``, whose parts are entries, too.
        value: the domain, the function, the constant or the schedule.
        whens: what it depends on, each with the path of the dict in which it stands.
    """

    path: Path
    kind: str
    value: Any
    whens: tuple[tuple[Path, When], ...]


def _read(space: Mapping[Any, Any], above: Path, under: tuple[tuple[Path, When], ...] = ()) -> Iterator[_Entry]:
    """Every entry of a mapping, nested ones included.

    Args:
        space: the mapping.
        above: its path.
        under: what all of it depends on.
    """
    for key, value in space.items():
        path = (*above, key)
        if not isinstance(key, str) or not key:
            raise InvalidFieldError(f"key of {field_of(above)}", key, "must be a non-empty string")
        whens = under
        while isinstance(value, When):
            whens, value = (*whens, (above, value)), value.then
            if isinstance(value, Mapping | list | tuple):
                require_finite(field_of(path), value)
        if isinstance(value, ScheduleNode):
            yield _Entry(path, "schedule", value, ())
            yield from _read(value.parts, path, whens)
            continue
        domain = _read_domain(path, value)
        if domain is not None:
            yield _Entry(path, "function" if isinstance(domain, TuneFunction) else "domain", domain, whens)
        elif isinstance(value, Mapping) and value:
            yield from _read(value, path, whens)
        else:
            constant = {} if isinstance(value, Mapping) else require_constant(field_of(path), value)
            yield _Entry(path, "constant", constant, whens)


def _conditions_of(entries: Sequence[_Entry], space: Space) -> tuple[Condition, ...]:
    """What the entries of a space depend on.

    Raises:
        InvalidFieldError: on what is not there, never has such a value, or depends on them itself.
    """
    found = [
        Condition(_name(one.path), *_parent_of(one.path, above, given, space))
        for one in entries
        for above, given in one.whens
    ]
    try:
        return parents_first(found)
    except InvalidFieldError as error:
        ring: Any = error.value
        first = next(one for one in found if one.child in ring and one.parent in ring)
        reason = f"depends on {first.parent!r}, which depends on it, too"
        raise InvalidFieldError(field_of(space.paths[first.child]), f"when({first.text})", reason) from None


def _parent_of(path: Path, above: Path, given: When, space: Space) -> tuple[str, tuple[Any, ...]]:
    """The name that a condition means, and its values."""
    scopes = ("/".join((*above[:depth], given.parent)) for depth in range(len(above), -1, -1))
    name = next((one for one in scopes if one in space.paths), None)
    field = field_of(path)
    if name is None:
        others = ", ".join(one for one in space.paths if one != _name(path))
        reason = f"depends on {given.parent!r}, which is not in the space{f'; it has {others}' if others else ''}"
        raise InvalidFieldError(field, given, reason)
    if name in space.constants:
        constant = space.constants[name]
        return name, tuple(constant if is_equal_value(constant, value) else value for value in given.values)
    domain = space.domains.get(name)
    if domain is None or domain.size is None:
        how = "is computed" if domain is None else "is continuous"
        reason = f"depends on {name!r}, which {how}: it must be of choices or whole numbers"
        raise InvalidFieldError(field, given, reason)
    try:
        return name, tuple(domain.check(name, value) for value in given.values)
    except InvalidFieldError as error:
        raise InvalidFieldError(field, given, f"is in no config: {error}") from error


def _read_domain(path: Path, value: object) -> Domain | TuneFunction | None:
    if isinstance(value, FloatRange | IntRange | Choice):
        domain: Domain | TuneFunction | None = value
    else:
        try:
            domain = Choice(tuple(value)) if isinstance(value, list) else convert(value)
        except InvalidFieldError as error:
            raise InvalidFieldError(field_of(path), value, str(error)) from error
    if isinstance(domain, Choice) and any(_holds_domain(one) for one in domain.choices):
        reason = (
            "a choice holds a distribution; give that a name of its own, as in "
            "{'optimizer': ['adam', 'sgd'], 'momentum': when('optimizer', 'sgd', uniform(0, 0.99))}"
        )
        raise InvalidFieldError(field_of(path), value, reason)
    return domain


def _holds_domain(value: object) -> bool:
    if isinstance(value, Mapping) and list(value) != ["grid_search"]:
        return any(_holds_domain(one) for one in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_domain(one) for one in value)
    return isinstance(value, FloatRange | IntRange | Choice | When | ScheduleNode) or convert(value) is not None


def _values_in(node: ScheduleNode, value: Any) -> Mapping[str, Any]:
    """The values of a schedule's parts in a config; none if the config is of another space."""
    try:
        return node.values_of(NAME, value)
    except InvalidFieldError:
        return {}


def _read_again(domain: Domain, value: object) -> object:
    """The schedule among choices of which a file had the text."""
    if isinstance(value, str) and value.startswith(NAME) and isinstance(domain, Choice):
        return next((one for one in domain.choices if isinstance(one, Schedule) and repr(one) == value), value)
    return value


def _named(paths: Iterator[Path]) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for path in paths:
        other = named.setdefault(_name(path), path)
        if other is not path:
            raise InvalidFieldError(field_of(path), _name(path), f"has the same name as {field_of(other)}")
    return named


def _name(path: Path) -> str:
    return "/".join(path)


def field_of(path: Sequence[Any]) -> str:
    """How an error names an entry of the space."""
    return "space" + "".join(f"[{key!r}]" for key in path)


def _set(config: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        config = config.setdefault(key, {})
    config[path[-1]] = value


def _in_order(config: dict[str, Any], paths: Any) -> dict[str, Any]:
    """The config with its keys in the order of the space: what is computed was set last."""
    ordered: dict[str, Any] = {}
    for path in paths:
        value: Any = config
        for key in path:
            value = value[key]
        _set(ordered, path, value)
    return ordered
