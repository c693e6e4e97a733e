"""LightGBM on Fluid: sweeps over its parameters, with boosting rounds as iterations.

:func:`train` takes the arguments of ``lightgbm.train``, with ranges among the parameters. :func:`fit` does the same for
the estimators of LightGBM's scikit-learn interface. :func:`report_callback` is for training functions of your own.
"""

from fluid._imports import try_import

with try_import("LightGBM", extra="lightgbm") as _imports:
    from fluid.integrations.lightgbm.estimators import fit
    from fluid.integrations.lightgbm.reporting import remaining, report_callback
    from fluid.integrations.lightgbm.sweeps import train
_imports.check()

__all__ = ["fit", "remaining", "report_callback", "train"]
