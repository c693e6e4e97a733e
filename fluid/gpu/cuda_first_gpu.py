"""Writes as JSON which GPU is CUDA's first one here, without making a context there: ``[UUID, bytes, name]``.

A program of its own: CUDA reads ``CUDA_VISIBLE_DEVICES`` once in a process, and a process that has used CUDA cannot
fork. :mod:`fluid.gpu.assigned` runs it. It ends with status 1 if CUDA has no GPU.
"""

from __future__ import annotations

import ctypes
import json
import sys
import uuid

#: Bytes that a name may have.
_LONGEST = 256


def first_gpu() -> tuple[str, float, str]:
    """Returns the UUID, without the ``GPU-`` of its name, the memory in bytes and the model.

    Raises:
        OSError: there is no CUDA driver, or it has no GPU.
    """
    cuda = ctypes.CDLL("libcuda.so.1")
    number, token = ctypes.c_int(), (ctypes.c_char * 16)()
    size, name = ctypes.c_size_t(), ctypes.create_string_buffer(_LONGEST)
    # The first version of it has the GPU's own UUID where MIG has split it.
    ask_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    for status in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(number), 0),
        ask_uuid(ctypes.byref(token), number),
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), number),
        cuda.cuDeviceGetName(name, _LONGEST, number),
    ):
        if status:
            raise OSError(f"CUDA answers with error {status}")
    return str(uuid.UUID(bytes=token.raw)), float(size.value), name.value.decode(errors="replace")


if __name__ == "__main__":
    try:
        json.dump(first_gpu(), sys.stdout)
    except (OSError, AttributeError) as error:
        sys.exit(str(error))
