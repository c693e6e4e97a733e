"""Gives the trials of a run folder to loggers: of a session that had none, or whose loggers have missed some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fluid.errors import FluidError
from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
from fluid.loggers.run_reader import SessionReader
from fluid.loggers.sink import TrialCalls
from fluid.loggers.values import writable_failure
from fluid.results.loading import sweep_in
from fluid.results.records import TrialResult
from fluid.results.stored_run import read_run
from fluid.results.submitted import UNFINISHED, UNKNOWN

#: Lines of results.jsonl after which loggers are flushed; more than any file has.
_MOST_AT_ONCE, _ALL = 1000, 1 << 62
#: The loggers, each with what calls it.
_Calls = Sequence[tuple[TrialLogger, TrialCalls]]


def export(run_dir: str | Path, loggers: Sequence[TrialLogger]) -> tuple[int, int]:
    """Logs the trials of a run folder.

    Runs of a logger that the session itself has begun are gone on with.

    Args:
        run_dir: the run folder.
        loggers: what logs them.

    Returns:
        The number of trials, and of results.

    Raises:
        InvalidFieldError: the folder is not that of a session, or a logger refuses it.
        Exception: what a logger raises, unless it is of one trial's values, which are left out.
    """
    run = read_run(run_dir)
    sweep, facts = sweep_in(run), run.session
    session_id = str(facts.get("id") or facts.get("began") or run.path.name)
    session = LoggedSession(session_id=session_id, run_dir=run.path)
    for logger in loggers:
        logger.on_session(session)
    reader = SessionReader(run.path, session_id)
    calls = [(logger, TrialCalls(logger.key)) for logger in loggers]
    try:
        results = _export_results(reader, calls)
        trials = sum(_export_end(trial, reader, calls) for trial in sweep.trials)
    finally:
        for logger, called in calls:
            logger.on_broken(FluidError("the export has ended"))
            called.close()
    return trials, results


def _export_results(reader: SessionReader, loggers: _Calls) -> int:
    begun, number = set[str](), 0
    for line, trial, result in reader.results(_ALL):
        if trial is not None and result is not None:
            number += 1
            if trial.trial_id not in begun:
                begun.add(trial.trial_id)
                _begin(trial, loggers)
            for logger, calls in loggers:
                calls.call(trial.trial_id, logger.on_result, result)
        if line % _MOST_AT_ONCE == 0:
            for logger, _ in loggers:
                logger.flush()
    return number


def _begin(trial: LoggedTrial, loggers: _Calls) -> None:
    for logger, calls in loggers:
        calls.on_trial(logger, trial)
        calls.call(trial.trial_id, logger.on_start, trial.trial_id)


def _export_end(trial: TrialResult, reader: SessionReader, loggers: _Calls) -> bool:
    """Tells how a trial has ended, if it has; returns whether there was anything to log of it."""
    submitted = () if trial.files is None else trial.files.submitted
    logged = reader.find(submitted[-1][0]) if submitted else None
    if logged is not None and trial.state not in (UNFINISHED, UNKNOWN):
        for logger, calls in loggers:
            calls.on_trial(logger, logged)
            calls.call(logged.trial_id, logger.on_end, logged.trial_id, trial.state, writable_failure(trial.failure))
    return bool(trial.results) or trial.state not in (UNFINISHED, UNKNOWN)
