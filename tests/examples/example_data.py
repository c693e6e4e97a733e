"""Makes small data sets in the formats of the real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def make_data(folder: Path) -> None:
    """Writes small data sets in the formats of the real ones into a folder."""
    rng = np.random.default_rng(0)

    def pictures(count: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
        # In random order: the examples hold out every tenth image, which must be of all classes.
        labels = rng.permutation(np.arange(count) % 10)
        kinds = np.random.default_rng(1).integers(0, 200, (10, *shape))
        return (kinds[labels] + rng.integers(0, 56, (count, *shape))).astype(np.uint8), labels.astype(np.uint8)

    (x_train, y_train), (x_test, y_test) = pictures(400, 32, 32, 3), pictures(100, 32, 32, 3)
    np.savez(folder / "cifar10-10k.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    images, labels = pictures(600, 28, 28)
    np.savez(folder / "mnist-10k.npz", images=images, labels=labels)
    (folder / "wikitext-2").mkdir()
    words = [f"w{number}" for number in range(60)]
    for part, count in (("valid", 400), ("test", 3_000)):
        starts = rng.integers(0, len(words), count // 10)
        lines = (" ".join(words[(start + step) % len(words)] for step in range(9)) for start in starts)
        (folder / "wikitext-2" / f"{part}.txt").write_text("\n".join(lines), encoding="utf-8")
