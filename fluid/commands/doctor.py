"""``fluid doctor``."""

from __future__ import annotations

import argparse

from fluid.commands.inout import Subparsers, add_json, make_console, print_json


def add_doctor(commands: Subparsers) -> None:
    """Adds ``fluid doctor``."""
    doctor = commands.add_parser("doctor", help="examine this machine and show what Fluid would use")
    add_json(doctor)
    doctor.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace) -> None:
    from fluid.reports.doctor import advise, as_json, examine, machine_report

    machine = examine()
    advice = advise(machine)
    if arguments.json:
        print_json(as_json(machine, advice))
    else:
        make_console().print(machine_report(machine, advice))
