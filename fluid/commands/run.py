"""``fluid run``: a sweep over a script as it is."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fluid.commands.inout import Subparsers
from fluid.errors import FluidError, InvalidFieldError

if TYPE_CHECKING:
    from fluid.results.sweep import SweepResult
    from fluid.scripts.trainable import Script

#: Commands that ``--dry-run`` prints.
_SHOWN = 3
_FAILED = 1
_GROUPS = {"script": "the script", "run": "the sweep (as for fluid.run)", "trial": "each trial"}
_EPILOG = r"""
The command follows --, and is run without a shell. {NAME} in it stands for a parameter of the space, {trial_id},
{trial_dir}, {checkpoint}, {budget}, {config} (JSON) and {config_file} for what a trial has; {{ and }} for braces. Where
it names no parameter, --NAME=VALUE is appended for each. VALUES of --space: log:1e-5:1e-1, 0:1, 0:1:0.25, int:1:8,
logint:1:1024, 1,2,4, or a constant.

A script reports by fluid.report({...}), by a line of JSON on stdout, by wandb.log, or as --metric-from and
--metric-regex say; each report that has the metric is an iteration.

  fluid run --space lr=log:1e-5:1e-1 --space layers=1,2,4 --metric val_loss -- python train.py --lr {lr} --n {layers}
  fluid run sweep.yaml --samples 20
"""


def add_run(commands: Subparsers) -> None:
    """Adds ``fluid run``."""
    from fluid.scripts.options import OPTIONS, PEERS

    run = commands.add_parser(
        "run",
        help="run a sweep over a script as it is",
        usage="fluid run [FILE] [--space NAME=VALUES]... [--metric NAME] [OPTION]... [-- COMMAND...]",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "a sweep file, YAML or JSON, with fields of the options' names, space and command; or one of W&B's"
    run.add_argument("file", metavar="FILE", nargs="*", help=text)
    text = "a parameter; repeatable; adds to the file's"
    run.add_argument("--space", metavar="NAME=VALUES", action="append", default=[], help=text)
    run.add_argument("--dry-run", action="store_true", help=f"print the first {_SHOWN} commands, and run nothing")
    groups = {part: run.add_argument_group(title) for part, title in _GROUPS.items()}
    for option in OPTIONS:
        settings: dict[str, Any] = {"dest": f"option_{option.name}", "default": None}
        settings["help"] = option.meaning.replace("%", "%%")
        if not option.metavar:
            settings["action"] = "store_true"
        else:
            settings |= {"metavar": option.metavar, "action": "append" if option.repeats else "store"}
        groups.get(option.part, groups["run"]).add_argument(option.flag, **settings)
    for name in PEERS:
        run.add_argument(f"--{name.replace('_', '-')}", dest=f"option_{name}", help=argparse.SUPPRESS)
    run.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    from fluid.scripts.options import read_options
    from fluid.scripts.space_text import parse_space
    from fluid.scripts.sweep_file import SweepFile, load_file
    from fluid.scripts.trainable import Script

    if len(arguments.file) > 1 or any(name.endswith((".py", ".sh")) for name in arguments.file):
        reason = "is no sweep file: the script's command follows --, as in: fluid run --metric loss -- python train.py"
        raise InvalidFieldError("file", " ".join(arguments.file), reason)
    file = load_file(arguments.file[0]) if arguments.file else SweepFile()
    for note in file.notes:
        print(f"fluid: {note}", file=sys.stderr)
    given = {name.removeprefix("option_"): value for name, value in vars(arguments).items() if name[:7] == "option_"}
    parts = read_options({**file.options, **{name: value for name, value in given.items() if value is not None}})
    space = {**file.space, **parse_space(arguments.space)}
    if not space:
        raise InvalidFieldError("space", "", "must be given, as in --space lr=log:1e-5:1e-1")
    if "metric" not in parts["run"]:
        raise InvalidFieldError("metric", None, "must be given: the name of the metric that the script reports")
    budget = parts["run"].get("budget", 27)
    script = Script.checked(
        arguments.after or file.command,
        space,
        metric=parts["run"]["metric"],
        budget=budget,
        chdir=bool(parts["trial"].get("chdir")),
        **parts["script"],
    )
    if arguments.dry_run:
        _show_first(script, space, parts["run"])
        return 0
    return _sweep(script, space, parts)


def _show_first(script: Script, space: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Prints the first commands; what only a trial has stays a placeholder."""
    from fluid.results.metrics import modes_of
    from fluid.scripts.command import OWN
    from fluid.search import make_sampler, make_space

    algorithm = options.get("algorithm", "asha")
    modes = [mode or "min" for _, mode in modes_of(options["metric"], options.get("mode"))]
    sampler = make_sampler(
        algorithm if algorithm in ("grid", "tpe") else "random",
        make_space(dict(space)),
        modes=modes,
        seed=options.get("seed", 0),
        points=options.get("points", ()),
    )
    own = {name: f"{{{name}}}" for name in OWN if name != "config"} | {"budget": str(script.budget)}
    for _ in range(_SHOWN if sampler.size is None else min(_SHOWN, sampler.size)):
        suggestion = sampler.ask()
        assert suggestion is not None
        print(shlex.join(script.command.words(suggestion.config, own)))


def _sweep(script: Script, space: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> int:
    from fluid.sweep import run
    from fluid.sweeping.plan import SweepFailedError

    made = {name: kind(**parts[name]) for name, kind in _objects().items() if parts[name]}
    try:
        result = run(script.trainable(), dict(space), trial_options=parts["trial"], **made, **parts["run"])
    except SweepFailedError as error:
        print(f"fluid: {error}", file=sys.stderr)
        return _FAILED
    _show_best(script, result)
    return 0


def _objects() -> Mapping[str, type]:
    """The objects of ``fluid.run`` that have options as fields."""
    from fluid.keeping import Keep
    from fluid.packing import Sharing
    from fluid.session.output import Output
    from fluid.sizing.goals import Goals

    return {"sharing": Sharing, "goals": Goals, "keep": Keep, "output": Output}


def _show_best(script: Script, result: SweepResult) -> None:
    """Prints the best trial, and the command that runs its config again."""
    from fluid.scripts.command import OWN

    own = {name: f"{{{name}}}" for name in OWN if name != "config"} | {"budget": str(script.budget)}
    try:
        found = [result.best] if isinstance(result.metric, str) else result.pareto
    except FluidError:
        return  # The sweep has said why.
    for best in found:
        values = best.value if isinstance(best.value, tuple) else (best.value,)
        text = ", ".join(f"{name} {value:.6g}" for name, value in zip(script.metrics, values, strict=True))
        print(f"best: {text} in iteration {best.iteration} of {best.trial.trial_id}")
        print(f"  {shlex.join(script.command.words(best.config, own))}")
    if not sys.stderr.isatty():  # Else the live view has said so.
        print(f"results in {result.run_dir}")
