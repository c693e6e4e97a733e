"""Names of users in little room: safe for a terminal, and shortened so that they stay apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from fluid.display.format import number, printable, shortened
from fluid.trialgroup import IS_ELSEWHERE, PAUSED_BY_USER, TrialState

#: Most characters of one hyperparameter's value.
_LONGEST_VALUE = 16


def shortened_apart(names: Sequence[str], most: int, ellipsis: str = "…") -> list[str]:
    """Shortens names to at most ``most`` characters, so that different ones stay different wherever that is possible.

    The middle is left out; or the end, or the beginning, or all but the part in which the names differ, if the middles
    are what differs.
    """
    names = [printable(name) for name in names]
    room = most - len(ellipsis)
    if room < 1:
        return [shortened(name, most, ellipsis) for name in names]
    longest = max(0, len(_common_prefix(names)) - max(0, room // 4))

    def middle(name: str) -> str:
        return shortened(name, most, ellipsis)

    def begin(name: str) -> str:
        return name if len(name) <= most else name[:room] + ellipsis

    def end(name: str) -> str:
        return name if len(name) <= most else ellipsis + name[-room:]

    def within(name: str) -> str:
        if len(name) <= most:
            return name
        part = name[longest:]
        return ellipsis + (part if len(part) <= room else part[: max(0, room - len(ellipsis))] + ellipsis)

    candidates = [[cut(name) for name in names] for cut in (middle, begin, end, within)]
    return max(candidates, key=lambda found: len(set(found)))


def config_text(config: Mapping[str, Any], most: int, ellipsis: str = "…") -> str:
    """Hyperparameters in at most ``most`` characters: ``"lr=0.1, layers=2, +3"``; empty if none has room."""
    parts = [f"{printable(name)}={_value(value, ellipsis)}" for name, value in _flat(config)]
    for shown in range(len(parts), 0, -1):
        text = ", ".join([*parts[:shown], *([f"+{len(parts) - shown}"] if shown < len(parts) else [])])
        if len(text) <= most:
            return text
    return ""


def metric_text(value: float) -> str:
    """The value of a metric to four significant digits."""
    text = f"{value:.4g}"
    return f"{value:,.0f}" if "e+" in text and abs(value) < 1e9 else text


def _value(value: Any, ellipsis: str) -> str:
    if isinstance(value, float):
        return metric_text(value) if value == value and abs(value) < 1e300 else str(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**9 else number(float(value)) if abs(value) < 1e300 else "int"
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or repr(value)
    return shortened(printable(str(text)), _LONGEST_VALUE, ellipsis)


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """The hyperparameters, of mappings within mappings by their own names."""
    flat: list[tuple[str, Any]] = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat += _flat(value, f"{prefix}{name}/")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def _common_prefix(names: Sequence[str]) -> str:
    pairs = zip(min(names, default=""), max(names, default=""), strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# -- states --------------------------------------------------------------------------------------
#
# The order, the counts and the colours in which the live view and the reports show the states of trials.
#
# The order follows from :class:`fluid.trialgroup.TrialState`, so a new state is listed without a change here. Reports
# have two more states, for trials whose final state the run folder does not contain.


#: Running trials, others on devices, waiting trials; and ended ones, which are listed last.
_UNENDED = (
    TrialState.RUNNING,
    *(state for state in TrialState if state.holds_devices and state is not TrialState.RUNNING),
    *(state for state in reversed(TrialState) if not state.holds_devices and not state.ended),
)
_ENDED = tuple(state for state in TrialState if state.ended)
_STYLES: dict[str, str] = {
    TrialState.FAILED: "bold red",
    TrialState.STOPPED: "dim",
    TrialState.INFEASIBLE: "dim",
    TrialState.PAUSED: "yellow",
    PAUSED_BY_USER: "yellow",
    IS_ELSEWHERE: "cyan",
    TrialState.STOPPING: "yellow",
    "UNFINISHED": "yellow",
    "INTERRUPTED": "yellow",
    "UNKNOWN": "dim",
}


def state_style(state: str) -> str:
    """The style of rich for a state; empty for the usual ones."""
    return _STYLES.get(state, "")


def listed_states(trials: Mapping[str, int]) -> list[tuple[str, str]]:
    """The states of some trials, in order: each with its text, such as ``"12 queued"``.

    Args:
        trials: number of trials by state.
    """
    others = sorted(trials.keys() - set(TrialState))
    states: list[str] = [*_UNENDED, *others, *_ENDED]
    return [(state, f"{trials[state]:,} {state.lower()}") for state in states if trials.get(state)]


def summed_states(trials: Mapping[str, int]) -> list[tuple[str, str]]:
    """Like :func:`listed_states`, in fewer words: trials that run, wait, have ended or failed."""
    failed = trials.get(TrialState.FAILED, 0)
    running = sum(trials.get(state, 0) for state in TrialState if state.holds_devices)
    ended = ended_trials(trials) - failed
    waiting = sum(trials.values()) - running - ended - failed
    parts = [("RUNNING", running, "running"), ("QUEUED", waiting, "waiting"), ("DONE", ended, "ended")]
    parts.append(("FAILED", failed, "failed"))
    return [(state, f"{number:,} {word}") for state, number, word in parts if number]


def states_text(trials: Mapping[str, int]) -> str:
    """The number of trials in each state: ``"6 running, 12 queued, 1 failed"``."""
    return ", ".join(text for _, text in listed_states(trials))


def has_ended(trials: Mapping[str, int]) -> bool:
    """Whether all trials have ended, by the number of trials in each state."""
    return ended_trials(trials) == sum(trials.values())


def with_interrupted(trials: Mapping[str, int]) -> dict[str, int]:
    """The number of trials by state once the session is over: those that ran or waited were interrupted.

    A search algorithm, or the user, may leave some paused for good.
    """
    left_alone = (*_ENDED, TrialState.PAUSED, PAUSED_BY_USER)
    rest = {state: number for state, number in trials.items() if state in left_alone}
    left = sum(trials.values()) - sum(rest.values())
    return {**rest, "INTERRUPTED": left} if left else rest


def ended_trials(trials: Mapping[str, int]) -> int:
    """The number of trials that have ended, by the number of trials in each state."""
    return sum(trials.get(state, 0) for state in _ENDED)
