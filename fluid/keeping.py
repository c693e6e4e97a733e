"""Retention of checkpoints: which of them outlive the run, as the user says it and as a lane is told."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from fluid.errors import InvalidFieldError, require_integer
from fluid.given_fields import GivenFields

#: Why a checkpoint is not kept for which the session's quota has no room.
QUOTA_USED_UP = "checkpoint_bytes is used up"
#: The file, within a checkpoint that outlives the run, that says by which metric it was chosen.
FACTS = "kept.json"
#: Bytes of the units of a quota.
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)
_BEST = re.compile(r"best:([1-9]\d{0,8})")


@dataclass(frozen=True)
class Keep(GivenFields):
    """Which checkpoints outlive a session: an argument of :class:`fluid.FluidExecutor` and :func:`fluid.run`.

    Example:
        >>> from fluid import FluidExecutor, Keep, Search, Trial, TrialGroup
        >>> def train(config, state):
        ...     yield {"loss": config["lr"]}, {"weights": config["lr"]}
        >>> group = TrialGroup([Trial(train, {"lr": lr}) for lr in (0.1, 0.2)], search=Search("loss", "min"))
        >>> with FluidExecutor("local", 1, keep=Keep("best:1", checkpoint_bytes="10GB"), verbose=0) as executor:
        ...     handle = executor.submit_trialgroup(group)
        ...     handle.wait()
        True
        >>> handle.best().value
        0.1

    Args:
        keep: ``"none"``; ``"last"``, the newest of each trial; ``"best:k"``, those of the k best trials of each group
            by the metric of its search (``docs/results.md``). ``None``, the default: the best trial's of each sweep of
            :func:`fluid.run`, and none of other groups.
        checkpoint_bytes: most bytes of all of them, such as ``"10GB"``; ``None``, the default, for no limit.

    Raises:
        InvalidFieldError: a value cannot be used.
    """

    keep: str | None = None
    _: KW_ONLY
    checkpoint_bytes: int | str | None = None

    def __post_init__(self) -> None:
        is_best = isinstance(self.keep, str) and _BEST.fullmatch(self.keep)
        if not is_best and self.keep not in (None, "none", "last"):
            reason = "must be 'none', 'last' or 'best:k', such as 'best:1', a Keep with one of these, or None"
            raise InvalidFieldError("keep", self.keep, reason)
        _ = self.quota

    @property
    def how(self) -> str:
        """``"none"``, ``"last"``, ``"best"``; or ``"auto"``: the best of each group whose search keeps its best."""
        return "auto" if self.keep is None else self.keep.partition(":")[0]

    @property
    def k(self) -> int:
        """With ``"best"``, of how many trials of a group."""
        return int((self.keep or "").partition(":")[2] or 0)

    @cached_property
    def quota(self) -> int | None:
        """Most bytes of all of them; ``None`` for no limit."""
        return parse_bytes("checkpoint_bytes", self.checkpoint_bytes)

    def in_group(self, *, keeps_best: bool) -> Keep:
        """What it comes to in a group.

        Args:
            keeps_best: whether the group's search keeps its best: see :class:`fluid.trialgroup.Search`.
        """
        return self if self.keep is not None else replace(self, keep="best:1" if keeps_best else "none")


#: What stands before the B of bytes, for each power of a thousand.
_POWERS = ("", "K", "M", "G", "T")


def parse_bytes(name: str, value: object) -> int | None:
    """Reads a number of bytes: an integer, or a text such as ``"10GB"`` or ``"512 MiB"``; ``None`` stays ``None``.

    Example:
        >>> from fluid.keeping import parse_bytes
        >>> parse_bytes("checkpoint_bytes", "10GB"), parse_bytes("checkpoint_bytes", 1 << 20)
        (10000000000, 1048576)

    Raises:
        InvalidFieldError: it is none of these.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        return require_integer(name, value, at_least=0)
    found = _SIZE.fullmatch(value)
    if found is None:
        raise InvalidFieldError(name, value, "must be a number of bytes, or a text such as '10GB' or '512MiB'")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def bytes_text(length: float) -> str:
    """Bytes to three digits: ``"512 B"``, ``"56.3 KB"``, ``"1.2 GB"``."""
    power = 0
    while length >= 999.5 and power < len(_POWERS) - 1:
        length, power = length / 1000.0, power + 1
    return f"{length:.3g} {_POWERS[power]}B"


