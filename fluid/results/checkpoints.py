"""The checkpoints of a run folder: which there are, and how one is loaded."""

from __future__ import annotations

import glob
import mmap
import os
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple
from zlib import crc32

from fluid.errors import FluidError, InvalidFieldError
from fluid.lane.checkpoints.files import iteration_of
from fluid.lane.checkpoints.paths import checkpoints_folder, folder_name, folder_of_host, kept_folder, trial_folder
from fluid.lane.checkpoints.seal import damage_of
from fluid.random_state import Seeds
from fluid.resources import MemoryNeed, Requires
from fluid.results.run_files import PAYLOADS
from fluid.trainables.loading import load_saved
from fluid.trainables.parted_pickle import load_pickled
from fluid.trainables.resident import STATE_FOLDER
from fluid.trainables.trainable_code import TrainableCode
from fluid.trial_fields import StartFrom
from fluid.trialgroup import Shown, Trial

# -- payload file --------------------------------------------------------------------------------
#
# Reads ``payloads.pkl``: trainables and configs of trials, pickled, for resuming and for loading checkpoints.
#
# The file is a row of pickles, *frames*. That of a trainable is ``{"trainable": number, "pickled": bytes, "code":
# digests}``. One of trials has their group and name, the ``"fields"`` that are the same for all, and ``"trials"``,
# each as the number of its trainable, its pickled config, its other fields, and its seeds. What stands last of a
# trial, which may have gone on with other code, counts. The last frame of a submission says ``"complete"``: a
# submission counts as a whole or not at all. Before each frame stands a head: where in the file it is, the frame's
# length and CRC-32, and the CRC-32 of the head itself. Older versions of Fluid wrote a frame for each trial, and no
# heads.


#: How a frame of an older Fluid begins: the protocol of pickle, and the opcode that frames its content.
_BEGIN = re.compile(rb"\x80[\x04-\x09]\x95", re.DOTALL)
#: A head: how it begins, the byte of the file where it does, the frame's length and CRC-32; behind it, its own.
_HEAD, _HEAD_CRC = struct.Struct(">8sQQI"), struct.Struct(">I")
_HEAD_BYTES = _HEAD.size + _HEAD_CRC.size
_MARK = b"\x89frame\r\n"
#: The classes of which frames hold objects.
_CLASSES = {(kind.__module__, kind.__qualname__): kind for kind in (Requires, MemoryNeed, StartFrom)}


