"""Search spaces, samplers and schedulers: which hyperparameters the trials of a sweep get, and how far each runs.

A search space maps names to distributions, lists of choices and constants, or is a function of an Optuna trial. It
imports numpy, and Optuna where a space or a sampler needs it. Start reading in :mod:`fluid.search.space`; a new
sampler goes into :mod:`fluid.search.samplers`, what asks a search library into :mod:`fluid.search.searchers`, and a
package whose distributions a space takes into :mod:`fluid.search.conversion`. BOHB's model is in
:mod:`fluid.search.density`, its searcher in :mod:`fluid.search.bohb`. The schedulers (ASHA, Hyperband) are in
:mod:`fluid.search.schedulers`, population based training in :mod:`fluid.search.population`, values that depend on the
iteration in :mod:`fluid.search.schedules`, what trials with them have in common in :mod:`fluid.search.prefixes`, what
ends a trial or a sweep early in :mod:`fluid.search.stop_rules`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluid.errors import PrefixEndedError
from fluid.search.conditions import when
from fluid.search.density import BOHB
from fluid.search.domains import choice, lograndint, loguniform, randint, uniform
from fluid.search.population import PBT
from fluid.search.samplers import Sampler, make_sampler
from fluid.search.schedules import Schedule, schedule
from fluid.search.searchers import AskLater, AskTell, Searcher, SearchOutcome
from fluid.search.space import ConditionalSpace, Space, make_space
from fluid.search.stop_rules import Plateau, Target, TrialPlateau
from fluid.search.suggestion import Suggestion
from fluid.user_calls import missing_name

__all__ = [
    "BOHB",
    "PBT",
    "AskLater",
    "AskTell",
    "ConditionalSpace",
    "Plateau",
    "PrefixEndedError",
    "Sampler",
    "Schedule",
    "SearchOutcome",
    "Searcher",
    "Space",
    "Suggestion",
    "Target",
    "TrialPlateau",
    "choice",
    "lograndint",
    "loguniform",
    "make_sampler",
    "make_space",
    "randint",
    "schedule",
    "uniform",
    "when",
]

if not TYPE_CHECKING:  # Or a type checker would take any name for one of the package.

    def __getattr__(name: str) -> object:
        raise missing_name("fluid.search", name)
