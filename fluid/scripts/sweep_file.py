"""Sweep files: those of ``fluid run``, with the names of its options, and those of W&B as far as they mean something.

What is read is a mapping, so that this is pure but for :func:`load_file`. Nothing is left out silently: what has no
meaning is refused, or said in a note.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluid._imports import try_import
from fluid.errors import InvalidFieldError
from fluid.scripts.command import value_of
from fluid.scripts.options import BY_NAME, PEERS
from fluid.scripts.space_text import parse_parameter
from fluid.search.domains import lograndint, loguniform, randint, uniform
from fluid.search.stop_rules import Target


@dataclass
class SweepFile:
    """What a sweep file says.

    Attributes:
        command: the words of the command; none if it is given elsewhere.
        space: as for ``fluid.run``.
        options: values of :data:`fluid.scripts.options.OPTIONS` by name.
        notes: lines about what has no meaning here.
    """

    command: list[str] = field(default_factory=list)
    space: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def load_file(path: str) -> SweepFile:
    """Reads a sweep file: JSON if its name ends so, else YAML.

    Raises:
        InvalidFieldError: it cannot be read, or something in it cannot be used.
        MissingDependencyError: it is YAML, and PyYAML is not installed.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFieldError("file", path, f"cannot be read: {error}") from error
    if path.endswith(".json"):
        try:
            content = json.loads(text)
        except ValueError as error:
            raise InvalidFieldError("file", path, f"is no JSON: {error}") from error
    else:
        with try_import("PyYAML (or a sweep file of JSON)", extra="yaml") as imports:
            import yaml
        imports.check()
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InvalidFieldError("file", path, f"is no YAML: {error}") from error
    return read_sweep_file(content)


def read_sweep_file(content: Any) -> SweepFile:
    """Reads the content of a sweep file.

    Example:
        >>> from fluid.scripts.sweep_file import read_sweep_file
        >>> found = read_sweep_file({"program": "train.py", "method": "random", "run_cap": 9,
        ...     "metric": {"name": "loss", "goal": "minimize"}, "parameters": {"layers": {"values": [1, 2]}}})
        >>> found.command, found.space, found.options
        (['/usr/bin/env', 'python', 'train.py', '--layers={layers}'], {'layers': [1, 2]}, \
{'algorithm': 'random', 'samples': 9, 'metric': 'loss', 'mode': 'min'})

    Raises:
        InvalidFieldError: something in it cannot be used.
    """
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise InvalidFieldError("file", content, "must be a mapping of fields, such as space:, metric: and command:")
    is_wandb = any(key in content for key in ("program", "parameters", "method"))
    return _wandb(content) if is_wandb else _own(content)


def _own(content: Mapping[str, Any]) -> SweepFile:
    found = SweepFile()
    for key, value in content.items():
        name = key.replace("-", "_")
        if name == "command":
            found.command = shlex.split(value) if isinstance(value, str) else _words("command", value)
        elif name == "space":
            found.space = _own_space("space", value)
        elif name in BY_NAME or name in PEERS:  # The latter are refused with their names here.
            found.options[name] = _joined(value) if name in ("metric", "mode") else _exponent(value)
        else:
            raise InvalidFieldError(key, value, f"is no field: there are command, space, {', '.join(sorted(BY_NAME))}")
    return found