#: No checkpoint outlives the session.
NOTHING = Keep("none")


class KeepRule(NamedTuple):
    """What the lane of a trial is told of its retention.

    Attributes:
        how: ``"last"`` or ``"best"``.
        group: the trial's group, whose trials are compared.
        metric: name of the metric for ``"best"``; names of nested metrics are joined by ``/``.
        mode: ``"min"`` or ``"max"``.
        entry: the entry of a result that holds the metrics; ``None`` if the result itself does.
        best: the trial's best value so far; ``None`` if there is none.
        place: the trial's place in the group's order of submission; of equal values the first one's is the best.
        k: for ``"best"``, of how many trials of the group a checkpoint is kept.
    """

    how: str
    group: str = ""
    metric: str = ""
    mode: str = "min"
    entry: str | None = None
    best: float | None = None
    place: int = 0
    k: int = 0

    def value(self, numbers: Mapping[str, float], last: float | None = None) -> float | None:
        """Returns the metric of a result, or the trial's ``last`` one where it has none; ``None`` if not finite.

        Args:
            numbers: of the result: see :class:`fluid.trainables.encoded_metrics.EncodedMetrics`.
            last: the trial's last number of the metric.
        """
        number = numbers.get(self.metric if self.entry is None else f"{self.entry}/{self.metric}")
        return last if number is None else number if math.isfinite(number) else None

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value is strictly better than another one; any is better than ``None``."""
        return than is None or (value < than if self.mode == "min" else value > than)

    def passes(self, value: float, bar: WorstKept | None) -> bool:
        """Whether a value of the trial is one of the best of its group, of which ``bar`` is the worst."""
        return bar is None or self.is_better(value, bar.value) or (value == bar.value and self.place < bar.place)


class WorstKept(NamedTuple):
    """The worst of the best trials of a group.

    Attributes:
        value: its best value.
        place: its place in the group's order of submission.
    """

    value: float
    place: int


def number_of(value: Any) -> float | None:
    """The number that a metric's value stands for, NaN and infinities included; ``None`` if it is no number.

    All who compare metrics compare by this one rule. Numbers are those of Python, ``Decimal`` and ``Fraction``, scalars
    of NumPy and PyTorch and arrays with one element, and whatever has ``__float__``. A bool is none, nor is a text.

    It calls methods of the value's class, which is the user's: apply it in the lane, or to what JSON has decoded. It
    never raises.
    """
    if type(value) is float:
        return value
    try:
        if not isinstance(value, (int, float)) and hasattr(value, "item"):
            value = value.item()  # Raises for an array of several elements.
        if value is None or isinstance(value, (bool, str, bytes, bytearray, memoryview)):  # float() reads texts.
            return None
        return float(value)
    except OverflowError:  # An integer that no float holds.
        return math.nan
    except BaseException:  # The class is the user's, and may raise anything.
        return None


def finite_number(value: Any) -> float | None:
    """:func:`number_of` a value; ``None`` also for NaN and infinities, which are never the best."""
    number = number_of(value)
    return number if number is not None and math.isfinite(number) else None


def value_of(metrics: object, name: str) -> Any:
    """A metric by its name; the names of nested metrics are joined by ``/``. ``None`` if there is none."""
    if not isinstance(metrics, Mapping):
        return None
    if name in metrics:
        return metrics[name]
    outer, slash, inner = name.partition("/")
    while slash:
        if outer in metrics and (found := value_of(metrics[outer], inner)) is not None:
            return found
        more, slash, inner = inner.partition("/")
        outer = f"{outer}/{more}"
    return None


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a checkpoint that outlives the run.

    Attributes:
        bytes: of its files.
        value: the metric of its iteration; ``None`` if trials are not compared.
    """

    bytes: int
    value: float | None = None
