"""joblib on Fluid: ``import fluid.integrations.joblib`` registers the backend ``"fluid"``.

What is built on joblib then runs in lanes: scikit-learn's ``GridSearchCV``, ``cross_val_score``, forests, and so on.
Start reading at ``backend``, then ``dispatch``.
"""

from fluid.integrations.joblib.backend import FluidBackend, register
from fluid.integrations.joblib.dispatch import WorkerDiedError

__all__ = ["FluidBackend", "WorkerDiedError"]

register()
