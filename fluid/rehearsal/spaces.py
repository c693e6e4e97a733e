"""Spaces of benchmarks: read from the files of ConfigSpace, with conditions, and written for other libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.results.metrics import is_number
from fluid.search import choice, lograndint, loguniform, randint, uniform
from fluid.search.conditions import Condition, idle_names, in_order, parents_first
from fluid.search.domains import Choice, Domain, FloatRange, IntRange
from fluid.trainables.json_form import json_form


def read_configspace(content: Mapping[str, Any]) -> tuple[dict[str, Domain], dict[str, Any], tuple[Condition, ...]]:
    """Reads a space from the JSON of ConfigSpace, as versions 0.4 to 0.6 wrote it.

    Args:
        content: what the file holds.

    Returns:
        The domains by name, the constants by name, and the conditions, parents before children.

    Raises:
        InvalidFieldError: a hyperparameter or a condition is of a kind that Fluid does not know.
    """
    domains: dict[str, Domain] = {}
    constants: dict[str, Any] = {}
    try:
        for one in content["hyperparameters"]:
            if one["type"] == "constant":
                constants[one["name"]] = one["value"]
            else:
                domains[one["name"]] = _domain(one)
        conditions = [found for one in content.get("conditions", ()) for found in _conditions(one)]
    except (KeyError, TypeError) as error:
        raise InvalidFieldError("config_space.json", content, f"is not a space of ConfigSpace: {error!r}") from error
    return domains, constants, parents_first(conditions)


def _domain(one: Mapping[str, Any]) -> Domain:
    kind = one["type"]
    if kind == "uniform_float":
        low, high, step = float(one["lower"]), float(one["upper"]), one.get("q")
        return FloatRange(low, high, log=bool(one.get("log")) and step is None, step=step)
    if kind == "uniform_int":
        step = int(one.get("q") or 1)
        return IntRange(int(one["lower"]), int(one["upper"]), log=bool(one.get("log")) and step == 1, step=step)
    if kind == "categorical":
        return Choice(tuple(one["choices"]))
    if kind == "ordinal":
        return Choice(tuple(one["sequence"]))
    raise InvalidFieldError(f"type of {one['name']}", kind, "is of a kind that Fluid does not know")


def _conditions(one: Mapping[str, Any]) -> list[Condition]:
    kind = one["type"]
    if kind == "EQ":
        return [Condition(one["child"], one["parent"], (one["value"],))]
    if kind == "IN":
        return [Condition(one["child"], one["parent"], tuple(one["values"]))]
    if kind == "AND":
        return [found for each in one["conditions"] for found in _conditions(each)]
    raise InvalidFieldError("condition", kind, "is of a kind that Fluid does not know: EQ, IN and AND are known")


def active(config: Mapping[str, Any], space: Mapping[str, Domain], conditions: Sequence[Condition]) -> dict[str, Any]:
    """The hyperparameters of a config that count.

    Raises:
        InvalidFieldError: one of them is missing.
    """
    idle = idle_names(config, conditions)
    missing = [name for name in space if name not in idle and name not in config]
    if missing:
        raise InvalidFieldError("config", dict(config), f"lacks {', '.join(missing)}")
    return {name: config[name] for name in space if name not in idle}


def flat_domains(space: Mapping[str, Any], above: str = "") -> dict[str, Domain]:
    """The domains of a space whose parts may be nested or constants, by name; nested names are joined by dots.

    Args:
        space: such as one made of a recorded run, whose configs are matched by these names.
        above: what names begin with.
    """
    found: dict[str, Domain] = {}
    for name, part in space.items():
        if isinstance(part, Mapping):
            found.update(flat_domains(part, f"{above}{name}."))
        elif isinstance(part, FloatRange | IntRange | Choice):
            found[f"{above}{name}"] = part
    return found


def _filled(space: Mapping[str, Any], values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A config: the constants of a space, and values by the names of :func:`flat_domains`; what has none is left out.

    Args:
        space: the space.
        values: of its domains.
        above: what names begin with.
    """
    found: dict[str, Any] = {}
    for name, part in space.items():
        if isinstance(part, Mapping):
            found[name] = _filled(part, values, f"{above}{name}.")
        elif not isinstance(part, FloatRange | IntRange | Choice):
            found[name] = part
        elif f"{above}{name}" in values:
            found[name] = values[f"{above}{name}"]
    return found


def suggested(trial: Any, space: Mapping[str, Any], conditions: Sequence[Condition]) -> dict[str, Any]:
    """A config suggested by an Optuna trial, of the hyperparameters that count."""
    found: dict[str, Any] = {}
    domains = flat_domains(space)
    for name in in_order(list(domains), conditions):
        if any(each.child == name and not each.holds(found.get(each.parent)) for each in conditions):
            continue
        domain = domains[name]
        if isinstance(domain, FloatRange):
            found[name] = trial.suggest_float(name, domain.low, domain.high, log=domain.log, step=domain.step)
        elif isinstance(domain, IntRange):
            found[name] = trial.suggest_int(name, domain.low, domain.high, log=domain.log, step=domain.step)
        else:
            found[name] = trial.suggest_categorical(name, _choices(domain))
    return _filled(space, found)


