"""What drivers of a shared folder run, in a form that they can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from fluid.trainables.payload import TrialPayload
from fluid.trainables.trainable_code import TrainableCode
from fluid.trialgroup import Trial
from fluid.user_values import text_of

#: Most names that are told, and the longest text of a config; of a longer one there is a digest.
_MOST, _LONGEST = 8, 120


class GroupContent(NamedTuple):
    """What a program submits.

    Attributes:
        trials: texts of the trials' budgets and configs, by id.
        codes: of what they run, by the id of the first trial that does.
    """

    trials: Mapping[str, str]
    codes: Mapping[str, TrainableCode]

    @classmethod
    def of(cls, payloads: Mapping[Trial, TrialPayload]) -> GroupContent:
        """What these trials are; not for the session's thread, as configs are the user's."""
        trials, codes = {}, dict[int, tuple[str, TrainableCode]]()
        for trial, payload in payloads.items():
            text = text_of(dict(trial.config))
            if len(text) > _LONGEST:
                text = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
            trials[trial.id] = f"{trial.budget} iterations with {text}"
            if payload.trainable.code is not None:
                codes.setdefault(id(payload.trainable), (trial.id, payload.trainable.code))
        return cls(trials, dict(codes.values()))


#: Of a session that is in no shared folder.
NOT_SHARED = GroupContent({}, {})


def differing(first: Mapping[str, TrainableCode], other: Mapping[str, TrainableCode]) -> tuple[str, ...]:
    """Names of what differs in codes by what they are for, some of many.

    What only one has of other modules than the trainable's own does not count: a program may have loaded modules that
    another one has not, which code that runs alike imports as it comes to it.
    """
    found: set[str] = set()
    for name in first.keys() & other.keys():
        one, another = first[name], other[name]
        both = one.parts.keys() & another.parts.keys()
        found.update(part for part in another.changed_since(one) if part in both or "." not in part)
    names = sorted(found)
    return tuple(names if len(names) <= _MOST else [*names[: _MOST - 1], f"and {len(names) - _MOST + 1} more"])
