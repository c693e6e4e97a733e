"""Reads ``CUDA_VISIBLE_DEVICES`` as CUDA does."""

from __future__ import annotations

from collections.abc import Callable


def visible(setting: str | None, count: int, exists: Callable[[str], object]) -> list[int | str]:
    """Reads ``CUDA_VISIBLE_DEVICES`` as CUDA does: ignores everything from the first unknown or repeated name on.

    Args:
        setting: its value; ``None`` if it is not set.
        count: number of GPUs.
        exists: returns a true value if a GPU, or an instance of one, has that UUID.

    Returns:
        Numbers and UUIDs.

    Example:
        >>> visible("1,0,7,2", count=3, exists=lambda uuid: False)
        [1, 0]
    """
    if setting is None:
        return list(range(count))
    chosen: list[int | str] = []
    for text in setting.split(","):
        name: int | str = text.strip()
        if isinstance(name, str) and name.isdecimal():
            name = int(name)
        known = name < count if isinstance(name, int) else bool(name) and exists(name)
        if not known or name in chosen:
            break
        chosen.append(name)
    return chosen
