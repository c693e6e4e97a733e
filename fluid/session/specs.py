"""A submitted trial, as the engine knows it."""

from __future__ import annotations

import logging
import numbers
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from fluid._logs import logger_of
from fluid.backends.base import Backend
from fluid.devices.constraints import describe
from fluid.engine.events import PLAIN_TERMS, GroupTerms, StartState, TrialSpec
from fluid.errors import InvalidFieldError, require_number
from fluid.keeping import bytes_text
from fluid.lane.process.script import dump_script, read_script
from fluid.policies.engine import EngineState
from fluid.policies.fusing.groups import text_of
from fluid.policies.owners.deadlines import ON_MISS, GivenDeadline, deadline_of, weight_of
from fluid.resources import Requires
from fluid.search.schedules import Schedule
from fluid.shared_data.parameters import dump_with_parameters
from fluid.trainables.captures import LARGE_CAPTURE, Capture, captures_in
from fluid.trainables.payload import TrainablePayload, TrialPayload, trainable_payload, trial_payload
from fluid.trainables.trainable import can_save, is_elastic, is_fusible, is_only_replayed, profile_name
from fluid.trainables.trainable_code import TrainableCode, code_of
from fluid.trial_fields import TrialProcess
from fluid.trialgroup import Search, Submission, Trial, TrialGroup
from fluid.user_values import dotted

#: A longer text, or more values in a list, is taken for data, and not for a choice among a few.
_LONGEST_NAME, _MOST_VALUES = 100, 16

_log = logger_of("fluid.session")


def warn_of_unfusible(group: TrialGroup) -> None:
    """Says so if no trial of a group is of a class that can be fused."""
    if not any(is_fusible(trial.trainable) for trial in group.active):
        text = "packing='fused', and no trial of %r can be fused: %s is no FusedTrainable; each runs alone on a device"
        _log.warning(text, group.name, profile_name(group.active[0].trainable))


def say_what_is_awaited(state: EngineState, group: str, specs: Iterable[TrialSpec]) -> None:
    """Says so if trials that were just submitted have to wait for devices that there are not."""
    awaited = dict.fromkeys(spec.wanted_devices for spec in specs if state.awaits_devices(spec.trial_id))
    if awaited:
        text = "trials of %r wait until there is %s; there are %s"
        level = logging.INFO if state.most_devices else logging.WARNING
        _log.log(level, text, group, ", and ".join(awaited), describe(state.devices))


def terms_of(
    group: TrialGroup,
    priority: float,
    preempt: bool,
    deadline: GivenDeadline = None,
    weight: float = PLAIN_TERMS.weight,
    on_miss: str = ON_MISS[0],
) -> GroupTerms:
    """The terms on which a user submits a group.

    Raises:
        InvalidFieldError: the priority is no number of at least 0, ``preempt`` is neither True nor False, the weight is
            not above 0, the deadline is none, or ``on_miss`` is unknown, or to stop without a deadline.
    """
    if not isinstance(preempt, bool):
        raise InvalidFieldError("preempt", preempt, "must be True or False")
    expected = None if group.search is None else group.search.trials
    counts, due = weight_of(weight), deadline_of(deadline, on_miss)
    urgency = require_number("priority", priority, at_least=0.0)
    terms = GroupTerms(group.owner, urgency, preempt, expected, due, counts)
    return PLAIN_TERMS if terms == PLAIN_TERMS else terms  # one object for most groups


def with_requirements(trials: list[Trial], group: TrialGroup) -> list[Trial]:
    """Trials with what their group requires of devices."""
    if group.requires is None:
        return trials
    return [trial.changed(requires=(trial.requires or Requires()).filled_from(group.requires)) for trial in trials]


class Isolating(NamedTuple):
    """Which trials run in a process that has run no other one, of those that do not say so themselves.

    Attributes:
        plain: those that cannot be fused.
        fusible: those that can.
        shares_by: the option by which the others share processes, in words; empty if there is none.
        is_asked: whether the user has said so, which counts for more than what a sweep of another library says.
    """

    plain: bool = True
    fusible: bool = True
    shares_by: str = ""
    is_asked: bool = False

    def isolates(self, trial: Trial, *, fusible: bool) -> bool:
        """Whether a trial does.

        Raises:
            InvalidFieldError: it is to, and shares its process by an option.
        """
        by_default = self.fusible if fusible else self.plain
        if trial.isolation == "trial" and self.shares_by and not by_default:
            reason = f"trials of this executor share a process with {self.shares_by}: leave isolation out, or that"
            raise InvalidFieldError("isolation", trial.isolation, reason)
        return by_default if trial.isolation is None else trial.isolation == "trial"

    @property
    def of_sharing_sweep(self) -> Literal["lane"] | None:
        """What a sweep asks for whose library runs one trial after another in a process; ``None`` for nothing."""
        return None if self.is_asked else "lane"


#: By default, all do.
ISOLATING = Isolating()