class StoredTrial(NamedTuple):
    """A trial as the file has it; trainable and config are not unpickled yet.

    Attributes:
        group_id, name: its group.
        trainable, config: pickled.
        fields: the trial's other fields.
        seeds: of its random number generators; ``None`` if an older Fluid wrote the file.
        code: of the trainable; ``None`` if it is not known, as of an older Fluid.
        is_checked: whether a checksum vouches for it.
    """

    group_id: str
    name: str
    trainable: bytes
    config: bytes
    fields: dict[str, Any]
    seeds: Seeds | None = None
    code: TrainableCode | None = None
    is_checked: bool = False

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return str(self.fields["trial_id"])

    def load(self, trainables: dict[bytes, Any], shown: Shown | None = None) -> Trial:
        """Unpickles the trial.

        Args:
            trainables: those that are unpickled already, by their pickles; gets this one.
            shown: how reports show it.

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
        given = {"trainable": trainables[self.trainable], "config": config, "shown": shown, **self.fields}
        try:
            return Trial.of_checked(given) if self.is_checked else Trial(**given)
        except (AttributeError, TypeError, ValueError) as error:
            reason = f"the fields of trial {self.trial_id!r} are damaged: {error}"
            raise InvalidFieldError("run_dir", PAYLOADS, reason) from error

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
        while end < size and (frame := _read_frame(file, end, size)) is not None:
            if "pickled" in frame:
                trainables[frame["trainable"]] = frame["pickled"], TrainableCode.read(frame.get("code"))
                end = file.tell()
                continue
            try:
                started += _stored_trials(frame, trainables)
            except (KeyError, TypeError, ValueError):
                raise _damaged(path, end) from None
            end = file.tell()
            if "complete" in frame:
                found += started
            elif any(is_known(trial.trial_id) for trial in started):
                found += [trial for trial in started if is_known(trial.trial_id)]  # An older Fluid wrote no "complete".
            else:
                continue
            started, keep = [], end
        if end < size and not _is_torn(file, end, size):
            raise _damaged(path, end)
    return StoredTrials(found, keep)


def _damaged(path: Path, at: int) -> InvalidFieldError:
    return InvalidFieldError(
        "run_dir", str(path.parent), f"its {PAYLOADS} is damaged at byte {at}; it cannot be resumed"
    )


def checked_frames(frames: Iterable[bytes], offset: int) -> bytes:
    """Frames behind their heads.

    Args:
        frames: pickles.
        offset: the byte of the file where the first head begins.
    """
    parts: list[bytes] = []
    for frame in frames:
        head = _HEAD.pack(_MARK, offset, len(frame), crc32(frame))
        parts += (head, _HEAD_CRC.pack(crc32(head)), frame)
        offset += _HEAD_BYTES + len(frame)
    return b"".join(parts)


class _FrameReader(pickle.Unpickler):
    """Reads frames, and nothing that runs code."""

    def find_class(self, module: str, name: str) -> Any:
        # By identity: a name may have dots, and lead to whatever the module imports.
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is in no frame")


def _stored_trials(
    frame: dict[str, Any], trainables: Mapping[int, tuple[bytes, TrainableCode | None]]
) -> Iterator[StoredTrial]:
    """The trials of a frame. One of an older Fluid has a single trial.

    Raises:
        KeyError: the file has no such trainable before it.
        TypeError, ValueError: the frame is of another form.
    """
    group, name, shared = frame["group"], frame["name"], frame["fields"]
    for uses, config, own, seeds in frame.get("trials") or [(frame["uses"], frame["config"], {}, frame.get("seeds"))]:
        pickled, code = trainables[uses]
        fields = {**shared, **own}
        yield StoredTrial(group, name, pickled, config, fields, Seeds.read(seeds), code, frame.get("is_checked", False))


def _read_frame(file: IO[bytes] | mmap.mmap, start: int, size: int) -> dict[str, Any] | None:
    """The frame at byte ``start`` of a file of ``size`` bytes; ``None`` if there is no whole one."""
    file.seek(start)
    head = file.read(_HEAD_BYTES)
    if not head.startswith(_MARK):
        file.seek(start)
        return _load_frame(file)
    fields = _fields_of(head)
    if fields is None or fields[0] != start or start + _HEAD_BYTES + fields[1] > size:
        return None
    pickled = file.read(fields[1])
    frame = _load_frame(BytesIO(pickled)) if crc32(pickled) == fields[2] else None
    return None if frame is None else {**frame, "is_checked": True}


def _fields_of(head: bytes) -> tuple[int, int, int] | None:
    """What a head says: the byte where it begins, the frame's length and its CRC-32; ``None`` if it is damaged."""
    if len(head) < _HEAD_BYTES or crc32(head[: _HEAD.size]) != _HEAD_CRC.unpack_from(head, _HEAD.size)[0]:
        return None
    _, offset, length, crc = _HEAD.unpack_from(head)
    return offset, length, crc


def _load_frame(file: Any) -> dict[str, Any] | None:
    """Unpickles a frame; ``None`` if there is none."""
    try:
        frame = _FrameReader(file).load()
    except Exception:  # Of cut-off or other bytes pickle raises anything.
        return None
    return frame if isinstance(frame, dict) and any(_has(frame, entries) for entries in _FRAMES) else None


#: The entries of frames, by their types: of a trainable, of trials, and of one trial, as an older Fluid wrote.
_FRAMES: tuple[dict[str, type], ...] = (
    {"trainable": int, "pickled": bytes},
    {"group": str, "name": str, "fields": dict, "trials": list},
    {"group": str, "name": str, "fields": dict, "uses": int, "config": bytes},
)


def _has(frame: dict[Any, Any], entries: dict[str, type]) -> bool:
    if not all(isinstance(frame.get(name), kind) for name, kind in entries.items()):
        return False
    return "uses" not in entries or isinstance(frame["fields"].get("trial_id"), str)


def _is_torn(file: IO[bytes], start: int, size: int) -> bool:
    """Whether what begins at byte ``start``, and is no whole frame, may be the end of a file that was being written.

    That is the first part of a frame, or ends with zeros, which some file systems leave after a power cut.
    """
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:  # Nothing of it is copied.
        place = content.find(_MARK, start)
        while place >= 0:
            fields = _fields_of(content[place : place + _HEAD_BYTES])
            end = place + _HEAD_BYTES + (0 if fields is None else fields[1])
            if end <= size and (place, content[size - 1]) != (start, 0) and (fields is not None or place == start):
                return False
            place = content.find(_MARK, place + 1)
        begin = _BEGIN.search(content, start + 1)  # An iterator would keep the content open.
        while begin is not None:
            if _read_frame(content, begin.start(), size) is not None:
                return False
            begin = _BEGIN.search(content, begin.start() + 1)
    return True


