"""The sizes of the three sweeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Scale(NamedTuple):
    """A size of a sweep.

    Attributes:
        samples: configurations of random search and of ASHA, and the most of a grid. The algorithms with brackets try
            as many as fill one bracket of each size.
        population: trials of population based training.
        max_t: iterations of a trial that is not stopped.
        target: a value of the metric; the outcome has the time to reach it.
        fixed: the ``fixed`` entry of the trainable's config; layers are ``shrink`` times narrower.
    """

    samples: int
    population: int
    max_t: int
    target: float
    fixed: Mapping[str, Any]


#: By workload and scale. ``full`` is the paper's setting, for GPUs; ``small`` takes minutes on two CPU cores; ``tiny``
#: takes seconds, and its models learn next to nothing. Perplexities of different scales
#: cannot be compared, as their vocabularies differ in size.
SCALES: Mapping[str, Mapping[str, Scale]] = {
    "cifar10": {
        "tiny": Scale(3, 3, 3, 0.15, {"shrink": 16, "images": 128}),
        "small": Scale(9, 6, 9, 0.25, {"shrink": 8, "images": 800}),
        "full": Scale(81, 16, 81, 0.90, {"shrink": 1, "images": None}),
    },
    "wlm": {
        "tiny": Scale(3, 3, 3, 100.0, {"shrink": 16, "words": 2_000, "vocabulary": 100}),
        "small": Scale(9, 6, 9, 50.0, {"shrink": 4, "words": 12_000, "vocabulary": 1_000}),
        "full": Scale(81, 16, 81, 140.0, {"shrink": 1, "words": None, "vocabulary": None}),
    },
    "dcgan": {
        "tiny": Scale(3, 3, 3, 1.001, {"shrink": 8, "batch": 8, "batches": 4, "scored": 50}),
        "small": Scale(9, 6, 9, 1.5, {"shrink": 4, "batch": 16, "batches": 50, "scored": 250}),
        "full": Scale(81, 16, 81, 5.2, {"shrink": 1, "batch": 64, "batches": None, "scored": 5_000}),
    },
}
SCALE_NAMES = tuple(SCALES["cifar10"])
