"""Search algorithms, also those of other libraries, compared on a benchmark in rehearsed sweeps.

It imports :mod:`fluid.rehearsal`, :mod:`fluid.sweep` and, as an algorithm needs them, the integrations of Ray Tune and
HpBandSter. Start reading in :mod:`fluid.integrations.comparing.algorithms`.
"""
