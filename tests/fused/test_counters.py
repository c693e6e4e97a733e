"""Random numbers that are functions of a key and of counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fluid.fused.counters import counted_numbers, counted_numbers_on_cpu, philox  # noqa: E402

#: Key, counter and words, of Random123's kat_vectors for philox4x32 with 10 rounds.
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_the_words_are_those_that_are_known(make: Any) -> None:
    keys, counters, words = ([make(column) for column in zip(*part, strict=True)] for part in zip(*KNOWN, strict=True))
    assert [word.tolist() for word in philox(tuple(keys), tuple(counters))] == [word.tolist() for word in words]


@pytest.mark.parametrize(
    ("rows", "count"), [(1, 0), (1, 1), (3, 8), *((2, 8 + more) for more in range(1, 9)), (70, 2048), (2, 200_001)]
)
def test_numpy_and_pytorch_compute_the_same(rows: int, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    keys = torch.randint(2**63 - 1, (rows,), generator=generator)
    steps = torch.randint(2**32, (rows,), generator=generator)
    numbers = counted_numbers(keys, steps, count)
    assert numbers.shape == (rows, count) and numbers.dtype == torch.int16
    assert torch.equal(numbers, counted_numbers_on_cpu(keys, steps, count))
    for row in range(rows if count < 20 else 1):
        assert torch.equal(numbers[row : row + 1], counted_numbers(keys[row : row + 1], steps[row : row + 1], count))


def test_a_number_is_half_a_word_of_its_counter() -> None:
    keys, steps = torch.tensor([(2 << 32) + 1]), torch.tensor([9])
    words = philox(*(tuple(map(torch.tensor, part)) for part in (([1], [2]), ([1], [9], [0], [0]))))
    halves = [half - 2**15 for word in words for half in (int(word) % 2**16, int(word) // 2**16)]
    # Two counters: the second one's words are numbers 1, 3, 5 and so on.
    assert counted_numbers(keys, steps, 16)[0, 1::2].tolist() == halves


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "count"), [(1, 1), *((3, 8 + more) for more in range(8)), (64, 1024), (5, 70_001)])
def test_a_gpu_computes_the_same(rows: int, count: int) -> None:
    pytest.importorskip("triton")
    from fluid.fused.counters import _by_operations, _kernel_on

    generator = torch.Generator().manual_seed(count)
    keys = torch.randint(2**63 - 1, (rows,), generator=generator)
    steps = torch.randint(2**32, (rows,), generator=generator)
    expected = counted_numbers_on_cpu(keys, steps, count)
    kernel = _kernel_on(torch.device("cuda", 0))
    assert kernel is not None
    for compute in (kernel, _by_operations, counted_numbers):
        assert torch.equal(compute(keys.cuda(), steps.cuda(), count).cpu(), expected)
