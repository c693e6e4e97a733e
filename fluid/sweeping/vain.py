"""When a sweep is given up because no trial of it can succeed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fluid.engine.events import Failure
from fluid.executor import FluidExecutor
from fluid.search.space import ConditionalSpace, Space
from fluid.session.listeners import TrialFailedError
from fluid.sweeping.plan import SweepFailedError, SweepTrial
from fluid.user_values import is_same_value

#: So many trials at least must have failed alike; and so many times as many where their configs may be to blame.
_FIRST_TRIALS = 3
_WHERE_CONFIGS_MAY = 10
#: Addresses of objects, which differ from trial to trial.
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


class VainSweep:
    """Gives a sweep up whose trainable cannot be run, or whose first trials have all failed alike without a result.

    It waits for more trials where other configs may do: the first ones of a grid share a value, or their messages
    differ in numbers. It gives nothing up where the user has said by ``max_failures`` how often a trial is tried. The
    engine has the same rule about the tries of one trial.

    Args:
        space: what the configs are drawn from; ``None`` where a searcher of the user's suggests them.
    """

    def __init__(self, space: Space | ConditionalSpace | None) -> None:
        self._space = space
        self._gives_up_early = False
        self._number = _FIRST_TRIALS
        self._site: str | None = None
        self._failed: dict[str, Failure] = {}
        #: What all that failed have in common: values of hyperparameters that have others, as far as is known.
        self._shared: dict[str, object] | None = None
        #: Whether a trial has reported something; and that, or one has failed otherwise than the first one.
        self._has_result = self._is_over = False

    def begin(self, executor: FluidExecutor) -> None:
        """Called once, with the executor that runs the sweep."""
        self._gives_up_early = executor.session.gives_up_early
        self._number = max(_FIRST_TRIALS, executor.max_devices)

    def note_result(self) -> None:
        """A trial has reported something: the next ones may, too."""
        self._has_result = self._is_over = True

    def note_failed(self, trial: SweepTrial, failure: Failure) -> None:
        """Takes note of a trial that has failed for good.

        Raises:
            SweepFailedError: no trial can succeed.
        """
        if not self._gives_up_early:
            return
        if failure.is_form and not self._has_result:
            cause = TrialFailedError(trial.trial_id, failure) if failure.traceback.count("\n") > 1 else None
            raise SweepFailedError(f"the trainable cannot be run: {failure.message}") from cause
        if self._is_over or trial.results or not failure.site or self._site not in (None, failure.site):
            self._is_over = True
            return
        self._site = failure.site
        self._failed[trial.trial_id] = failure
        self._note_values(trial)
        messages = {_ADDRESS.sub("", one.message) for one in self._failed.values()}
        times = _WHERE_CONFIGS_MAY if self._shared or len(messages) > 1 else 1
        if len(self._failed) >= self._number * times:
            trial_id, first = next(iter(self._failed.items()))
            text = (
                f"the first {len(self._failed)} trials failed alike, without a result, so no further one is tried: "
                f"{first.message}; executor=FluidExecutor(max_failures=0) tries all"
            )
            raise SweepFailedError(text) from TrialFailedError(trial_id, first)

    def _note_values(self, trial: SweepTrial) -> None:
        """Forgets what a trial that failed has not in common with those before."""
        values: Mapping[str, object] = trial.config
        if isinstance(self._space, Space):
            found = self._space.values_in(trial.config)
            values = {name: found.get(name) for name, domain in self._space.domains.items() if domain.size != 1}
        before = values if self._shared is None else self._shared
        self._shared = {
            name: value for name, value in before.items() if name in values and is_same_value(value, values[name])
        }