def configspace_of(space: Mapping[str, Any], conditions: Sequence[Condition], seed: int | None) -> Any:
    """The space as ConfigSpace's ``ConfigurationSpace``, which has no constants and no nesting: :func:`flat_domains`.

    Raises:
        InvalidFieldError: a choice is of a kind that ConfigSpace does not take.
        MissingDependencyError: ConfigSpace is not installed.
    """
    with try_import("ConfigSpace", extra="hpbandster") as imports:
        import ConfigSpace
    imports.check()
    found = ConfigSpace.ConfigurationSpace(seed=seed)
    for name, domain in flat_domains(space).items():
        if isinstance(domain, FloatRange) and domain.step is None:
            found.add(ConfigSpace.UniformFloatHyperparameter(name, domain.low, domain.high, log=domain.log))
        elif isinstance(domain, IntRange) and domain.step == 1:
            found.add(ConfigSpace.UniformIntegerHyperparameter(name, domain.low, domain.high, log=domain.log))
        elif isinstance(domain, FloatRange | IntRange):
            found.add(ConfigSpace.OrdinalHyperparameter(name, _all(domain)))
        else:
            found.add(ConfigSpace.CategoricalHyperparameter(name, _hashable_choices(name, domain)))
    by_child: dict[str, list[Any]] = {}
    for child, parent, values in conditions:
        made = ConfigSpace.InCondition(found[child], found[parent], list(values))
        by_child.setdefault(child, []).append(made)
    for each in by_child.values():
        found.add(each[0] if len(each) == 1 else ConfigSpace.AndConjunction(*each))
    return found


def tune_space_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """The space as Ray Tune's ``param_space``, constants and nested parts included.

    Raises:
        MissingDependencyError: Ray Tune is not installed.
    """
    with try_import("ray[tune]", extra="ray") as imports:
        from ray import tune
    imports.check()
    found: dict[str, Any] = {}
    for name, domain in space.items():
        if isinstance(domain, Mapping):
            found[name] = tune_space_of(domain)
        elif isinstance(domain, FloatRange) and domain.step is None:
            found[name] = (tune.loguniform if domain.log else tune.uniform)(domain.low, domain.high)
        elif isinstance(domain, IntRange) and domain.step == 1:  # Tune leaves the upper end out.
            found[name] = (tune.lograndint if domain.log else tune.randint)(domain.low, domain.high + 1)
        elif isinstance(domain, FloatRange | IntRange):
            found[name] = tune.choice(_all(domain))
        else:
            found[name] = tune.choice(_choices(domain)) if isinstance(domain, Choice) else domain
    return found


def tune_mutations_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """What Ray Tune's PBT may change in configs of the space, as its ``hyperparam_mutations``: no constants.

    Values to choose from are lists, of which PBT takes a neighbour; those of its own domains it multiplies.

    Raises:
        MissingDependencyError: Ray Tune is not installed.
    """
    drawn = tune_space_of(space)
    found: dict[str, Any] = {}
    for name, domain in space.items():
        if isinstance(domain, Mapping):
            if nested := tune_mutations_of(domain):
                found[name] = nested
        elif isinstance(domain, Choice):
            found[name] = _choices(domain)
        elif isinstance(domain, FloatRange | IntRange):
            whole = None if isinstance(domain, FloatRange) else 1
            found[name] = drawn[name] if domain.step == whole else _all(domain)
    return found


def _all(domain: FloatRange | IntRange) -> list[Any]:
    return [domain.at(index) for index in range(domain.size or 0)]


def _choices(domain: Domain) -> list[Any]:
    assert isinstance(domain, Choice)
    return list(domain.choices)


def _hashable_choices(name: str, domain: Domain) -> list[Any]:
    """Its choices, lists as tuples, which a recorded run takes for the same."""
    found = [tuple(value) if isinstance(value, list) else value for value in _choices(domain)]
    for value in found:
        try:
            hash(value)
        except TypeError as error:
            raise InvalidFieldError(f"space[{name!r}]", value, "cannot be a choice of ConfigSpace") from error
    return found


# -- recorded space ------------------------------------------------------------------------------
#
# A search space from the configs of a recorded run.


#: A positive hyperparameter whose values span this factor is drawn on a logarithmic scale.
_LOG_SPAN = 100.0
#: Numbers that take so few values, each this often on average, are choices.
_MOST_CHOICES, _REPEATED = 12, 2.0


def space_of(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the ranges and the choices that configs span, nested as these are.

    Args:
        configs: of trials, as JSON has them. What some of them lack is drawn for all.
    """
    space: dict[str, Any] = {}
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config[name] for config in configs if name in config]
        nested = [value for value in values if isinstance(value, Mapping) and value]
        space[name] = space_of(nested) if len(nested) == len(values) else _domain_of(values)
    return space


def _domain_of(values: Sequence[Any]) -> Any:
    distinct = {json.dumps(json_form(value), sort_keys=True): value for value in values}
    found = list(distinct.values())
    if len(found) == 1:
        # A plain list would mean choices.
        return choice(found) if isinstance(found[0], (list, tuple)) else found[0]
    if not all(is_number(value) for value in found):
        return choice(found)
    found.sort()
    if len(found) == 2 or (len(found) <= _MOST_CHOICES and len(values) >= _REPEATED * len(found)):
        return choice(found)
    low, high = found[0], found[-1]
    is_log = low > 0 and high / low >= _LOG_SPAN
    if all(isinstance(value, int) for value in found):
        return lograndint(low, high + 1) if is_log else randint(low, high + 1)
    return loguniform(float(low), float(high)) if is_log else uniform(float(low), float(high))