# -- checkpoints ---------------------------------------------------------------------------------


class KeptCheckpoint(NamedTuple):
    """A checkpoint of a trial on disk.

    Example:
        >>> from pathlib import Path
        >>> from fluid import KeptCheckpoint
        >>> found = KeptCheckpoint(27, Path("run/trials/a/checkpoints/27-0-3/state"))
        >>> found.iteration, found.path.name
        (27, 'state')

    Attributes:
        iteration: iterations that the trial had done.
        path: the folder that ``save_checkpoint`` filled; of a generator function with a state, the one
            with ``state.pkl``.
    """

    iteration: int
    path: Path


def kept_checkpoints(run_dir: str | Path, trial_id: str) -> tuple[KeptCheckpoint, ...]:
    """Finds the checkpoints of a trial in a run folder, by the files alone; the newest is last.

    Beside those that ``FluidExecutor(keep=)`` kept, there may be some from which the session can be resumed.

    Example:
        >>> from fluid import FluidExecutor, Trial, TrialGroup, kept_checkpoints
        >>> class Counter:
        ...     def setup(self, config):
        ...         self.count = 0
        ...     def step(self):
        ...         self.count += 1
        ...         return {"count": self.count}
        ...     def save_checkpoint(self, folder):
        ...         return {"count": self.count}
        ...     def load_checkpoint(self, state):
        ...         self.count = state["count"]
        >>> with FluidExecutor(backend="local", devices=1, run_dir="run", verbose=0) as executor:
        ...     trial = Trial(Counter, budget=1_000_000, trial_id="a")
        ...     first = next(executor.submit_trialgroup(TrialGroup([trial])).results())
        ...     saved = executor.drain_all(deadline_s=30)
        >>> kept = kept_checkpoints("run", "a")[-1]
        >>> kept.iteration >= 1, kept.path.name
        (True, 'state')

    Args:
        run_dir: the run folder.
        trial_id: the trial, by the id under which it was submitted.
    """
    name = folder_name(trial_id)
    hosts = glob.glob(folder_of_host(glob.escape(str(run_dir)), "*"))
    found: dict[str, tuple[int, int, Path]] = {}
    bases = (*hosts, str(run_dir))
    for folder in [folder_in(base, name) for folder_in in (checkpoints_folder, kept_folder) for base in bases]:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    state = Path(entry.path, STATE_FOLDER)
                    if entry.name[:1].isdigit() and state.is_dir():
                        found[entry.name] = iteration_of(entry.path), entry.stat().st_mtime_ns, state
        except OSError:
            continue  # There is no such folder, or a lane has just deleted a checkpoint.
    return tuple(KeptCheckpoint(iteration, path) for iteration, _, path in sorted(found.values()))


#: Gives the trainable and the config of a trial.
TrainableSource = Callable[[], tuple[Any, Mapping[str, Any]]]


def load_checkpoint(run_dir: Path, trial_id: str, checkpoint: Path, source: TrainableSource) -> Any:
    """Loads a checkpoint: see :meth:`fluid.TrialResult.load_checkpoint`.

    Args:
        run_dir: the run folder.
        trial_id: the trial, by the id under which it was submitted.
        checkpoint: the folder that ``save_checkpoint`` filled.
        source: gives the trial's trainable and config.

    Raises:
        FluidError: the checkpoint is damaged or gone.
        InvalidFieldError: the trainable cannot be read.
    """
    damage = damage_of(str(checkpoint.parent))
    if damage is not None:
        raise FluidError(f"the checkpoint {checkpoint} cannot be loaded: {damage}")
    folder = trial_folder(str(run_dir), trial_id)
    return load_saved(str(checkpoint.parent), source, trial_id=trial_id, folder=folder)


def stored_trainable(run_dir: Path, trial_id: str) -> tuple[Any, Mapping[str, Any]]:
    """Unpickles a trial's trainable and config from ``payloads.pkl``, which runs code that the file names.

    Raises:
        InvalidFieldError: the file is missing or damaged, lacks the trial, or this process cannot unpickle it.
    """
    for stored in reversed(read_payloads(run_dir / PAYLOADS).trials):
        if stored.trial_id == trial_id:
            trial = stored.load({})
            return trial.trainable, trial.config
    raise InvalidFieldError("trial_id", trial_id, f"is unknown in {run_dir / PAYLOADS}")
