"""A client of MPS, as a process of its own: ``python mps_client.py cuda|cpu SECONDS|fault``.

It prints "up" once it uses its device, computes for so many seconds, and prints "ok"; or it reads beyond the end of a
tensor, which is fatal to every client on that GPU. On a CPU it waits, or exits with status 1.
"""

from __future__ import annotations

import sys
import time


def compute(kind: str, seconds: float) -> None:
    """Computes, or waits on a CPU."""
    if kind == "cuda":
        import torch

        matrix = torch.randn(4096, 4096, device=kind)
        torch.cuda.synchronize()
    print("up", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if kind != "cuda":
            time.sleep(0.01)
            continue
        for _ in range(20):
            _ = matrix @ matrix
        torch.cuda.synchronize()
    print("ok", flush=True)


def fault(kind: str) -> None:
    """Brings a fatal fault on its GPU."""
    if kind != "cuda":
        raise SystemExit(1)
    import torch

    torch.zeros(1, device=kind)[torch.tensor([1 << 20], device=kind)].cpu()


if __name__ == "__main__":
    device, what = sys.argv[1:]
    if what == "fault":
        fault(device)
    else:
        compute(device, float(what))
