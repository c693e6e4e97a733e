"""The look of axes that figures of reports have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY, RULE = "#555555", "#d9d9d9"


def plain_axes(axes: Axes) -> None:
    """Draws axes with a light grid, without a frame."""
    axes.grid(color=RULE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(RULE)
    axes.tick_params(length=0, labelsize=8.5, labelcolor=GREY)
