"""Random numbers that are functions of a key and of counters, so that those of all rows are computed at once.

They are those of Philox4x32-10 ("Parallel random numbers: as easy as 1, 2, 3", Salmon et al., 2011): ten rounds of two
products of 32 bits make four random words of four counters and a key of two words. There is no state, so a trial
draws the same numbers alone and in a pack, on any device and in any order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TypeVar

import numpy as np
import torch

#: NumPy's or PyTorch's, of int64.
_Array = TypeVar("_Array", np.ndarray, torch.Tensor)

#: The factors of a round, and what is added to the key after it.
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_ADDED = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_HALF = 0xFFFF
#: Numbers of 16 bits in a block: two in each of the four words of a counter.
_IN_BLOCK = 8
#: On CPUs, blocks that are computed at once: few calls, of arrays that stay near the core.
_BLOCKS_AT_ONCE = 3 * 2**12

_log = logging.getLogger(__name__)


def philox(key: tuple[_Array, _Array], counter: tuple[_Array, _Array, _Array, _Array]) -> tuple[_Array, ...]:
    """Returns the four random words of each counter.

    Args:
        key: its words, which broadcast to the counters' shape.
        counter: its words, of one shape.
    """
    one, two = key
    a, b, c, d = counter
    for _ in range(_ROUNDS):
        # int64 has all 64 bits of a product of two words; its sign is one of them. High words of b and d do no harm.
        low, high = a * _FACTORS[0], c * _FACTORS[1]
        a = high >> 32
        a ^= b
        a ^= one
        a &= _WORD
        c = low >> 32
        c ^= d
        c ^= two
        c &= _WORD
        b, d = high, low
        one, two = (one + _ADDED[0]) & _WORD, (two + _ADDED[1]) & _WORD
    return a, b & _WORD, c, d & _WORD


def counted_numbers(keys: torch.Tensor, steps: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the random numbers of some rows in a step each, by operations on their device.

    Number ``n`` of a row is in the words of the counter ``(n % blocks, step, 0, 0)``, where there are
    ``blocks = ceil(count / 8)`` of them: it is their half ``n // blocks``, the lower one of a word first.

    Args:
        keys: of each row, ``int64 (rows,)``, not negative.
        steps: of each row, ``int64 (rows,)``, below 2**32.
        count: numbers of each row.

    Returns:
        ``int16 (rows, count)``, each of the 2**16 values being as likely.
    """
    kernel = _kernel_on(keys.device) if keys.is_cuda else None
    return _by_operations(keys, steps, count) if kernel is None else kernel(keys, steps, count)


def counted_numbers_on_cpu(keys: torch.Tensor, steps: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the same as :func:`counted_numbers` of tensors on the CPU, where NumPy is twice as fast as PyTorch."""
    blocks = -(-count // _IN_BLOCK)
    found = np.empty((len(keys), _IN_BLOCK, blocks), np.int16)
    width = max(1, min(blocks, _BLOCKS_AT_ONCE))
    height = _BLOCKS_AT_ONCE // width
    for top in range(0, len(keys), height):
        rows = slice(top, top + height)
        key, step = keys[rows].numpy()[:, None], steps[rows].numpy()[:, None]
        for begin in range(0, blocks, width):
            part = found[rows, :, begin : begin + width]
            words = _words_of_blocks(key, step, np.arange(begin, begin + part.shape[-1]))
            for number, word in enumerate(words):
                np.subtract(word & _HALF, 2**15, out=part[:, 2 * number], casting="unsafe")
                np.subtract(word >> 16, 2**15, out=part[:, 2 * number + 1], casting="unsafe")
    return torch.from_numpy(found.reshape(len(keys), -1)[:, :count])


def _by_operations(keys: torch.Tensor, steps: torch.Tensor, count: int) -> torch.Tensor:
    blocks = torch.arange(-(-count // _IN_BLOCK), device=keys.device)
    words = _words_of_blocks(keys.unsqueeze(-1), steps.unsqueeze(-1), blocks)
    halves = [half for word in words for half in (word & _HALF, word >> 16)]
    return (torch.cat(halves, dim=-1)[:, :count] - 2**15).to(torch.int16)


def _words_of_blocks(keys: _Array, steps: _Array, blocks: _Array) -> tuple[_Array, ...]:
    """Returns the words of counters, each ``(rows, blocks)``, given keys and steps ``(rows, 1)``."""
    zero = (keys & 0) + (blocks & 0)
    return philox((keys & _WORD, keys >> 32), (blocks + zero, steps + zero, zero, zero))


@cache
def _kernel_on(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None:
    """Returns what computes the numbers on a GPU in one launch; ``None`` if Triton cannot, or not the same ones."""
    keys, steps = (torch.arange(1, 4, device=device) * factor for factor in (0x123456789ABCDEF, 12345))
    try:
        from fluid.fused.counters_kernel import counted_numbers as kernel

        if torch.equal(kernel(keys, steps, 23), _by_operations(keys, steps, 23)):
            return kernel
        reason = "its numbers are wrong"
    except Exception as error:  # It is not installed, too old, or finds no C compiler.
        reason = f"{type(error).__name__}: {error}"
    _log.info("masks of Dropout are computed without Triton: %s", reason)
    return None
