"""The state machine that decides what runs where: events in, commands out, no IO and no clock.

It imports :mod:`fluid.devices`, :mod:`fluid.measure`, :mod:`fluid.planners`, ``resources``, ``trialgroup`` and
``errors`` of fluid, and numpy. Start reading in :mod:`fluid.engine.engine` (one handler for each event), with
:mod:`fluid.engine.events` and :mod:`fluid.engine.commands` beside it.
"""
