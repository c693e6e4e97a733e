"""Optuna on Fluid: its samplers and pruners decide, its storages keep the study, Fluid's lanes train.

:func:`optimize` replaces ``study.optimize``. Start reading at ``study``, then ``loop``.
"""

from fluid.integrations.optuna.study import optimize

__all__ = ["optimize"]
