"""A machine's GPUs through NVML, and the supervision of NVIDIA MPS daemons.

It imports lower modules of fluid only; pynvml where it is installed. :mod:`fluid.mps` is the public door to MPS.
Start reading in :mod:`fluid.gpu.nvml`, and in :mod:`fluid.gpu.mps_supervisor` for how a daemon is ended.
"""
