"""What is told of a session, where: the user's :class:`Output`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from fluid.errors import InvalidFieldError, require_one_of
from fluid.given_fields import GivenFields
from fluid.session.folder.existing import IF_EXISTS
from fluid.session.listeners import TrialListener, require_listener
from fluid.user_calls import user_class

LOOPBACK = "127.0.0.1"


@user_class
@dataclass(frozen=True)
class Output(GivenFields):
    """What is told of a session, where: an argument of :class:`fluid.FluidExecutor`.

    Example:
        >>> from fluid import FluidExecutor, Output
        >>> with FluidExecutor("local", 1, output=Output(verbose=0, run_dir="runs/quiet")) as executor:
        ...     executor.run_dir.name
        'quiet'

    Args:
        verbose: 1, the default, for live progress on a terminal and what trials print. 0 prints nothing of how the
            session goes and ends, not even that trials are dropped or a deadline has come: only what goes wrong, as a
            failed trial or a deadline that cannot be met, is logged as a warning.
        loggers: get all results, in a thread of their own: :class:`fluid.loggers.TensorBoard` and so on, or any
            :class:`TrialListener`; none by default (``docs/watching.md``).
        metrics_port: loopback port with metrics for Prometheus, 0 for any, or ``"address:port"``; ``None``, the
            default, for none.
        run_dir: folder for this session's journal, results and logs, in which no session has written yet; ``None``,
            the default, for a new one in ``$FLUID_RUNS``, or in ``~/fluid_runs`` if that is not set.
        if_exists: what to do where ``run_dir`` holds a session: ``"error"``, the default, to refuse it; ``"resume"`` to
            go on with it, as :meth:`fluid.FluidExecutor.resume` does; ``"overwrite"`` to delete it once the new session
            has trials, of which nothing is deleted that no session wrote, nor a run that goes on or that several
            drivers share; ``"new"`` for a folder beside it, ``run_dir-2`` and so on. Not for ``join``, which goes on
            with what is there.

    Raises:
        InvalidFieldError: a value cannot be used.
    """

    verbose: int = 1
    _: KW_ONLY
    loggers: Sequence[TrialListener] = ()
    metrics_port: int | str | None = None
    run_dir: str | Path | None = None
    join: bool = False
    if_exists: str = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.verbose, int) or self.verbose not in (0, 1):
            raise InvalidFieldError("verbose", self.verbose, "must be 0 or 1")
        loggers: Any = self.loggers
        if isinstance(loggers, str) or not isinstance(loggers, Sequence):
            raise InvalidFieldError("loggers", loggers, "must be a list of loggers")
        for position, listener in enumerate(loggers):
            require_listener(listener, f"loggers[{position}]")
        if self.metrics_port is not None:
            parse_address(self.metrics_port)
        if not isinstance(self.join, bool):
            raise InvalidFieldError("join", self.join, "must be True or False")
        if self.join and self.run_dir is None:
            raise InvalidFieldError("join", True, "needs run_dir=, the folder that all drivers share")
        require_one_of("if_exists", self.if_exists, IF_EXISTS)
        if self.join and self.if_exists != "error":
            reason = "cannot be with join=True, which goes on with what is there by itself"
            raise InvalidFieldError("if_exists", self.if_exists, reason)


def parse_address(port: object) -> tuple[str, int]:
    """Reads where to serve metrics: ``9400``, which is on the loopback interface, or ``"0.0.0.0:9400"``.

    Example:
        >>> from fluid.session.output import parse_address
        >>> parse_address(9400), parse_address("0.0.0.0:9400"), parse_address("[::]:9400")
        (('127.0.0.1', 9400), ('0.0.0.0', 9400), ('::', 9400))

    Raises:
        InvalidFieldError: it is neither.
    """
    host, text = LOOPBACK, port
    if isinstance(port, str):
        address, colon, text = port.rpartition(":")
        host = address.removeprefix("[").removesuffix("]") if colon else LOOPBACK
    try:
        number = -1 if isinstance(port, (bool, float)) else int(text)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = -1
    if not (host and 0 <= number < 1 << 16):
        raise InvalidFieldError("metrics_port", port, "must be a port, such as 9400, or '0.0.0.0:9400'")
    return host, number
