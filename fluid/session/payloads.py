"""How a session pickles trials."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from fluid.backends.base import Backend, ReplayingBackend
from fluid.lane.process.script import dump_script, read_script
from fluid.shared_data.parameters import dump_with_parameters
from fluid.trainables.payload import TrainablePayload, TrialPayload, trainable_payload, trial_payload
from fluid.trainables.trainable_code import TrainableCode, code_of
from fluid.trial_fields import TrialProcess
from fluid.trialgroup import Submission, Trial

#: Codes that are kept, of the trainables pickled last: many calls submit the same one.
_MOST_CODES = 64


class SessionPickler:
    """Pickles the trials of a session that has this backend. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._require = backend.require_replayable if isinstance(backend, ReplayingBackend) else None
        #: By the digests of their pickles.
        self._codes: OrderedDict[bytes, TrainableCode | None] = OrderedDict()

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
            shown = None if trial.shown is None else trial.shown.config
            payloads[trial] = trial_payload(made[1], trial.config, shown, process_of(trial))
        return payloads

    def _with_code(self, trial: Trial, payload: TrainablePayload) -> TrainablePayload:
        if self._require is not None:
            return payload  # A rehearsal is not resumed.
        if payload.digest not in self._codes:
            self._codes[payload.digest] = code_of(trial.trainable)
        code = self._codes[payload.digest]
        while len(self._codes) > _MOST_CODES:
            self._codes.popitem(last=False)
        return replace(payload, code=code)
