"""HpBandSter's optimizers on Fluid, in place of its workers and its name server.

:func:`run` runs an optimizer to its end and returns HpBandSter's ``Result``. Start reading at ``running``, then
``loop``.
"""

from fluid._imports import try_import

with try_import("HpBandSter", extra="hpbandster") as _imports:
    from fluid.integrations.hpbandster.running import run
_imports.check()

__all__ = ["run"]
