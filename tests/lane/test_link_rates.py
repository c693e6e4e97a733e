"""When checkpoints are compressed on their way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluid.lane.checkpoints.fetch import LinkRates, compression_pays, updated_rate

MB = 1e6
RATES = st.floats(1e3, 1e11)


@pytest.mark.parametrize(
    ("link", "compressor", "ratio", "pays"),
    [
        (100 * MB, 300 * MB, 0.5, True),
        (100 * MB, 300 * MB, 1.01, False),  # Nothing is saved.
        (100 * MB, 80 * MB, 0.1, False),  # The link is faster than the compressor.
        (1200 * MB, 300 * MB, 0.1, False),
        (10 * MB, 300 * MB, 0.95, True),
    ],
)
def test_it_pays_where_the_slower_of_compressor_and_link_is_faster_than_the_link_alone(
    link: float, compressor: float, ratio: float, pays: bool
) -> None:
    assert compression_pays(link, compressor, ratio) is pays


@given(link=RATES, compressor=RATES, ratio=st.floats(0.0, 2.0))
def test_it_never_pays_where_the_link_outruns_the_compressor_or_nothing_shrinks(
    link: float, compressor: float, ratio: float
) -> None:
    if compression_pays(link, compressor, ratio):
        assert ratio < 1.0 and compressor > link


def test_a_rate_follows_the_recent_transfers() -> None:
    rate = updated_rate(None, 100_000_000, 1.0, 1.0)
    assert rate == 100 * MB
    for _ in range(10):
        rate = updated_rate(rate, 10_000_000, 1.0, 1.0)
    assert rate is not None and 10 * MB < rate < 11 * MB


def test_a_small_transfer_tells_nothing() -> None:
    assert updated_rate(None, 1000, 0.1, 0.1) is None
    assert updated_rate(5 * MB, 1000, 0.1, 0.1) == 5 * MB


def test_a_link_that_was_not_waited_for_is_faster_than_was_seen() -> None:
    """So a link that has become fast again is measured again in the end, and not compressed for ever."""
    assert updated_rate(1 * MB, 20_000_000, 1.0, 0.1) == 20 * MB
    assert updated_rate(100 * MB, 20_000_000, 1.0, 0.1) == 125 * MB


def test_rates_are_known_to_all_lanes_of_a_machine(tmp_path: Path) -> None:
    rates = LinkRates(str(tmp_path))
    assert rates.get("10.0.0.7") is None
    rates.record("10.0.0.7", 50_000_000, 0.5, 0.5)
    rates.record("fe80::1", 2_000_000, 1.0, 1.0)
    other = LinkRates(str(tmp_path))
    assert (other.get("10.0.0.7"), other.get("fe80::1")) == (100 * MB, 2 * MB)
    for file in tmp_path.rglob("10.0.0.7"):
        file.write_text("rubbish")
    assert other.get("10.0.0.7") is None


def test_where_rates_cannot_be_kept_they_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rates = LinkRates(str(tmp_path / "file"))
    rates.record("10.0.0.7", 50_000_000, 0.5, 0.5)
    assert rates.get("10.0.0.7") is None
