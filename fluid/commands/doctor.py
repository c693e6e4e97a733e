"""``fluid doctor``."""

from __future__ import annotations

import argparse
import os

from fluid.commands.inout import Subparsers, add_json, make_console, print_json
from fluid.errors import InvalidFieldError, parse_duration

#: The exit status if drivers cannot share the folder.
EXIT_UNUSABLE = 1


def add_doctor(commands: Subparsers) -> None:
    """Adds ``fluid doctor``."""
    doctor = commands.add_parser("doctor", help="examine this machine and show what Fluid would use")
    text = "test instead whether several drivers can share a folder, and how fast that is"
    doctor.add_argument("--shared", metavar="DIR", help=text)
    text = (
        "with --shared: seconds (or 2m) to wait for the same command on other machines, to test with them (default: 0)"
    )
    doctor.add_argument("--wait", metavar="SECONDS", help=text)
    add_json(doctor)
    doctor.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.shared is not None:
        return _examine_shared(arguments)
    if arguments.wait is not None:
        raise InvalidFieldError("wait", arguments.wait, "is for a folder: give --shared DIR too")
    from fluid.reports.doctor import advise, as_json, examine, machine_report

    machine = examine()
    advice = advise(machine)
    if arguments.json:
        print_json(as_json(machine, advice))
    else:
        make_console().print(machine_report(machine, advice), crop=False)
    return 0


def _examine_shared(arguments: argparse.Namespace) -> int:
    from fluid.joint.probe import probe
    from fluid.reports.shared_folder import probe_json, probe_report

    if not os.path.isdir(arguments.shared):
        raise InvalidFieldError("shared", arguments.shared, "is no folder: make it, or name the one it will be in")
    wait_s = parse_duration("wait", arguments.wait or 0.0, zero=True)
    found = probe(arguments.shared, wait_s=wait_s)
    if arguments.json:
        print_json(probe_json(found))
    else:
        make_console().print(probe_report(found), crop=False)
    return 0 if found.is_usable else EXIT_UNUSABLE
