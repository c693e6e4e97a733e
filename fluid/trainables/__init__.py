"""What users may pass as a trainable, and how it is pickled and sent to another process.

It imports ``errors``, ``_imports`` and ``_clock`` of fluid, and cloudpickle; ray only for Ray Tune's own trainables.
Start reading in :mod:`fluid.trainables.trainable` (the forms a trainable may have).
"""
