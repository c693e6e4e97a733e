"""Optuna on Fluid: samplers, pruners and storages decide and remember, Fluid's lanes run.

:func:`optimize` takes the place of ``study.optimize``.
"""

from fluid.integrations.optuna.study import optimize

__all__ = ["optimize"]
