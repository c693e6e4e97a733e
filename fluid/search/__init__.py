"""Search spaces and samplers: which hyperparameters the trials of a sweep get.

A search space maps names to distributions, lists of choices and constants, or is a function of an Optuna trial. It
imports numpy, and Optuna where a space or a sampler needs it. Start reading in :mod:`fluid.search.space`; a new
sampler goes into :mod:`fluid.search.samplers`, a package whose distributions a space takes into
:mod:`fluid.search.conversion`.
"""

from __future__ import annotations

from fluid.search.domains import choice, lograndint, loguniform, randint, uniform
from fluid.search.samplers import Sampler, make_sampler
from fluid.search.space import ConditionalSpace, Space, make_space
from fluid.search.suggestion import Suggestion

__all__ = [
    "ConditionalSpace",
    "Sampler",
    "Space",
    "Suggestion",
    "choice",
    "lograndint",
    "loguniform",
    "make_sampler",
    "make_space",
    "randint",
    "uniform",
]
