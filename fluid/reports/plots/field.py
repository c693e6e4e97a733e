"""How good trials are over two hyperparameters: their ranks, smoothed between them.

The page's script ``page.contour.js`` computes the same, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Bandwidth of the kernel for one trial, in shares of an axis: the standard deviation of places spread evenly over it.
_SPREAD = 0.29
#: A cell whose trials weigh less together has none near it, and stays empty; less than the other along an axis is none.
_LEAST_WEIGHT, _NO_WEIGHT = 0.05, 1e-6


def field(
    points: Sequence[tuple[float, float, float]],
    columns: int,
    rows: int,
    numeric_across: bool = True,
    numeric_up: bool = True,
) -> NDArray[np.float64]:
    """The quality at each cell, ``(rows, columns)``, the lowest row first; NaN where no trial is near.

    It is a mean of those of the trials, weighted by a Gaussian kernel along axes of numbers, with the bandwidth of
    Scott's rule (Scott: Multivariate Density Estimation, 1992) for places that are spread evenly; trials of other
    categories weigh nothing.

    Args:
        points: of each trial the place across and up, in shares of the axes, and its quality, from 0 to 1.
        columns, rows: the number of cells; on an axis of categories, of these.
        numeric_across, numeric_up: whether the axes are of numbers.
    """
    numeric = numeric_across + numeric_up
    bands = (1 if numeric_across else columns) * (1 if numeric_up else rows)
    width = _SPREAD * max(1.0, len(points) / bands) ** (-1.0 / (4 + numeric))
    x, y, quality = np.asarray(points, dtype=float).reshape(-1, 3).T
    across = _weights(x, columns, width, numeric_across)
    up = _weights(y, rows, width, numeric_up)
    up[up < _NO_WEIGHT] = 0.0
    weights = up.T @ across
    sums = (up * quality[:, None]).T @ across
    return np.where(weights < _LEAST_WEIGHT, np.nan, sums / np.maximum(weights, _LEAST_WEIGHT))


def _weights(places: NDArray[np.float64], cells: int, width: float, is_numeric: bool) -> NDArray[np.float64]:
    """What each point weighs in each cell along one axis, ``(points, cells)``."""
    distance = (np.arange(cells) + 0.5) / cells - places[:, None]
    if is_numeric:
        return np.asarray(np.exp(-(distance**2) / (2.0 * width**2)))
    return (np.abs(distance) < 0.5 / cells).astype(float)
