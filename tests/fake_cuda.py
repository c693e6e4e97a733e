"""A stand-in for CUDA's driver on a machine of two unlike GPUs: it has the faster one, second on the bus, first."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SLOW_TOKEN, FAST_TOKEN = (f"GPU-00000000-0000-0000-0000-0000000000{last}" for last in ("a1", "b2"))
_CODE = """
#include <stdlib.h>
#include <string.h>
static const char last[2] = {(char)0xb2, (char)0xa1};
static int first;
int cuInit(unsigned flags) {
    const char *shown = getenv("CUDA_VISIBLE_DEVICES"), *order = getenv("CUDA_DEVICE_ORDER");
    if (!shown || (strcmp(shown, "0") && strcmp(shown, "1"))) return 100;
    first = shown[0] - '0';
    if (order && !strcmp(order, "PCI_BUS_ID")) first = 1 - first;
    return 0;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0, 16); uuid[15] = last[first]; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = first ? 40ul << 30 : 140ul << 30; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, first ? "NVIDIA A100" : "NVIDIA H200", size);
    return 0;
}
"""


def make_library(folder: Path) -> Path:
    """Makes it in a folder, for ``LD_LIBRARY_PATH``, which is returned; skips the test without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a stand-in for CUDA's driver with")
    (folder / "cuda.c").write_text(_CODE, encoding="ascii")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder
