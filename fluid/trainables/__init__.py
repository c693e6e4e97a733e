"""The forms of a trainable, and how trainables are pickled for another process.

It imports ``errors``, ``_imports`` and ``_clock`` of fluid, and cloudpickle; ray only for Ray Tune's own trainables.
Start reading in :mod:`fluid.trainables.trainable` (the forms a trainable may have).
"""
