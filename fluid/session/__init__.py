"""A running session: the engine's thread, the handles that users hold, results, the run folder, and resume.

It imports :mod:`fluid.backends`, :mod:`fluid.engine` and lower packages; :mod:`fluid.executor` is its public door.
Start reading in :mod:`fluid.session.session` (requests), then :mod:`fluid.session.pump` (the engine's thread),
:mod:`fluid.session.inbox` (what it reports of a group) and :mod:`fluid.session.handle` (the user's view of that).
"""
