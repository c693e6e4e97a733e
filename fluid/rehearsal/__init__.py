"""Rehearsal: a whole sweep on the real engine and a virtual clock, with trials that are replayed, not run.

It imports :mod:`fluid.backends.simulated`, :mod:`fluid.results`, :mod:`fluid.measure` and lower packages, numpy, and
what a source of replayed trials needs. Start reading in :mod:`fluid.rehearsal.replayable` (what a trial does) and
:mod:`fluid.rehearsal.backend` (how it is played).
"""

from fluid.measure.runtime_model import FusedRates
from fluid.rehearsal.backend import RehearsalBackend
from fluid.rehearsal.overheads import Overheads, overheads_of
from fluid.rehearsal.plan import RehearsalPlan, rehearsing
from fluid.rehearsal.recorded import ReplayedRun, recorded
from fluid.rehearsal.replayable import Replayable, ReplayedFusion, ReplayedIteration

__all__ = [
    "FusedRates",
    "Overheads",
    "RehearsalBackend",
    "RehearsalPlan",
    "Replayable",
    "ReplayedFusion",
    "ReplayedIteration",
    "ReplayedRun",
    "overheads_of",
    "recorded",
    "rehearsing",
]
