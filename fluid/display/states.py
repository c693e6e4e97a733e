"""The order, the counts and the colours in which the live view and the reports show the states of trials.

The order follows from :class:`fluid.trialgroup.TrialState`, so a new state is listed without a change here. Reports
have two more states, for trials whose final state the run folder does not contain.
"""

from __future__ import annotations

from collections.abc import Mapping

from fluid.trialgroup import PAUSED_BY_USER, TrialState

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
    TrialState.PAUSED: "yellow",
    PAUSED_BY_USER: "yellow",
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
