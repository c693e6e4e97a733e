"""For those who write their own parts of Fluid, and for its tests.

:mod:`~fluid.testing.play` drives an engine with a backend, :mod:`~fluid.testing.validate` checks an engine's state, and
:mod:`~fluid.testing.backends` and :mod:`~fluid.testing.policies` have the suites that those have to pass.
"""
