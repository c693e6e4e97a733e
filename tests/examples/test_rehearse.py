"""The example that rehearses a sweep."""

from __future__ import annotations

import pytest
from rehearse import main

pytestmark = pytest.mark.slow


def test_more_devices_end_sooner(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = main()
    assert [outcome.devices for outcome in outcomes] == [1, 2, 4, 8, 16]
    spans = [outcome.makespan_s for outcome in outcomes]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > 2.5 * spans[-1]
    assert all(0.0 < outcome.busy_share <= 1.0 for outcome in outcomes)
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert [outcome.makespan_s for outcome in main()] == spans
