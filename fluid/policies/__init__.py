"""The engine's features: policies beside its core, which does not name them.

Each is a class derived from :class:`fluid.engine.policy.Policy`. They import :mod:`fluid.engine` and lower packages,
and do not call one another. Start reading in :mod:`fluid.policies.engine`, which has all of them in the order in which
they are asked.
"""
