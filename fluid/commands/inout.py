"""What commands read from files and stdin, and how they print."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any, Protocol

from fluid._private_files import replacing
from fluid.errors import InvalidFieldError

if TYPE_CHECKING:
    from fluid.commands.console import CommandConsole

#: The width, in characters, from which tables have all their columns.
_ROOM_FOR_TABLES = 76


class Subparsers(Protocol):
    """What :meth:`argparse.ArgumentParser.add_subparsers` returns."""

    def add_parser(self, name: str, *, help: str, **settings: Any) -> argparse.ArgumentParser:
        """Adds a command."""


def read_object(path: str) -> dict[str, Any]:
    """Reads a JSON object from a file, or from stdin if the path is ``-``.

    Raises:
        InvalidFieldError: there is no such file, or it holds something else.
    """
    from fluid.measure.json_input import read_json_object

    if path != "-":
        return read_json_object(path)
    try:
        data = json.loads(sys.stdin.read())
    except ValueError as error:
        raise InvalidFieldError("stdin", path, f"is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidFieldError("stdin", path, "must hold one JSON object")
    return data


def print_json(data: dict[str, Any]) -> None:
    """Prints an object, which has neither NaN nor infinity, as JSON."""
    print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def write_json(data: dict[str, Any], path: str) -> bool:
    """Writes an object, which has neither NaN nor infinity, to a file, or prints it if the path is ``-``.

    Returns:
        Whether it was printed, so that nothing else is to be.

    Raises:
        InvalidFieldError: the file, which ``--json`` names, cannot be written.
    """
    if path == "-":
        print_json(data)
        return True
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        with replacing(path) as draft:
            draft.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise InvalidFieldError("json", path, f"cannot be written: {error.strerror}") from error
    return False


def make_console() -> CommandConsole:
    """The console on which commands print for people."""
    from fluid.commands.console import CommandConsole

    return CommandConsole()


def is_narrow(console: CommandConsole) -> bool:
    """Whether tables need to have fewer columns."""
    return console.room < _ROOM_FOR_TABLES


def add_price(parser: argparse.ArgumentParser) -> None:
    """Adds ``--price``."""
    text = "US dollars for a device-hour (default: what the session was given)"
    parser.add_argument("--price", type=float, metavar="USD", help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print only JSON on stdout")
