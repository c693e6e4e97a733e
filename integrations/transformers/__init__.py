"""Sweeps of Hugging Face's Trainer on Fluid: an iteration is an evaluation, checkpoints are the Trainer's.

:func:`hyperparameter_search` replaces ``trainer.hyperparameter_search``. :class:`FluidTrainerCallback` is for functions
that make a trainer themselves. Start reading at ``search``, then ``trial``.
"""

from fluid.integrations.transformers.callback import FluidTrainerCallback
from fluid.integrations.transformers.search import hyperparameter_search

__all__ = ["FluidTrainerCallback", "hyperparameter_search"]