def _joined(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _own_space(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidFieldError(where, value, "must be a mapping of parameters, such as lr: log:1e-5:1e-1")
    space: dict[str, Any] = {}
    for name, given in value.items():
        here = f"{where}[{name!r}]"
        if isinstance(given, Mapping):
            space[str(name)] = _own_space(here, given)
        elif isinstance(given, list):
            space[str(name)] = [_exponent(one) for one in given]
        else:
            space[str(name)] = parse_parameter(given, here) if isinstance(given, str) else given
    return space


def _exponent(value: Any) -> Any:
    """A number such as 1e-5, which YAML reads as text; else the value."""
    if isinstance(value, str) and "e" in value.lower():
        number = value_of(value)
        return number if isinstance(number, float) else value
    return value


def _words(where: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise InvalidFieldError(where, value, "must be a list of words, or one text")
    return [str(word) for word in value]


# -- sweep files of W&B --------------------------------------------------------------------------


_METHODS = {"grid": "grid", "random": "random", "bayes": "tpe"}
#: Fields that say something about W&B's server only.
_OF_THE_SERVER = ("project", "entity", "description", "controller", "imports", "settings", "job", "queue", "kind")
_DISTRIBUTIONS = (
    *("constant", "categorical", "int_uniform", "uniform", "q_uniform"),
    *("log_uniform", "log_uniform_values", "q_log_uniform_values"),
)


def _wandb(content: Mapping[str, Any]) -> SweepFile:
    found = SweepFile()
    known = {"program", "command", "method", "metric", "parameters", "early_terminate", "run_cap", "name"}
    for key, value in content.items():
        if key in _OF_THE_SERVER:
            found.notes.append(f"{key} of the sweep file has no meaning here, and is left out")
        elif key in BY_NAME and key not in known:
            found.options[key] = value  # A field of fluid run's own beside those of W&B.
        elif key not in known:
            raise InvalidFieldError(key, value, "is no field of a sweep file that Fluid knows")
    method = content.get("method")
    if method not in _METHODS:
        raise InvalidFieldError("method", method, f"must be one of {', '.join(_METHODS)}")
    found.options["algorithm"] = _METHODS[method]
    if method == "bayes":
        found.notes.append("method: bayes is Fluid's tpe, a tree-structured Parzen estimator")
    if "run_cap" in content:
        found.options["samples"] = content["run_cap"]
    if "name" in content:
        found.options["name"] = content["name"]
    _metric(found, content.get("metric"))
    found.space = _parameters("parameters", content.get("parameters"))
    if any(isinstance(value, Mapping) for value in found.space.values()):
        found.notes.append("nested parameters are passed one by one, as in --optimizer.lr=0.1")
    if "early_terminate" in content:
        _early_terminate(found, content["early_terminate"])
    found.command = _command(content, found)
    return found


def _metric(found: SweepFile, metric: Any) -> None:
    if metric is None:
        return
    if not isinstance(metric, Mapping) or "name" not in metric:
        raise InvalidFieldError("metric", metric, "must have a name")
    goals = {"minimize": "min", "maximize": "max"}
    goal = metric.get("goal", "minimize")
    if goal not in goals:
        raise InvalidFieldError("metric.goal", goal, "must be minimize or maximize")
    # W&B's own default is to minimize; where the file does not say it, the name may.
    found.options |= {"metric": str(metric["name"])} | ({"mode": goals[goal]} if "goal" in metric else {})
    if "target" in metric:
        found.options["stop"] = Target(_exponent(metric["target"]))
    _require_known("metric", metric, ("name", "goal", "target"))


def _require_known(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for key, value in given.items():
        if key not in known:
            raise InvalidFieldError(f"{where}.{key}", value, f"has no meaning here: there are {', '.join(known)}")


def _early_terminate(found: SweepFile, given: Any) -> None:
    if not isinstance(given, Mapping) or given.get("type") != "hyperband":
        raise InvalidFieldError("early_terminate", given, "must have type: hyperband")
    _require_known("early_terminate", given, ("type", "min_iter", "max_iter", "s", "eta", "strict"))
    if found.options["algorithm"] != "random":
        how = found.options["algorithm"]
        found.notes.append(f"early_terminate is left out: with {how}, each trial runs to its budget")
        if "max_iter" in given:
            found.options["budget"] = given["max_iter"]
        return
    eta = given.get("eta", 3)
    found.options |= {"algorithm": "asha", "eta": eta}
    if "min_iter" in given:
        found.options["min_budget"] = given["min_iter"]
    if "max_iter" in given:
        found.options["budget"] = given["max_iter"]
        if "s" in given and "min_iter" not in given:
            found.options["min_budget"] = max(1, int(given["max_iter"] / eta ** given["s"]))
    elif "s" in given:
        raise InvalidFieldError("early_terminate.s", given["s"], "needs max_iter")
    found.notes.append("early_terminate: hyperband is Fluid's asha: trials that fall behind at a rung wait, and end")
    if "strict" in given:
        found.notes.append("early_terminate.strict has no meaning here, and is left out")


def _parameters(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not given:
        raise InvalidFieldError(where, given, "must be a mapping of parameters")
    space: dict[str, Any] = {}
    for name, one in given.items():
        here = f"{where}.{name}"
        if not isinstance(one, Mapping):
            raise InvalidFieldError(here, one, "must have value, values, min and max, or parameters")
        space[str(name)] = _parameters(f"{here}.parameters", one["parameters"]) if "parameters" in one else (
            _parameter(here, {key: _exponent(value) for key, value in one.items()})
        )  # fmt: skip
    return space


def _parameter(here: str, one: dict[str, Any]) -> Any:
    kind = one.get("distribution")
    if kind is not None and kind not in _DISTRIBUTIONS:
        raise InvalidFieldError(f"{here}.distribution", kind, f"must be one of {', '.join(_DISTRIBUTIONS)}")
    _require_known(here, one, ("value", "values", "min", "max", "q", "distribution"))
    if "value" in one:
        return one["value"]
    if "values" in one:
        if not isinstance(one["values"], list) or not one["values"]:
            raise InvalidFieldError(f"{here}.values", one["values"], "must be a list of values")
        return [_exponent(value) for value in one["values"]]
    if "min" not in one or "max" not in one:
        raise InvalidFieldError(here, one, "must have value, values, or min and max")
    low, high, q = one["min"], one["max"], one.get("q", 1.0)
    are_whole = isinstance(low, int) and isinstance(high, int)
    try:
        if kind == "int_uniform" or (kind is None and are_whole):
            return randint(low, high + 1)
        if kind == "q_uniform":
            return randint(low, high + 1, int(q)) if are_whole and float(q).is_integer() else uniform(low, high, step=q)
        if kind == "q_log_uniform_values" and are_whole and q == 1:
            return lograndint(low, high + 1)
        if kind == "q_log_uniform_values":
            raise InvalidFieldError("q", q, "must be 1, with whole numbers for min and max")
        if kind == "log_uniform":
            return loguniform(math.exp(low), math.exp(high))
        return loguniform(low, high) if kind == "log_uniform_values" else uniform(low, high)
    except (InvalidFieldError, TypeError) as error:
        raise InvalidFieldError(here, one, str(error)) from error


def _command(content: Mapping[str, Any], found: SweepFile) -> list[str]:
    words = content.get("command", ["${env}", "${interpreter}", "${program}", "${args}"])
    words = shlex.split(words) if isinstance(words, str) else _words("command", words)
    if not any(word.startswith("${args") for word in words):
        found.options["config_in_env"] = True
        found.notes.append("the command has no ${args}: the parameters are in wandb.config, and in FLUID_CONFIG")
    return [filled for word in words for filled in _expanded(word, content, list(_names(found.space)), found)]


def _expanded(word: str, content: Mapping[str, Any], names: list[str], found: SweepFile) -> list[str]:
    """A word of W&B's command as words of Fluid's."""
    lists = {
        "${args}": [f"--{name}={{{name}}}" for name in names],
        "${args_no_hyphens}": [f"{name}={{{name}}}" for name in names],
        "${args_no_boolean_flags}": [f"--{name}={{{name}}}" for name in names],
        "${args_json}": ["{config}"],
        "${args_json_file}": ["{config_file}"],
    }
    if word in lists:
        if word == "${args_no_boolean_flags}" and any(type(one) is bool for one in _values(found.space)):
            raise InvalidFieldError("command", word, "has no meaning here with boolean parameters: use ${args}")
        return lists[word]
    word = word.replace("{", "{{").replace("}", "}}")
    if "$" not in word:
        return [word]
    word = word.replace("${{env}}", "/usr/bin/env").replace("${{interpreter}}", "python")
    if "${{program}}" in word:
        if "program" not in content:
            raise InvalidFieldError("program", None, "must be given: the command has ${program}")
        word = word.replace("${{program}}", str(content["program"]).replace("{", "{{").replace("}", "}}"))
    if "${{" in word:
        raise InvalidFieldError("command", word.replace("{{", "{").replace("}}", "}"), "has a macro that Fluid lacks")
    return [word]


def _names(space: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in space.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{above}{name}.")
        else:
            yield f"{above}{name}"


def _values(space: Mapping[str, Any]) -> Iterator[Any]:
    for value in space.values():
        if isinstance(value, Mapping):
            yield from _values(value)
        else:
            yield from value if isinstance(value, list) else [value]
