"""What a logger is: a listener of all trials of a session, which is told what a run is to be called and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluid._logs import without_secrets
from fluid.errors import InvalidFieldError
from fluid.loggers.values import writable
from fluid.session.listeners import TrialListener
from fluid.trial_fields import StartFrom


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSession:
    """The session whose trials are logged.

    Example:
        >>> from pathlib import Path
        >>> from fluid.loggers import LoggedSession
        >>> LoggedSession(session_id="3fa9", run_dir=Path("run")).session_id
        '3fa9'

    Attributes:
        session_id: stays the same when the session is resumed.
        run_dir: its run folder.
    """

    session_id: str
    run_dir: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTrial:
    """A trial that is logged, as a run of its own.

    Example:
        >>> from fluid.loggers import LoggedTrial
        >>> LoggedTrial(trial_id="train-asha-00000", group="train-asha", uid="3fa9-0-train-asha-00000").config
        {}

    Attributes:
        trial_id: the id under which reports show it, which no other trial of the session has.
        group: name of its group: of the sweep.
        config: its hyperparameters, as JSON has them.
        uid: an id that no trial of any other session has; the same when the session is resumed.
        start: the state of another trial from which it starts, as in :class:`fluid.TrialResult`; its ``at`` is as the
            trial was submitted. ``None`` if it begins afresh.
    """

    trial_id: str
    group: str
    config: Mapping[str, Any] = field(default_factory=dict)
    uid: str
    start: StartFrom | None = None

    @property
    def start_facts(self) -> dict[str, str | int]:
        """The trial from whose state it starts, or the checkpoint's path, and the iterations done by that, if known."""
        if self.start is None:
            return {}
        facts: dict[str, str | int] = {"parent": writable(self.start.parent or self.start.path)}
        return facts if self.start.at is None else {**facts, "at": self.start.at}


class TrialLogger(TrialListener):
    """A listener for ``FluidExecutor(loggers=[...])`` that is also told of trials. Override what you need.

    A thread of the loggers' own calls its methods, so they may take their time. Results have the metrics and the config
    as JSON has them, with escapes for lone surrogates and NUL in texts. ``on_end`` also gets the state ``"PAUSED"``: a
    trial that its search algorithm may extend. ``on_broken`` is called last, when the executor is closed.

    A ``ValueError``, ``TypeError`` or ``ArithmeticError`` that a call about a trial raises is taken to be of that
    trial's values: a warning tells the first, the call is left out - all of the trial, if it was ``on_trial`` - and the
    logger goes on. Any other error ends it for the rest of the session.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup
        >>> from fluid.loggers import TrialLogger
        >>> def train(config):
        ...     yield {"loss": config["lr"] ** 2}
        >>> class Printer(TrialLogger):
        ...     def on_trial(self, trial):
        ...         print(trial.group, trial.trial_id, trial.config)
        ...     def on_result(self, result):
        ...         print(result.trial_id, result.iteration, result.metrics)
        >>> with FluidExecutor(backend="local", devices=1, verbose=0, loggers=[Printer()]) as executor:
        ...     group = TrialGroup([Trial(train, {"lr": 0.5}, trial_id="a")], name="sweep")
        ...     ended = executor.submit_trialgroup(group).wait()
        sweep a {'lr': 0.5}
        a 1 {'loss': 0.25}

    Attributes:
        destination: where it writes to. A resumed session recognizes its loggers by their classes and destinations;
            users, passwords and queries of URIs are left out of both file and log.
        begins_anew: whether it gets all earlier results again when a session is resumed; if not, as by default, only
            those that it had not stored.
    """

    destination: str = ""
    begins_anew: bool = False

    def on_session(self, session: LoggedSession) -> None:
        """The executor is being made, in the caller's thread; what this raises, the caller gets."""

    def on_trial(self, trial: LoggedTrial) -> None:
        """A trial will be logged: called before the other methods get its id.

        Called again when the search algorithm has told its config, and before it goes on after its end.
        """

    def flush(self) -> bool:
        """Stores what it was told; called after some results, several times a second at most.

        Returns:
            Whether all is stored. If not, this is called again soon.
        """
        return True

    @property
    def key(self) -> str:
        """What a resumed session recognizes it by."""
        return f"{type(self).__name__}({without_secrets(self.destination)})"


def refuse_logger(listener: object, field: str) -> None:
    """Refuses a logger where a listener of one group or sweep is wanted."""
    if isinstance(listener, TrialLogger):
        raise InvalidFieldError(field, listener, "is a logger: pass it as FluidExecutor(loggers=[...])")
