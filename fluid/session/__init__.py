"""A running session: the engine's thread, the handles that users hold, results, the run folder, and resume.

It imports :mod:`fluid.backends`, :mod:`fluid.engine` and lower packages; :mod:`fluid.executor` is its public door.
Start reading in :mod:`fluid.session.pump` (the engine's thread), then :mod:`fluid.session.handle`.
"""
