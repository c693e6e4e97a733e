"""The control program of MPS, as tests install it: tests/fake_mps.py, with an interpreter of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fake_mps


class Fake:
    """The control program, and what it is told."""

    def __init__(self, folder: Path) -> None:
        self.told = folder / "told"
        self.told.mkdir()
        self.program = folder / "nvidia-cuda-mps-control"
        self.program.write_text(f"#!{sys.executable} -SE\n{Path(fake_mps.__file__).read_text()}")
        self.program.chmod(0o755)

    def tell(self, *names: str) -> None:
        for name in names:
            (self.told / name).touch()

    def untell(self, *names: str) -> None:
        for name in names:
            (self.told / name).unlink()

    def heard(self, command: str) -> str:
        return (self.told / command).read_text()

    def environment(self) -> dict[str, str]:
        return dict(json.loads((self.told / "environment.json").read_text()))
