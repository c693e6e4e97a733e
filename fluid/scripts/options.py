"""The options of ``fluid run``: one table, from which the command line and the fields of a sweep file are read; pure.

A further argument of ``fluid.run`` is a row here, or, if a command line cannot say it, one of :data:`LEFT_OUT`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fluid.errors import InvalidFieldError, parse_duration
from fluid.keeping import parse_bytes
from fluid.resources import MemoryNeed
from fluid.scripts.command import value_of


class Option(NamedTuple):
    """An option.

    Attributes:
        name: the argument's in Python, and the field's in a sweep file; ``--`` and dashes on the command line.
        part: where it goes: ``"run"``, an argument of ``fluid.run``; ``"sharing"``, ``"goals"``, ``"keep"``,
            ``"output"``, a field of that object; ``"trial"``, a field of its ``trial_options``; ``"script"``, an
            argument of :meth:`fluid.scripts.trainable.Script.checked`.
        meaning: for ``--help``.
        metavar: of its value; empty for a flag.
        read: makes the value of the text; raises :class:`InvalidFieldError`, given the field's name.
        repeats: whether it may be given several times.
    """

    name: str
    part: str
    meaning: str
    metavar: str = ""
    read: Callable[[str, str], Any] = lambda name, text: text
    repeats: bool = False

    @property
    def flag(self) -> str:
        """How the command line has it."""
        return f"--{self.name.replace('_', '-')}"

    def value(self, given: Any) -> Any:
        """The value of what a command line (text, or True) or a sweep file (also other types) gives.

        Raises:
            InvalidFieldError: it cannot be used.
        """
        if self.repeats:
            listed = given if isinstance(given, list) else [given]
            return tuple(self.read(self.name, one) if isinstance(one, str) else one for one in listed)
        if not self.metavar and not isinstance(given, bool):
            raise InvalidFieldError(self.name, given, "must be true or false")
        return self.read(self.name, given) if self.metavar and isinstance(given, str) else given


def _number(name: str, text: str) -> Any:
    number = value_of(text)
    if isinstance(number, (bool, str)) or number is None:
        raise InvalidFieldError(name, text, "must be a number")
    return number


def _or_none(name: str, text: str) -> Any:
    return None if text.lower() == "none" else _number(name, text)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidFieldError(name, text, f"must be JSON: {error}") from error


def _seconds(name: str, text: str) -> float:
    plain = value_of(text)
    is_number = isinstance(plain, (int, float)) and not isinstance(plain, bool)
    return float(plain) if is_number else parse_duration(name, text)


def _memory(name: str, text: str) -> Any:
    size = parse_bytes(name, text)
    return None if size is None else MemoryNeed(float(size))


def _names(name: str, text: str) -> Any:
    parts = text.split(",")
    return tuple(parts) if len(parts) > 1 else text


def _stop(name: str, text: str) -> Any:
    found = {}
    for part in text.split(","):
        metric, equals, value = part.rpartition("=")
        if not equals or not metric:
            raise InvalidFieldError(name, text, "must be METRIC=VALUE, such as accuracy=0.95")
        found[metric] = _number(name, value)
    return found


def _devices(name: str, text: str) -> Any:
    number = value_of(text)
    return number if isinstance(number, int) and not isinstance(number, bool) else text


_FROM = (
    "read reports by this only: fluid (fluid.report), json (lines on stdout), wandb (wandb.log), tensorboard:DIR or"
    " mlflow:DIR; repeatable (default: the first three)"
)
_REGEX = "also read lines of output that match; named groups are metrics, as in 'loss=(?P<loss>.+)'; repeatable"
_KEY = (
    "a field of reports that counts up, such as epoch: where a script goes on from a checkpoint, reports that do not"
    " exceed the last one counted are repeats, and left out"
)
_FLAG = "appended to the command where a trial goes on from {checkpoint}: '--resume {checkpoint}'; '' for nothing"

OPTIONS: tuple[Option, ...] = (
    Option("metric", "run", "the metric that trials are compared by; several separated by commas", "NAME", _names),
    Option("mode", "run", "min or max, one per metric (default: what the metric's name says)", "MODE", _names),
    Option("algorithm", "run", "asha (default), sha, hyperband, bohb, random, grid, tpe or pbt", "NAME"),
    Option("samples", "run", "number of trials (default: as of fluid.run)", "N", _number),
    Option("budget", "run", "most iterations of a trial; an iteration is one report (default: 27)", "N", _number),
    Option("min_budget", "run", "iterations at the first rung (default: 1)", "N", _number),
    Option("eta", "run", "one trial in so many goes on at each rung (default: 3)", "N", _number),
    Option("time_budget_s", "run", "end for now after this time, such as 600 or 10m", "TIME", _seconds),
    Option("deadline", "run", "when all is to have ended, such as 2h: as few devices as meet it", "TIME"),
    Option("stop", "run", "end a trial that reaches this value", "METRIC=VALUE", _stop),
    Option("seed", "run", "of the configs; none for others in each call (default: 0)", "N", _or_none),
    Option("points", "run", "a config to try first, as JSON; repeatable", "JSON", _json, repeats=True),
    Option("name", "run", "the sweep's (default: the script's and the algorithm's)", "NAME"),
    Option("run_dir", "run", "the run folder (default: a new one in ~/fluid_runs)", "DIR"),
    Option("resume", "run", "go on with the sweep of this name in --run-dir, if it has one"),
    Option(
        "if_exists", "run", "where --run-dir holds a run: error (default), resume, overwrite or new (beside it)", "HOW"
    ),
    Option("retry_failed", "run", "with --resume, also try again what has failed"),
    Option("join", "run", "work the sweep in --run-dir together with others that make this call, as of a Slurm array"),
    Option("devices", "run", "how many devices, or which: 2, 0,1, cuda:1, cpu (default: all)", "DEVICES", _devices),
    Option("packing", "sharing", "how trials share a device: auto (default), lane, timeslice, mps or off", "WAY"),
    Option("max_packing", "sharing", "most processes with trials on a device (default: 4)", "N", _number),
    Option("keep", "keep", "which checkpoints outlive the run: none, last or best:k", "WHICH"),
    Option("checkpoint_bytes", "keep", "most bytes of these, such as 10GB", "SIZE"),
    Option("budget_usd", "goals", "most US dollars to spend on devices", "USD", _number),
    Option("price_per_device_hour", "goals", "US dollars for a device-hour", "USD", _number),
    Option("verbose", "output", "0: no progress, and not what scripts print (default: 1)", "N", _number),
    Option("metrics_port", "run", "serve metrics for Prometheus here", "PORT", lambda name, text: value_of(text)),
    Option("on_oom", "run", "what a trial that ran out of memory counts as: fail (default) or worst", "WHAT"),
    Option("max_concurrent", "run", "most trials under way at once", "N", _number),
    Option("owner", "run", "whose sweep it is", "NAME"),
    Option("priority", "run", "of the sweep (default: 1)", "X", _number),
    Option("preempt", "run", "less important trials make room for it"),
    Option("weight", "run", "how much it counts that it is late or waits (default: 1)", "X", _number),
    Option("devices_per_trial", "trial", "devices of each trial: 2, or 0.5 for half of one", "N", _number),
    Option("memory", "trial", "device memory that each trial needs, such as 4GB (default: measured)", "SIZE", _memory),
    Option("threads", "trial", "CPU threads of each trial", "N", _number),
    Option("chdir", "trial", "the script's working directory is the trial's own folder"),
    Option("iteration_timeout_s", "trial", "a report that takes longer counts as hung, such as 30m", "TIME", _seconds),
    Option("metric_from", "script", _FROM, "KIND", repeats=True),
    Option("metric_regex", "script", _REGEX, "REGEX", repeats=True),
    Option("iteration_key", "script", _KEY, "NAME"),
    Option("checkpoint_flag", "script", _FLAG, "WORDS"),
    Option("config_in_env", "script", "the script reads its parameters from FLUID_CONFIG, as JSON: append none"),
    Option("grace_s", "script", "time from SIGTERM to SIGKILL at a trial's end (default: 10s)", "TIME", _seconds),
)

#: Arguments of ``fluid.run`` that a command line does not say, and why.
LEFT_OUT: Mapping[str, str] = {
    "trainable": "is the command",
    "space": "has an option of its own",
    "searcher": "is an object",
    "executor": "is an object",
    "callbacks": "are objects",
    "loggers": "are objects; fluid export hands a run on",
    "sharing": "has its fields as options",
    "goals": "has its fields as options",
    "output": "has its fields as options",
    "trial_options": "has its fields as options",
    "requires": "is an object",
    "code": "is a script's file, which each start reads as it is then",
    "reuse": "goes by the code of a trainable, and a script is a file",
}
#: What other libraries call options of these.
PEERS: Mapping[str, str] = {
    **dict.fromkeys(("num_samples", "n_trials", "n_iter", "count", "run_cap"), "samples"),
    **dict.fromkeys(("direction", "goal"), "mode"),
    **dict.fromkeys(("timeout", "time_budget", "max_time"), "time_budget_s"),
    **dict.fromkeys(("max_t", "max_iter", "max_iterations", "epochs"), "budget"),
    **dict.fromkeys(("grace_period", "min_iter", "min_resource"), "min_budget"),
    **dict.fromkeys(("reduction_factor", "factor"), "eta"),
    **dict.fromkeys(("method", "scheduler", "sampler"), "algorithm"),
    **dict.fromkeys(("storage_path", "local_dir", "output_dir"), "run_dir"),
    **dict.fromkeys(("n_jobs", "n_workers", "max_concurrent_trials"), "max_concurrent"),
    "resources_per_trial": "devices_per_trial",
}
BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}


def read_options(given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of options, by their part.

    Args:
        given: by name: texts, or, of a sweep file, also values; ``None`` for what was not given.

    Raises:
        InvalidFieldError: a value cannot be used, or there is no such option.
    """
    parts: dict[str, dict[str, Any]] = {option.part: {} for option in OPTIONS}
    for name, value in given.items():
        if value is None and name in PEERS:
            continue
        if name in PEERS:
            raise InvalidFieldError(name, value, f"is called {BY_NAME[PEERS[name]].flag} here")
        if name not in BY_NAME:
            raise InvalidFieldError(name, value, f"is no option: there are {', '.join(sorted(BY_NAME))}")
        option = BY_NAME[name]
        if value is not None or name == "seed":
            parts[option.part][name] = option.value(value)
    if "devices_per_trial" in parts["trial"]:
        parts["trial"]["devices"] = parts["trial"].pop("devices_per_trial")
    return parts
