"""mhc-ops: info, check, bench, diagnose."""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from .core import backend as backends
from .measure import accuracy, cases, conv_cases, peers, report, speed
from .measure.conv_cases import AnyCase
from .measure.diagnose import command as diagnose_command

CHECK: tuple[AnyCase, ...] = (*cases.CHECK, *conv_cases.CHECK)
BENCH: tuple[AnyCase, ...] = (*cases.BENCH, *conv_cases.BENCH)
DECODE: tuple[AnyCase, ...] = (*cases.DECODE, *conv_cases.DECODE)
BENCH_CPU: tuple[AnyCase, ...] = (*cases.BENCH_CPU, *conv_cases.BENCH_CPU)
STACK = (8192, 4, 4096)  # T, n, D for which the memory of a stack of layers is measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: 0 all well, 1 a check failed, 2 the command line or what it asks for is wrong."""
    parser = argparse.ArgumentParser(prog="mhc-ops", description="Check and measure the operators of mhc_ops.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="devices, versions, backends and why one is missing")
    info.set_defaults(command=run_info)

    check = commands.add_parser("check", help="compare every output of every op with fp64; exit 1 on a FAIL")
    check.set_defaults(command=run_check)

    bench = commands.add_parser("bench", help="time, bandwidth and memory beside eager, torch.compile and a copy")
    bench.add_argument("--case", metavar="TEXT", default="", help="only cases whose name contains this")
    bench.add_argument(
        "--skip", metavar="TEXT", nargs="*", default=[], help='leave these out: "provider op TxnxD type"'
    )
    bench.add_argument("--peers", action="store_true", help="beside them, other libraries that are installed")
    bench.add_argument("--json", metavar="FILE", type=Path, help="write everything measured to this file")
    bench.set_defaults(command=run_bench)

    diagnose = commands.add_parser("diagnose", help="where an error of an op comes from; exit 1 where one is found")
    diagnose_command.add_arguments(diagnose, device, default_device())

    for command in (check, bench):
        command.add_argument(
            "--backend", choices=backends.BACKENDS, help="only this one (default: each that runs here)"
        )
        command.add_argument("--device", type=device, default=default_device(), help="default: %(default)s")

    options = parser.parse_args(arguments)
    return options.command(options)


def device(text: str) -> torch.device:
    """A device that is there; argparse turns the error into exit code 2."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from error
    return torch.device(text)


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
    work = [(case, backend) for backend in wanted(options) for case in CHECK if runs(case, backend, options)]
    rows: list[accuracy.Row] = []
    for case, backend in report.progress(work, "check"):
        rows += accuracy.measure(case, backend, options.device)
    print(accuracy_table(rows))
    print_missing(options)
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    if not rows:
        return 2
    return 1 if failed else 0


def run_bench(options: argparse.Namespace) -> int:
    on_gpu = options.device.type == "cuda"
    chosen = (*BENCH, *DECODE) if on_gpu else BENCH_CPU
    work = [case for case in chosen if options.case in str(case)]
    others = ["eager", *([] if speed.why_no_compiler() else ["torch.compile"])]
    missing = {peer.name: peers.why_not(peer) for peer in peers.PEERS} if options.peers else {}
    installed = [name for name, reason in missing.items() if reason is None]
    measurements: list[speed.Measurement] = []
    for case in report.progress(work, "bench"):
        kernels = [backend for backend in wanted(options) if backend != "reference" and runs(case, backend, options)]
        providers = [*kernels, *([] if case in DECODE else others), *installed]
        chosen_ones = [p for p in providers if not any(text in f"{p} {case}" for text in options.skip)]
        measurements += speed.measure(case, chosen_ones, options.device)
        write_json(options, measurements, {}, complete=False)  # an interrupted run keeps what it has
    stack = speed.stack_peaks(*STACK, options.device) if on_gpu and not options.case else {}
    print(speed_table(measurements))
    for name, megabytes in stack.items():
        print(f"stack of {speed.STACKED_LAYERS} HyperConnections {STACK}, {name}: peak {megabytes:.0f} MB")
    print_missing(options)
    for name, reason in missing.items():
        if reason is not None:
            print(f"{name} did not run: {reason}")
    if speed.why_no_compiler():
        print(f"torch.compile did not run: {speed.why_no_compiler()}")
    write_json(options, measurements, stack, complete=True)
    return 0 if measurements else 2


def write_json(
    options: argparse.Namespace,
    measurements: Sequence[speed.Measurement],
    stack: dict[str, float | None],
    complete: bool,
) -> None:
    if options.json:
        content = {
            "date": datetime.date.today().isoformat(),
            "complete": complete,
            "versions": {**report.versions(), **{peer.name: peers.version(peer) or "-" for peer in peers.PEERS}},
            "measurements": [measurement.as_json() for measurement in measurements],
            "peak megabytes of a stack": stack,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def wanted(options: argparse.Namespace) -> Sequence[str]:
    return [options.backend] if options.backend else backends.BACKENDS


def runs(case: AnyCase, backend: str, options: argparse.Namespace) -> bool:
    return case.runs_on(backend) and backends.why_not(case.subject.family, backend, options.device.type) is None


def print_missing(options: argparse.Namespace) -> None:
    for family in backends.families():
        for backend in wanted(options):
            reason = backends.why_not(family, backend, options.device.type)
            if reason is not None:
                print(f"{family}: {backend} did not run: {reason}")


def accuracy_table(rows: Sequence[accuracy.Row]) -> str:
    header = ("op and case", "backend", "output", "max error", "relative", "tolerance", "verdict")
    lines = [
        (
            row.case,
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


def speed_table(measurements: Sequence[speed.Measurement]) -> str:
    header = (
        "op and case",
        "direction",
        "provider",
        "µs",
        "GB/s",
        "of copy",
        "× eager",
        "× compile",
        "host µs",
        "peak MB",
    )
    times = {(m.subject, m.case, m.direction, m.provider): m.microseconds for m in measurements}

    def faster(m: speed.Measurement, other: str) -> str:
        """How many times faster than another provider of the same run."""
        time = times.get((m.subject, m.case, m.direction, other))
        return "" if time is None or m.provider == other else f"{time / m.microseconds:.2f}"

    lines = [
        (
            m.case,
            m.direction,
            m.provider,
            f"{m.microseconds:.1f}",
            f"{m.bandwidth:.0f}",
            f"{m.of_copy:.0%}",
            faster(m, "eager"),
            faster(m, "torch.compile"),
            "" if m.host_microseconds is None else f"{m.host_microseconds:.0f}",
            "" if m.peak_megabytes is None else f"{m.peak_megabytes:.0f}",
        )
        for m in measurements
    ]
    return report.table(header, lines)


if __name__ == "__main__":
    sys.exit(main())
