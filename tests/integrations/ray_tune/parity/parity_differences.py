"""What differs on purpose between stock Tune and Fluid, each with the parts of Tune's surface that it concerns.

The names are the headings of the list in docs/ray_tune.md; a test compares the two.
"""

from __future__ import annotations

#: By heading: parts of Tune's surface that have no case because of it.
ON_PURPOSE: dict[str, tuple[str, ...]] = {
    "No actor per trial": (),
    "A paused trial stays in memory": (),
    "A process that dies": (),
    "A function trainable": (),
    "The scheduler that Tune holds": (),
    "cleanup()": (),
    "Tune's own loggers": (),
    "Fluid's live view": (),
    "What trials print": (),
    "PyTorch tensors of `tune.with_parameters": (),
    "A request of one GPU": (),
    "Ray Client": ("run._remote", "run._remote_string_queue"),
    "Names of sweeps": (),
    "fluid report": (),
}
#: Parts of Tune's surface without a case for another reason.
NOT_COMPARED: dict[str, str] = {
    "run._entrypoint": "private to Tune: which of its functions was called",
    "Tuner._tuner_kwargs": "private to Tune",
    "Tuner._tuner_internal": "private to Tune: how Tuner.restore makes one",
    "Tuner._entrypoint": "private to Tune",
    "CheckpointConfig._checkpoint_keep_all_ranks": "private, and refused by Tune",
    "CheckpointConfig._checkpoint_upload_from_workers": "private, and refused by Tune",
}
