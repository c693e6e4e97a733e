"""A letter and a colour for every trial, the same in every view and report."""

from __future__ import annotations

import string

#: The colours of Okabe and Ito, which remain distinct under the common kinds of colour blindness, and a grey. The order
#: keeps neighbours distinct.
_BASE = ("0072B2", "E69F00", "009E73", "CC79A7", "56B4E9", "D55E00", "F0E442", "8C8C8C")
#: Share of white (> 0) or black (< 0) mixed in on each further round through the colours.
_ROUNDS = (0.0, 0.5, -0.35)
_LETTERS = string.ascii_lowercase + string.ascii_uppercase


def mark(trial: int) -> str:
    """A letter for the trial with this number: ``a`` to ``z``, ``A`` to ``Z``, then ``53``, ``54`` and so on."""
    return _LETTERS[trial] if trial < len(_LETTERS) else str(trial + 1)


def colour(trial: int) -> str:
    """The colour of the trial with this number, as ``#rrggbb``."""
    shade = _ROUNDS[trial // len(_BASE) % len(_ROUNDS)]
    target = 255 if shade > 0.0 else 0
    channels = [round(channel + (target - channel) * abs(shade)) for channel in _channels(_BASE[trial % len(_BASE)])]
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def ink(background: str) -> str:
    """Black or white, whichever is more legible on ``background`` (``#rrggbb``)."""
    red, green, blue = _channels(background.lstrip("#"))
    # Perceived brightness (ITU-R BT.601); the limit is below the middle because the labels are small.
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#ffffff"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[0:2], 16), int(colour[2:4], 16), int(colour[4:6], 16)
