"""mhc-ops: info, check, bench."""

import argparse
import sys
from collections.abc import Sequence

import torch

from .core import backend as backends
from .measure import accuracy, cases, report


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all well, 1 a check failed, 2 the command line or what it asks for is wrong."""
    parser = argparse.ArgumentParser(prog="mhc-ops", description="Check and measure the operators of mhc_ops.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="devices, versions, backends and why one is missing")
    info.set_defaults(command=run_info)

    check = commands.add_parser("check", help="compare every output of every op with fp64; exit 1 on a FAIL")
    check.add_argument("--backend", choices=backends.BACKENDS, help="only this backend (default: each that runs here)")
    check.add_argument("--device", type=torch.device, default=default_device(), help="default: %(default)s")
    check.set_defaults(command=run_check)

    options = parser.parse_args(arguments)
    return options.command(options)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run_info(options: argparse.Namespace) -> int:
    for name, value in report.versions().items():
        print(f"{name:9} {value}")
    print()
    device_type = default_device().type
    for family in backends.families():
        for backend in backends.BACKENDS:
            reason = backends.why_not(family, backend, device_type)
            print(f"{family:5} {backend:10} {'runs on ' + device_type if reason is None else 'no: ' + reason}")
    print()
    return 0


def run_check(options: argparse.Namespace) -> int:
    wanted = [options.backend] if options.backend else backends.BACKENDS
    reasons = {
        (family, b): backends.why_not(family, b, options.device.type) for family in backends.families() for b in wanted
    }
    work = [(case, b) for b in wanted for case in cases.CHECK if reasons[case.subject.family, b] is None]
    rows: list[accuracy.Row] = []
    for case, backend in report.progress(work, "check"):
        rows += accuracy.measure(case, backend, options.device)
    print(accuracy_table(rows))
    for (family, backend), reason in reasons.items():
        if reason is not None:
            print(f"{family}: {backend} not checked: {reason}")
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    if options.backend and not rows:
        return 2
    return 1 if failed else 0


def accuracy_table(rows: Sequence[accuracy.Row]) -> str:
    header = ("op and case", "backend", "output", "max error", "relative", "tolerance", "verdict")
    lines = [
        (
            f"{row.subject} {row.case}",
            row.backend,
            row.output,
            f"{row.max_error:.2e}",
            f"{row.relative_error:.2e}",
            f"{row.tolerance:.0e}",
            row.verdict,
        )
        for row in rows
    ]
    return report.table(header, lines)


if __name__ == "__main__":
    sys.exit(main())
