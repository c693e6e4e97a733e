"""What the drivers of one sweep must have in common: the arguments of their calls, as texts, and what they run.

Each of them makes the sweep's trials by itself. If they made others, or trained them otherwise, results of several
sweeps would be taken for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

from fluid._version import __version__
from fluid.errors import InvalidFieldError
from fluid.joint.entries import Founded
from fluid.search.schedules import functions_in
from fluid.search.space import ConditionalSpace, Space
from fluid.search.suggestion import Suggestion
from fluid.session.joint.content import differing
from fluid.sweeping.plan import SweepPlan
from fluid.trainables.trainable_code import TrainableCode, code_of
from fluid.user_values import text_of

#: How deep a distribution of another package is looked into.
_DEPTH = 4
#: Characters of a text in an error, and of those before the first one that differs.
_MOST, _BEFORE = 160, 40


def arguments_of(plan: SweepPlan, first: Suggestion | None) -> Mapping[str, str]:
    """What the drivers must have been given alike, by the names of the arguments.

    Args:
        plan: of the sweep.
        first: what the searcher suggests first; ``None`` if it learns. Two libraries may draw differently.
    """
    found = {
        "version of Fluid": __version__,
        "metric": ", ".join(f"{goal.metric} ({goal.mode})" for goal in plan.goals),
        "algorithm": plan.algorithm if plan.options is None else text_of(plan.options),
        "budget": str(plan.budget),
        "samples": str(plan.samples),
        "seed": str(plan.seed),
        "points": text_of(plan.points),
        "stop": plan.rules.text,
        "on_oom": "worst" if plan.oom_is_worst else "fail",
    }
    if plan.shape is not None:
        found["eta and min_budget"] = f"rungs {plan.shape.rungs}"
    if isinstance(plan.space, Space):
        found["names in space"] = ", ".join(plan.space.paths)  # Values are drawn in their order.
        of_domains = {name: _inside(domain) for name, domain in plan.space.domains.items()}
        for name, value in {**of_domains, **plan.space.constants}.items():
            found[f"space[{name!r}]"] = text_of(value)
        for name, node in plan.space.schedules.items():
            found[f"space[{name!r}]"] = repr(node)
        for condition in plan.space.conditions:
            found[f"space[{condition.child!r}] depends on {condition.parent}"] = text_of(condition.values)
    if plan.constants:
        found["space"] = text_of(plan.constants)
    if first is not None:
        found["first config"] = text_of(first.config)
    return found


def codes_of(plan: SweepPlan) -> dict[str, TrainableCode]:
    """The code of what trials run, and of what makes their configs, by the names of the arguments."""
    functions = {"trainable": plan.trainable}
    if isinstance(plan.space, ConditionalSpace):
        functions["space"] = plan.space.function
    elif plan.space is not None:
        functions |= {
            f"space[{name!r}]": getattr(one.source, "func", one.source) for name, one in plan.space.functions.items()
        }
        parts = {**plan.space.schedules, **plan.space.domains, **plan.space.constants}
        for name, part in parts.items():
            functions |= {f"space[{name!r}]": one for one in functions_in(part)}
    found = {name: code_of(function) for name, function in functions.items()}
    return {name: code for name, code in found.items() if code is not None}


def require_alike(
    founded: Founded, arguments: Mapping[str, str], codes: Mapping[str, TrainableCode], *, takes_other_code: bool
) -> None:
    """Checks that this driver was given what the first one was.

    Args:
        founded: what the first one told.
        arguments, codes: this one's.
        takes_other_code: whether it may run other code.

    Raises:
        InvalidFieldError: it was not.
    """
    works = f"works the sweep {founded.group!r}, of which the first driver"
    for name in {**arguments, **founded.arguments}:
        theirs, mine = (said.get(name, "nothing") for said in (founded.arguments, arguments))
        if theirs != mine:
            theirs, mine = _where_they_differ(theirs, mine)
            reason = f"{works} says {name}: {theirs}; this call says {mine}. Give the same, or a fresh run_dir"
            raise InvalidFieldError("join", True, reason)
    names = differing(founded.codes, codes)
    if names and not takes_other_code:
        reason = f"{works} has other code: {', '.join(names)}. Give a fresh run_dir; or code='new' if both may count"
        raise InvalidFieldError("join", True, reason)


def _inside(value: Any, depth: int = _DEPTH) -> Any:
    """What a distribution consists of, by the name of its class."""
    held = getattr(value, "__dict__", None)
    if depth == 0 or not isinstance(held, dict) or isinstance(value, (type, FunctionType)):
        return value
    return {type(value).__name__: {name: _inside(part, depth - 1) for name, part in held.items()}}


def _where_they_differ(theirs: str, mine: str) -> tuple[str, str]:
    """Two texts; of long ones what is about the first character that differs."""
    if max(len(theirs), len(mine)) <= _MOST:
        return theirs, mine
    pairs = enumerate(zip(theirs, mine, strict=False))
    first = next((place for place, (one, other) in pairs if one != other), min(len(theirs), len(mine)))
    begin = max(0, first - _BEFORE)
    cut = [f"{'...' if begin else ''}{text[begin : begin + _MOST]}" for text in (theirs, mine)]
    return cut[0], cut[1]
