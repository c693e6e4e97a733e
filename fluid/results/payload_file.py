"""Reads ``payloads.pkl``: trainables and configs of trials, pickled, for resuming and for loading checkpoints.

The file is a row of pickles, *frames*: ``{"trainable": number, "pickled": bytes, "code": digests}``, and one per trial,
with the number of its trainable. Of several frames of a trial, which went on with other code, the last one counts. The
last trial of a submission says ``"complete"``: a submission counts as a whole or not at all.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from fluid.errors import InvalidFieldError
from fluid.random_state import Seeds
from fluid.results.folder_files import PAYLOADS
from fluid.trainables.parted_pickle import load_pickled
from fluid.trainables.trainable_code import TrainableCode
from fluid.trialgroup import Trial

#: How a frame begins: the protocol of pickle, and the opcode that frames its content.
_BEGIN = re.compile(rb"\x80[\x04-\x09]\x95", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StoredTrial:
    """A trial as the file has it; trainable and config are not unpickled yet.

    Attributes:
        group_id, name: its group.
        trainable, config: pickled.
        fields: the trial's other fields.
        seeds: of its random number generators; ``None`` if an older Fluid wrote the file.
        code: of the trainable; ``None`` if it is not known, as of an older Fluid.
    """

    group_id: str
    name: str
    trainable: bytes
    config: bytes
    fields: dict[str, Any]
    seeds: Seeds | None = None
    code: TrainableCode | None = None

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return str(self.fields["trial_id"])

    def load(self, trainables: dict[bytes, Any]) -> Trial:
        """Unpickles the trial.

        Args:
            trainables: those that are unpickled already, by their pickles; gets this one.

        Raises:
            InvalidFieldError: this process cannot unpickle it.
        """
        try:
            if self.trainable not in trainables:
                trainables[self.trainable] = load_pickled(self.trainable)
            config = pickle.loads(self.config)
        except (Exception, SystemExit) as error:  # What a pickle refers to may raise anything.
            reason = f"trial {self.trial_id!r} cannot be unpickled: {type(error).__name__}: {error}"
            raise InvalidFieldError("run_dir", PAYLOADS, reason) from error
        return Trial(trainables[self.trainable], config, **self.fields)

    def load_config(self) -> dict[str, Any]:
        """Unpickles the config alone; empty if this process cannot."""
        try:
            return dict(pickle.loads(self.config))
        except (Exception, SystemExit):
            return {}


class StoredTrials(NamedTuple):
    """What the file holds.

    Attributes:
        trials: the trials, in order of submission.
        whole_bytes: bytes up to the end of the last whole submission; a session that goes on cuts off what follows.
    """

    trials: list[StoredTrial]
    whole_bytes: int


def read_payloads(path: Path, is_known: Callable[[str], bool] = lambda _: True) -> StoredTrials:
    """Reads the stored trials, up to the last whole submission.

    Args:
        path: the file.
        is_known: whether the journal knows the trial of this id. An incomplete submission of others is left out.

    Raises:
        InvalidFieldError: there is no such file, or it is damaged before its end.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        reason = f"has no {PAYLOADS}, so it cannot be resumed, nor its checkpoints be loaded"
        raise InvalidFieldError("run_dir", str(path.parent), reason) from None
    found: list[StoredTrial] = []
    started: list[StoredTrial] = []
    trainables: dict[int, tuple[bytes, TrainableCode | None]] = {}
    with file:
        size = file.seek(0, 2)
        end = keep = file.seek(0)
        while end < size and (frame := _read_frame(file)) is not None:
            end = file.tell()
            if "pickled" in frame:
                trainables[frame["trainable"]] = frame["pickled"], TrainableCode.read(frame.get("code"))
                continue
            pickled, code = trainables[frame["uses"]]
            group_id, name, seeds = frame["group"], frame["name"], Seeds.read(frame.get("seeds"))
            started.append(StoredTrial(group_id, name, pickled, frame["config"], frame["fields"], seeds, code))
            if "complete" in frame:
                found += started
            elif is_known(started[-1].trial_id):
                found.append(started[-1])  # An older Fluid wrote no "complete".
            else:
                continue
            started, keep = [], end
        if end < size and _has_frame(file, end + 1):
            reason = f"its {PAYLOADS} is damaged at byte {end}, and goes on behind that; it cannot be resumed"
            raise InvalidFieldError("run_dir", str(path.parent), reason)
    return StoredTrials(found, keep)


class _FrameReader(pickle.Unpickler):
    """Reads frames, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "fluid.resources":
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is in no frame")


def _read_frame(file: IO[bytes]) -> dict[str, Any] | None:
    """The frame at the file's position; ``None`` if there is no whole one."""
    try:
        frame = _FrameReader(file).load()
    except Exception:  # Of cut-off or other bytes pickle raises anything.
        return None
    if isinstance(frame, dict) and frame.keys() >= {"trainable", "pickled"}:
        return frame
    return frame if isinstance(frame, dict) and frame.keys() >= {"group", "name", "uses", "config", "fields"} else None


def _has_frame(file: IO[bytes], start: int) -> bool:
    """Whether a whole frame begins at byte ``start`` or later."""
    file.seek(start)
    rest = file.read()
    return any(_read_frame(BytesIO(rest[begin.start() :])) is not None for begin in _BEGIN.finditer(rest))
