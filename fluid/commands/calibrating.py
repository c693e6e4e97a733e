"""``fluid rehearse --calibrate``: a real run beside the rehearsal that predicted it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fluid.commands.inout import make_console, write_json
from fluid.errors import InvalidFieldError

if TYPE_CHECKING:
    from fluid.commands.script_rehearsals import ScriptRehearsal
    from fluid.rehearsal.outcome import SweepOutcome


def calibrate(arguments: argparse.Namespace, rehearse: Callable[[int], ScriptRehearsal]) -> None:
    """Compares each sweep of the real run with the rehearsal of it, and prints tables.

    Args:
        arguments: of the command line.
        rehearse: rehearses the script on a number of devices, where no rehearsal is given.
    """
    from fluid.rehearsal.calibration import Calibration
    from fluid.rehearsal.outcome import outcomes_of
    from fluid.reports.tables.rehearsal import calibration_as_json, calibration_table

    real = outcomes_of(arguments.calibrate, arguments.metric, arguments.mode)
    if not any(each.results for each in real):
        raise InvalidFieldError("calibrate", arguments.calibrate, "has no finished iteration")
    devices = max(each.devices for each in real)
    if arguments.against is not None:
        predicted = _read(arguments.against, devices, arguments)
    else:
        predicted = [sweep.outcomes[str(devices)][0] for sweep in rehearse(devices).sweeps]
    pairs = [Calibration.of(one, other) for one, other in _paired(predicted, real)]
    content = {"calibrations": [{"name": each.real.name, **calibration_as_json(each)} for each in pairs]}
    if arguments.json and write_json(content, arguments.json):
        return
    console = make_console()
    for each in pairs:
        title = f"{each.real.name}: {arguments.calibrate} beside its rehearsal"
        console.print(calibration_table(each, title), soft_wrap=True)


def _paired(predicted: Sequence[SweepOutcome], real: Sequence[SweepOutcome]) -> list[tuple[SweepOutcome, SweepOutcome]]:
    """The sweeps of both: by name, else by position."""
    named = {each.name: each for each in predicted}
    pairs = [(named[each.name], each) for each in real if each.name in named]
    return pairs or list(zip(predicted, real, strict=False))


def _read(path: str, devices: int, arguments: argparse.Namespace) -> list[SweepOutcome]:
    """The outcomes in a file that ``--record`` wrote, or in a run folder.

    Raises:
        InvalidFieldError: it is neither, or was on other numbers of devices.
    """
    from fluid.rehearsal.outcome import SweepOutcome, outcomes_of

    if Path(path).is_dir() and not (Path(path) / "rehearsal.json").is_file():
        return outcomes_of(path, arguments.metric, arguments.mode)
    file = Path(path) / "rehearsal.json" if Path(path).is_dir() else Path(path)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        sweeps = None if "outcomes" in content else content["sweeps"]
    except OSError as error:
        raise InvalidFieldError("against", path, f"cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidFieldError("against", path, "is not what fluid rehearse --record wrote") from error
    if sweeps is None:
        raise InvalidFieldError("against", path, "compares algorithms on a benchmark: give the rehearsal of a script")
    known = sorted({int(count) for sweep in sweeps for count in sweep["outcomes"]})
    if devices not in known:
        counts = ", ".join(map(str, known))
        reason = f"was rehearsed on {counts} devices; the run had {devices}: rehearse it with --devices {devices}"
        raise InvalidFieldError("against", path, reason)
    return [SweepOutcome.from_json(sweep["outcomes"][str(devices)][0]) for sweep in sweeps]
