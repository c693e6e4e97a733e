"""The engine's invariants of owners, their jobs and their shares of devices. Tests check them after every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fluid.engine.core import EngineError
from fluid.engine.state import EngineState

_ROUNDING = 1e-6


def validate_owners(state: EngineState) -> None:
    """Checks what is known of owners against their trials.

    Raises:
        EngineError: something is broken; it names that.
    """
    broken = [*_jobs(state), *_shares(state)]
    if broken:
        raise EngineError("\n".join(broken))


def _jobs(state: EngineState) -> Iterator[str]:
    """What is counted of jobs and owners is what their trials add up to."""
    records, work, jobs = state.trials.by_row, state.allocations.work.by_row, state.allocations.work.jobs
    of_job = Counter(records[row].job for row in work)
    of_owner = Counter(records[row].owner for row in work)
    if of_job != jobs.rows or of_owner != jobs.owners:
        yield f"jobs have {jobs.rows} trials and owners {jobs.owners}; there are {of_job} and {of_owner}"
    if jobs.work.keys() != jobs.rows.keys() or not jobs.owners.keys() <= jobs.since.keys():
        yield f"the work of jobs {set(jobs.work)} is known, and since when owners {set(jobs.since)} are here"
    for job, seconds in jobs.work.items():
        expected = sum(seconds for row, seconds in work.items() if records[row].job == job)
        if abs(seconds - expected) > _ROUNDING * max(1.0, expected):
            yield f"job {job} has {expected} seconds of work left, and {seconds} are counted"


def _shares(state: EngineState) -> Iterator[str]:
    """With one owner nothing is shared out; shares are of devices that there are and that their trials may get."""
    shares, queue = state.shares, state.queue
    known = set(state.allocations.work.jobs.owners)
    if state.shares.restricts and shares.policy != "irs":
        yield f"policy {shares.policy!r} shares devices out"
    for row in queue:
        trial = state.trials.by_row[row]
        share, eligible = shares.share_of(trial), state.occupancy.eligible.of(trial.constraint)
        if share is not None and not share <= state.occupancy.residents.keys():
            yield f"trial {trial.trial_id!r} has a share of devices {sorted(share)} that are not there"
        if share is not None and eligible is not None and not share <= eligible:
            yield f"trial {trial.trial_id!r} has a share of devices {sorted(share)} that it may not use"
    ranks = list(queue.ranks.values())
    if len(set(ranks)) < len(ranks):
        yield f"owners {known} share ranks: {dict(queue.ranks)}"
