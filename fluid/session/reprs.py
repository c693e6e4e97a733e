"""How handles show themselves at a prompt and in a notebook."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fluid.directions import search_text
from fluid.errors import FluidError
from fluid.resources import Device
from fluid.session.best import BestSoFar
from fluid.session.session import Session
from fluid.session.status import GroupStatus

#: Most characters of a config.
_MOST_CONFIG = 120
#: Most devices and groups that an executor names.
_MOST_NAMES = 8


def group_text(group: GroupStatus, run_dir: Path) -> str:
    """A group in one line: trials by state, the best result so far, and the run folder."""
    parts = [f"{group.name!r}", _trials(group.trials)]
    parts += [] if group.best is None else [f"best {_value(group.best)}, {_place(group.best)}"]
    parts += [] if group.open_metric is None else [f"no best: {search_text(group.open_metric)}"]
    return f"<TrialGroupHandle {'; '.join([*parts, f'run folder {run_dir}'])}>"


def group_html(group: GroupStatus, run_dir: Path) -> str:
    """A group as a table: trials by state, iterations, the best result so far with its config, and the run folder."""
    done = f"{group.iterations_done:,}" + (f" of {group.iterations:,}" if group.iterations else "")
    rows = {"group": group.name, "trials": _trials(group.trials), "iterations": done}
    if group.best is not None:
        config = repr(dict(group.best.config))
        config = config if len(config) <= _MOST_CONFIG else f"{config[: _MOST_CONFIG - 1]}…"
        rows |= {"best": f"{_value(group.best)}, {_place(group.best)}", "its config": config}
    if group.open_metric is not None:
        rows["best"] = search_text(group.open_metric)
    return table_html({**rows, "run folder": str(run_dir)})


def session_facts(session: Session) -> dict[str, str]:
    """What an executor shows of itself."""
    devices = None
    with contextlib.suppress(FluidError):  # It is closed.
        devices = session.devices
    return executor_facts(devices, [inbox.group.name for inbox in session.inboxes], session.run_dir)


def executor_facts(devices: Sequence[Device] | None, groups: Sequence[str], run_dir: Path) -> dict[str, str]:
    """What an executor shows of itself.

    Args:
        devices: its devices; ``None`` if it is closed.
        groups: names of its groups.
        run_dir: the run folder.
    """
    used = "closed" if devices is None else _listed([f"{device.kind} {device.index}" for device in devices])
    return {"devices": used, "groups": _listed(groups), "run folder": str(run_dir)}


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more if names else "none"


def table_html(rows: Mapping[str, str]) -> str:
    """Facts by name as a table."""
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th><td style='text-align:left'>{escape(text)}</td></tr>"
        for name, text in rows.items()
    )
    return f"<table>{cells}</table>"


def _trials(trials: Mapping[str, int]) -> str:
    total = sum(trials.values())
    states = ", ".join(f"{number:,} {state.lower()}" for state, number in sorted(trials.items()) if number)
    return f"{total:,} {'trial' if total == 1 else 'trials'}{': ' if states else ''}{states}"


def _value(best: BestSoFar) -> str:
    return f"{best.metric} {best.value:.4g} ({best.direction})"


def _place(best: BestSoFar) -> str:
    return f"{best.trial_id}, iteration {best.iteration:,}{best.fate}"
