"""The random numbers of :mod:`fluid.fused.counters` on a GPU, in one launch, by Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Counters of one program.
_SIZE = 256


# Without types: Triton looks up their names, and takes no others than its own.
@triton.jit
def _put(found, place, blocks, count, word, present):  # type: ignore[no-untyped-def]
    # Less 2**15: the highest bit is turned round.
    low, high = (word ^ 0x8000).to(tl.int16), ((word >> 16) ^ 0x8000).to(tl.int16)
    tl.store(found + place, low, mask=present & (place < count))
    tl.store(found + place + blocks, high, mask=present & (place + blocks < count))


@triton.jit  # type: ignore[untyped-decorator]
def _fill(keys, steps, found, count, blocks, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    zero = block * 0
    step = zero + tl.load(steps + row).to(tl.int32)
    one, two, three, four = tl.philox(tl.load(keys + row), block, step, zero, zero, 10)
    found += row * count
    present = block < blocks
    _put(found, block, blocks, count, one, present)
    _put(found, block + 2 * blocks, blocks, count, two, present)
    _put(found, block + 4 * blocks, blocks, count, three, present)
    _put(found, block + 6 * blocks, blocks, count, four, present)


def counted_numbers(keys: torch.Tensor, steps: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the same as :func:`fluid.fused.counters.counted_numbers`, of tensors on a GPU."""
    found = torch.empty(len(keys), count, dtype=torch.int16, device=keys.device)
    blocks = -(-count // 8)  # Two numbers in each of the four words of a counter.
    with torch.cuda.device(keys.device):
        _fill[len(keys), -(-blocks // _SIZE)](keys, steps, found, count, blocks, SIZE=_SIZE)
    return found
