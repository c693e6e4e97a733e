"""What a sampler suggests, and the books it keeps of what it was told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fluid.errors import InvalidFieldError, require_number

#: The token of a config that another driver's searcher has suggested.
ELSEWHERE = -1


@dataclass(frozen=True)
class Suggestion:
    """A config to try.

    Example:
        >>> from fluid.search import Suggestion
        >>> Suggestion(token=0, config={"lr": 0.1}).config
        {'lr': 0.1}

    Attributes:
        token: what to tell the sampler the result with; suggestions are numbered from 0.
        config: the config, nested as the space.
        budget: iterations in all after which its trial is to pause and be told; ``None``, the default, if the sweep
            decides that.
        continues: token of an earlier suggestion of this config, with a smaller budget, whose trial goes on; ``None``,
            the default, for a new trial.
    """

    token: int
    config: dict[str, Any]
    budget: int | None = None
    continues: int | None = None


class OpenSuggestions:
    """Numbers the suggestions and checks what is told about them.

    Args:
        objectives: how many values a suggestion gets.
    """

    def __init__(self, objectives: int) -> None:
        self._objectives = objectives
        self._open: set[int] = set()
        #: How many suggestions were made.
        self.count = 0

    def add(self, config: Mapping[str, Any]) -> Suggestion:
        """The next suggestion."""
        suggestion = Suggestion(self.count, dict(config))
        self._open.add(suggestion.token)
        self.count += 1
        return suggestion

    def close(
        self, token: int, values: float | Sequence[float] | None, *, failed: bool = False
    ) -> tuple[float, ...] | None:
        """Ends a suggestion.

        Returns:
            A value for each objective, none of them NaN; None if the suggestion failed or has no value.

        Raises:
            InvalidFieldError: the token is of no open suggestion, or there is not one number for each objective.
        """
        if token not in self._open:
            raise InvalidFieldError("token", token, "is of no suggestion that waits for a result")
        found = None if failed or values is None else self._numbers(values)
        self._open.remove(token)
        return None if found is None or any(math.isnan(value) for value in found) else found

    def _numbers(self, values: float | Sequence[float]) -> tuple[float, ...]:
        several = tuple(values) if isinstance(values, Sequence) else (values,)
        if len(several) != self._objectives:
            raise InvalidFieldError("values", values, f"must be one value for each of {self._objectives} metrics")
        # NaN is a value that a training run may well have: it is no error of the caller.
        return tuple(
            math.nan if value != value else require_number("values", value, at_least=-math.inf, finite=False)
            for value in several
        )
