"""Gives the trials of a run folder to loggers: of a session that had none, or whose loggers have missed some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fluid.errors import FluidError
from fluid.loggers.logger import LoggedSession, LoggedTrial, TrialLogger
from fluid.loggers.run_reader import SessionReader
from fluid.results.folder_files import read_facts
from fluid.results.loading import load
from fluid.results.records import TrialResult
from fluid.results.submitted import UNFINISHED, UNKNOWN

#: Lines of results.jsonl after which loggers are flushed; more than any file has.
_MOST_AT_ONCE, _ALL = 1000, 1 << 62


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
        Exception: what a logger raises.
    """
    sweep = load(run_dir)
    facts = read_facts(sweep.run_dir)
    session_id = str(facts.get("id") or facts.get("began") or sweep.run_dir.name)
    session = LoggedSession(session_id=session_id, run_dir=sweep.run_dir)
    for logger in loggers:
        logger.on_session(session)
    reader = SessionReader(sweep.run_dir, session_id)
    try:
        results = _export_results(reader, loggers)
        trials = sum(_export_end(trial, reader, loggers) for trial in sweep.trials)
    finally:
        for logger in loggers:
            logger.on_broken(FluidError("the export has ended"))
    return trials, results


def _export_results(reader: SessionReader, loggers: Sequence[TrialLogger]) -> int:
    begun, number = set[str](), 0
    for line, trial, result in reader.results(_ALL):
        if trial is not None and result is not None:
            number += 1
            if trial.trial_id not in begun:
                begun.add(trial.trial_id)
                _begin(trial, loggers)
            for logger in loggers:
                logger.on_result(result)
        if line % _MOST_AT_ONCE == 0:
            for logger in loggers:
                logger.flush()
    return number


def _begin(trial: LoggedTrial, loggers: Sequence[TrialLogger]) -> None:
    for logger in loggers:
        logger.on_trial(trial)
        logger.on_start(trial.trial_id)


def _export_end(trial: TrialResult, reader: SessionReader, loggers: Sequence[TrialLogger]) -> bool:
    """Tells how a trial has ended, if it has; returns whether there was anything to log of it."""
    submitted = () if trial.files is None else trial.files.submitted
    logged = reader.find(submitted[-1][0]) if submitted else None
    if logged is not None and trial.state not in (UNFINISHED, UNKNOWN):
        for logger in loggers:
            logger.on_trial(logged)
            logger.on_end(logged.trial_id, trial.state, trial.failure)
    return bool(trial.results) or trial.state not in (UNFINISHED, UNKNOWN)
