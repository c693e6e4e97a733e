"""XGBoost on Fluid: sweeps over its parameters, with boosting rounds as iterations.

:func:`train` takes the arguments of ``xgboost.train``, with ranges among the parameters. :func:`fit` does the same for
the estimators of XGBoost's scikit-learn interface. :class:`ReportCallback` is for training functions of your own.
"""

from fluid._imports import try_import

with try_import("XGBoost", extra="xgboost") as _imports:
    from fluid.integrations.xgboost.estimators import fit
    from fluid.integrations.xgboost.reporting import ReportCallback, remaining
    from fluid.integrations.xgboost.sweeps import train
_imports.check()

__all__ = ["ReportCallback", "fit", "remaining", "train"]
