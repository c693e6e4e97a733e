"""The random numbers of :mod:`fluid.fused.counters` on a GPU, in one launch, by Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Counters of one program.
_SIZE = 256


# Without types: Triton looks up their names, and takes no others than its own.
@triton.jit
def _put(found, place, word, kept):  # type: ignore[no-untyped-def]
    # Less 2**31: the highest bit is turned round.
    tl.store(found + place, (word ^ 0x80000000).to(tl.int32, bitcast=True), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _fill(keys, steps, found, count, blocks, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    zero = block * 0
    step = zero + tl.load(steps + row).to(tl.int32)
    one, two, three, four = tl.philox(tl.load(keys + row), block, step, zero, zero, 10)
    found += row * count
    present = block < blocks
    _put(found, block, one, present)
    _put(found, block + blocks, two, present & (block + blocks < count))
    _put(found, block + 2 * blocks, three, present & (block + 2 * blocks < count))
    _put(found, block + 3 * blocks, four, present & (block + 3 * blocks < count))


def counted_numbers(keys: torch.Tensor, steps: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the same as :func:`fluid.fused.counters.counted_numbers`, of tensors on a GPU."""
    found = torch.empty(len(keys), count, dtype=torch.int32, device=keys.device)
    blocks = -(-count // 4)
    with torch.cuda.device(keys.device):
        _fill[len(keys), -(-blocks // _SIZE)](keys, steps, found, count, blocks, SIZE=_SIZE)
    return found