def spec_of(
    trial: Trial,
    max_width: int,
    *,
    keep_last: bool,
    isolating: Isolating,
    search: Search | None,
    widens_replayed: bool = False,
    start: StartState | None = None,
) -> TrialSpec:
    """Returns what the engine is to know of a trial.

    Args:
        trial: as the user submitted it.
        max_width: most devices, if the trial sets no bound of its own.
        keep_last: whether its newest checkpoint is to outlive the run.
        isolating: that of the executor, for a trial that does not ask for one way.
        search: what its group's search algorithm optimizes; ``None`` if none submits it.
        widens_replayed: whether the user has given ``max_width``, so that trials which are only replayed, and do not
            say whether they are elastic, stand for elastic ones.
        start: the state from which it starts.

    Raises:
        InvalidFieldError: it is to have a process of its own, and shares one by an option of the executor.
    """
    elastic = is_elastic(trial.trainable)
    if not elastic and (widens_replayed or trial.max_width is not None) and is_only_replayed(trial.trainable):
        elastic = getattr(trial.trainable, "fluid_elastic", None) is None
    shares = trial.devices is not None and trial.devices < 1.0
    # A step of several rows does not tell which of them has asked for what its trials do not agree on.
    fusible = is_fusible(trial.trainable) and not trial.is_shared_run
    gang = not elastic and trial.devices is not None and trial.devices >= 2
    return TrialSpec(
        trial_id=trial.id,
        budget=trial.budget,
        priority=trial.priority,
        profile_key=f"{trial.key} on {trial.devices:g} devices" if gang and trial.devices else trial.key,
        max_width=1 if shares or not elastic else trial.max_width or max_width,
        memory=trial.memory,
        can_save=can_save(trial.trainable),
        retry_errors=trial.retry_errors,
        follow_up_iterations=trial.follow_up_iterations,
        iteration_timeout_s=trial.iteration_timeout_s,
        requires=trial.requires,
        devices=trial.devices,
        gang=gang,
        keep_last=keep_last,
        fusible=fusible,
        isolated=isolating.isolates(trial, fusible=fusible),
        # What a shared run leaves is wanted later, whatever its trials do.
        extends=None if search is None or trial.is_shared_run else search.extends,
        start=start,
        is_shared_run=trial.is_shared_run,
        config=tuple(
            (name, text_of(value))
            for name, value in dotted(trial.config if trial.shown is None else trial.shown.config)
            if fusible or _is_short(value)
        ),
    )


def _is_short(value: object) -> bool:
    """Whether a value may part trials into cohorts: a number, a name, a schedule or a few of these, no data set."""
    if isinstance(value, str | Schedule):
        return len(text_of(value)) <= _LONGEST_NAME
    if isinstance(value, list | tuple):
        return len(value) <= _MOST_VALUES and all(map(_is_short, value))
    return value is None or isinstance(value, numbers.Number)


# -- payloads ------------------------------------------------------------------------------------
#
# How a session pickles trials.


#: Codes that are kept, of the trainables pickled last: many calls submit the same one.
_MOST_CODES = 64


def _capture_text(one: Capture) -> str:
    if not one.shown:
        return f"{one.name} ({bytes_text(one.size)})"
    return f"{one.name} ({bytes_text(one.size)}, of which it shows {bytes_text(one.shown)}: take {one.name}.clone())"


class SessionPickler:
    """Pickles the trials of a session that has this backend. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._require = backend.require_replayable if backend.replays else None
        #: By the digests of their pickles.
        self._codes: OrderedDict[bytes, TrainableCode | None] = OrderedDict()
        #: Of which captures the log has told: by the trainable's name, and for all configs.
        self._told: set[str] = set()

    def payloads_of(
        self, trials: Iterable[Trial], submission: Submission, process_of: Callable[[Trial], TrialProcess]
    ) -> dict[Trial, TrialPayload]:
        """Pickles the trials of one call, as they are now.

        Args:
            trials: the trials.
            submission: what the call is a part of.
            process_of: says what each trial asks of its process; called once for each, in order.

        Raises:
            InvalidFieldError: a trainable or a config cannot be used or pickled.
            MissingDependencyError: a trainable needs a package that is not installed.
        """
        known = submission.pickled
        payloads = {}
        for trial in trials:
            if (made := known.get(id(trial.trainable))) is None:
                if submission.script is None:
                    submission.script = read_script()
                script = partial(dump_script, submission.script) if self._require is None else None
                payload = trainable_payload(trial.trainable, self._require, dump_with_parameters, script)
                made = trial.trainable, self._with_code(trial, payload)
                known[id(trial.trainable)] = made
                if len(payload.pickled) > LARGE_CAPTURE:
                    self._tell_captures(
                        profile_name(trial.trainable).rpartition(".<locals>.")[2], len(payload.pickled), trial.trainable
                    )
            shown = None if trial.shown is None else trial.shown.config
            payloads[trial] = trial_payload(made[1], trial.config, shown, process_of(trial))
            if len(payloads[trial].config) > LARGE_CAPTURE:
                self._tell_captures("each config", len(payloads[trial].config), trial.config)
        return payloads

    def _tell_captures(self, what: str, length: int, value: Any) -> None:
        """Warns, once, of what is large in a trainable or in configs."""
        if self._require is not None or what in self._told:
            return  # What is replayed is not sent anywhere.
        self._told.add(what)
        found = captures_in(value)
        if not found:
            return
        named = ", ".join(_capture_text(one) for one in found)
        _log.warning(
            "%s takes along %s, which is written to the run folder and sent to each process: %s; load it in the "
            "function instead, by fluid.shared(load), which does so once for all trials of a machine",
            what,
            bytes_text(length),
            named,
        )

    def _with_code(self, trial: Trial, payload: TrainablePayload) -> TrainablePayload:
        if self._require is not None:
            return payload  # A rehearsal is not resumed.
        if payload.digest not in self._codes:
            self._codes[payload.digest] = code_of(trial.trainable)
        code = self._codes[payload.digest]
        while len(self._codes) > _MOST_CODES:
            self._codes.popitem(last=False)
        return replace(payload, code=code)
