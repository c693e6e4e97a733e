"""Fused packs in live views: one part of a device each, however many trials they have."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from fluid.display.dashboard import render
from fluid.display.notebook import status_html
from fluid.loggers.prometheus import SessionCollector
from fluid.session.status import DeviceStatus, GroupStatus, Status

PACK = tuple(f"t{number}" for number in range(32))


def device(*parts: tuple[str, ...], beside: tuple[str, ...] = ()) -> DeviceStatus:
    """A core with packs, and with trials that have a process of their own beside them."""
    trials = [trial for part in parts for trial in part] + list(beside)
    residents = tuple((trial, 1.0 / len(trials)) for trial in trials)
    return DeviceStatus(device_id=0, kind="cpu", host="node", residents=residents, lanes=1, packs=parts)


def status(*devices: DeviceStatus) -> Status:
    group = GroupStatus(name="nets", trials={"RUNNING": 32}, iterations_done=9, iterations=100, eta=None)
    return Status(at=1.0, groups=(group,), devices=devices, alpha={"net": 1.0}, packing={"net": 1})


def lines(shown: Status, width: int = 100, height: int = 30, *, coloured: bool = False) -> list[str]:
    """What a terminal gets."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=coloured,
        color_system="truecolor" if coloured else None,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(render(shown, width, height))
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get()).splitlines()


def test_a_pack_is_one_part_of_its_device() -> None:
    for coloured in (False, True):
        found = [line for line in lines(status(device(PACK)), coloured=coloured) if line.startswith("cpu 0")]
        assert len(found) == 1 and "32 fused" in found[0] and "t1" not in found[0]
    assert len(lines(status(device(PACK)))) < 12


def test_packs_beside_each_other_say_their_share() -> None:
    (found,) = [line for line in lines(status(device(PACK[:16], PACK[16:]))) if line.startswith("cpu 0")]
    assert found.count("16 fused 1/2") == 2


def test_trials_beside_a_pack_have_parts_of_their_own() -> None:
    parts = device(PACK[:3], beside=("own",)).parts
    assert parts == ((PACK[:3], 0.5), (("own",), 0.5))
    (found,) = [line for line in lines(status(device(PACK[:3], beside=("own",)))) if line.startswith("cpu 0")]
    assert "3 fused 1/2" in found and "own 1/2" in found


def test_a_pack_that_could_have_more_trials_has_its_device_to_itself() -> None:
    few = replace(device(PACK[:5]), residents=tuple((trial, 1 / 32) for trial in PACK[:5]))
    (found,) = [line for line in lines(status(few)) if line.startswith("cpu 0")]
    assert "5 fused ─" in found and "·" not in found and "1/32" not in found
    last = replace(device(PACK[:1]), residents=((PACK[0], 1 / 32),))
    (found,) = [line for line in lines(status(last)) if line.startswith("cpu 0")]
    assert "t0 ─" in found and "fused" not in found and "·" not in found


def test_a_narrow_terminal_still_says_how_many_are_fused() -> None:
    (found,) = [line for line in lines(status(device(PACK)), width=14) if line.startswith("cpu 0")]
    assert "32" in found


def test_many_devices_are_one_character_each() -> None:
    crowd = [replace(device(PACK), device_id=number) for number in range(200)]
    shown = lines(status(*crowd), width=60, height=12)
    assert len(shown) <= 12 and any("++++" in line for line in shown)


def test_what_fusing_gains_is_shown_beside_packing() -> None:
    known = replace(status(device(PACK)), packing={"net": 2, "conv": 3, "new": 1}, fused={"net": (32, 6.125)})
    text = " ".join(lines(known, width=140))
    assert "net: up to 2 a device, alpha 1; 32 fused do 6.1" in text
    assert "conv: up to 3 a device" in text and "new:" not in text
    refused = replace(known, packing={"net": 1}, fused={"net": (1, 1.0)})
    assert not any("measured" in line for line in lines(refused, width=140))


def test_a_notebook_shows_a_pack_as_one_chip() -> None:
    html = status_html(status(device(PACK, beside=("own",))), {}, {})
    assert html.count("border-radius:3px") == 2
    assert ">32 fused</span>" in html and ">own</span>" in html
    assert "title='t0, t1, " in html and "and 20 others'" in html


def test_prometheus_is_told_what_fusing_gains() -> None:
    pytest.importorskip("prometheus_client")
    shown = replace(status(device(PACK)), fused={"net": (32, 6.5)})
    samples = {
        sample.name: (sample.labels, sample.value)
        for metric in SessionCollector(lambda: shown, lambda: 0).collect()
        for sample in metric.samples
    }
    assert samples["fluid_fused_rows"] == ({"key": "net"}, 32)
    assert samples["fluid_fused_gain"] == ({"key": "net"}, 6.5)
