"""Pickled trials, as they are sent to a lane and written to the run folder.

A trial is pickled at its submission, in the submitter's thread: lanes run what it was then, and one that cannot be
pickled is refused before it reaches the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fluid.keeping import KeepRule
from fluid.trainables.import_scan import elastic_class_of, imports_of
from fluid.trainables.json_form import json_form
from fluid.trainables.pickling import dump_config, dump_trainable
from fluid.trainables.trainable import is_elastic, kind_of
from fluid.trainables.trainable_code import TrainableCode
from fluid.trial_fields import ANY_PROCESS, TrialProcess

#: Least size of a payload that a host keeps for all its lanes, bytes; smaller ones reach a lane sooner in a message.
LARGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainablePayload:
    """A trainable, pickled.

    Attributes:
        pickled: the trainable, by cloudpickle.
        imports: modules that it imports, for lanes to load ahead of its first trial.
        elastic: whether its trials can span several devices.
        script: a pickled :class:`fluid.lane.process.script.Script`: what the script had set as it was submitted; empty
            where trials run in this process.
        code: what a later session compares with the code that it is given; ``None`` if it cannot.
        digest: stands for ``pickled`` and ``script`` where trainables are compared for as long as the session lasts.
    """

    pickled: bytes
    imports: tuple[str, ...] = ()
    elastic: bool = False
    script: bytes = b""
    code: TrainableCode | None = field(default=None, compare=False, repr=False)
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest_of(self.pickled, self.script))


@dataclass(frozen=True, slots=True)
class TrialPayload:
    """A trial's trainable and config, pickled.

    Attributes:
        shown_config: the config that reports show, in its JSON form.
        process: what the trial asks of its process.
        keep: which of its checkpoints outlive the run; ``None`` for none.
        config_digest: stands for a config of at least :data:`LARGE_BYTES`; empty for a smaller one.
    """

    trainable: TrainablePayload
    config: bytes
    shown_config: Any = None
    process: TrialProcess = ANY_PROCESS
    keep: KeepRule | None = None
    config_digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config_digest", _digest_of(self.config) if len(self.config) >= LARGE_BYTES else b"")


def payload_of(
    trainable: Any, config: Mapping[str, Any], shown_config: Mapping[str, Any] | None = None
) -> TrialPayload:
    """Pickles a trial.

    Args:
        trainable: the trial's.
        config: the trial's.
        shown_config: what reports show in its place; ``None`` for the config itself.

    Raises:
        InvalidFieldError: the trainable or the config cannot be used or pickled.
        MissingDependencyError: the trainable needs a package that is not installed.
    """
    return trial_payload(trainable_payload(trainable), config, shown_config)


def _digest_of(data: bytes, further: bytes = b"") -> bytes:
    digest = hashlib.blake2b(data, digest_size=16)
    digest.update(further)
    return digest.digest()


def trial_payload(
    trainable: TrainablePayload,
    config: Mapping[str, Any],
    shown_config: Mapping[str, Any] | None = None,
    process: TrialProcess = ANY_PROCESS,
) -> TrialPayload:
    """Pickles a trial whose trainable is pickled.

    Raises:
        InvalidFieldError: the config cannot be pickled.
    """
    shown = config if shown_config is None else shown_config
    form = json_form(shown if type(shown) is dict else dict(shown))
    return TrialPayload(trainable, dump_config(config), form, process)


def trainable_payload(
    trainable: Any,
    require: Callable[[Any], None] | None = None,
    dumps: Callable[[Any], bytes] | None = None,
    script: Callable[[bytes], bytes] | None = None,
) -> TrainablePayload:
    """Pickles a trainable as it is now.

    Args:
        trainable: the trial's.
        require: refuses trainables that cannot be used; ``None`` for those that lanes cannot run.
        dumps: does the pickling, to be read by :mod:`fluid.trainables.parted_pickle`; ``None`` for cloudpickle.
        script: returns the payload's ``script``, given the pickled trainable; ``None`` for none.

    Raises:
        InvalidFieldError: it cannot be used or pickled.
        MissingDependencyError: it needs a package that is not installed.
    """
    sent = elastic_class_of(trainable) or trainable
    if require is None:
        kind_of(sent)
    else:
        require(sent)
    pickled, imports = dump_trainable(sent, dumps), () if require is not None else tuple(imports_of(sent))
    of_script = b"" if script is None else script(pickled)
    return TrainablePayload(pickled=pickled, imports=imports, elastic=is_elastic(sent), script=of_script)
