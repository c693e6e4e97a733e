"""What the page makes of its data and of patches of it, as its scripts do."""

from __future__ import annotations

from typing import Any


def shown(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a page, with the texts of failures in their places."""
    texts = data["texts"]
    trials = [
        {**trial, "failure": [texts[part] if isinstance(part, int) else part for part in trial["failure"]]}
        if "failure" in trial
        else trial
        for trial in data["trials"]
    ]
    return {**data, "trials": trials}


def patched(data: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """The data of a page after a patch."""
    rows = [{} for _ in data["runs"]]
    for trial in data["trials"]:
        rows[trial["run"]][len(rows[trial["run"]])] = trial
    for run, row, trial in patch["trials"]:
        rows[run][row] = trial
    assert all(list(of_run) == list(range(len(of_run))) for of_run in rows)
    trials = [trial for of_run in rows for trial in of_run.values()]
    runs = [{**run, **newer} for run, newer in zip(data["runs"], patch["runs"], strict=True)]
    return {**data, "trials": trials, "runs": runs}
