"""mhc-ops: info, check, bench, page, compare, diagnose."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .core import backend as backends
from .measure import accuracy, bench, compare, page, report, results, selection, tables
from .measure.diagnose import command as diagnose

EXIT_CODES = """exit codes:
  0    all well
  1    a result is outside its tolerance, one of our kernels could not be timed, compare found a regression, or
       diagnose an error
  2    the command line is wrong, a file cannot be read, or there was nothing to do
  130  interrupted; what was measured is printed and kept
"""
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit codes: see above, and docs/measure.md."""
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="mhc-ops",
        description="Check and measure the operators of mhc_ops.",
        epilog=EXIT_CODES,
        formatter_class=words,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, epilog=EXIT_CODES, formatter_class=words)
        added.set_defaults(command=command)
        return added

    add("info", run_info, "devices, versions, backends and why one is missing")

    check_parser = add("check", run_check, "compare every output of every op with fp64; exit 1 on a FAIL")

    bench_parser = add("bench", run_bench, "time, bandwidth and memory beside eager, torch.compile and a copy")
    bench_parser.add_argument(
        "--providers", metavar="NAME", nargs="+", default=[], choices=bench.PROVIDERS, help="only these: %(choices)s"
    )
    bench_parser.add_argument(
        "--skip", metavar="TEXT", nargs="*", default=[], help='leave these out: "provider op TxnxD type"'
    )
    bench_parser.add_argument("--peers", action="store_true", help="beside them, other libraries that are installed")
    bench_parser.add_argument(
        "--budget",
        metavar="SECONDS",
        type=seconds,
        default=math.inf,
        help="take fewer samples and leave out the least important to be done by then",
    )

    check_parser.add_argument(
        "--backend", choices=backends.BACKENDS, help="only this one (default: each that runs here)"
    )
    for parser_with_results in (check_parser, bench_parser):
        parser_with_results.add_argument(
            "--case", metavar="TEXT", default="", help="only cases whose name contains this"
        )
        parser_with_results.add_argument("--device", type=device, default=default_device(), help="default: %(default)s")
        parser_with_results.add_argument(
            "--json", metavar="FILE", type=Path, help="write everything measured to this file, as it comes"
        )
    bench_parser.add_argument("--html", metavar="FILE", type=Path, help="draw the results as a page")

    page_parser = add("page", run_page, "draw results kept by bench --json as a page that needs nothing else")
    page_parser.add_argument("results", metavar="RESULTS.json", type=Path)
    page_parser.add_argument("--html", metavar="FILE", type=Path, required=True, help="where to write the page")

    compare_parser = add("compare", run_compare, "what got slower or less exact beyond noise, from one file to another")
    compare_parser.add_argument("before", metavar="A.json", type=Path)
    compare_parser.add_argument("after", metavar="B.json", type=Path)

    diagnose_parser = add("diagnose", diagnose.run_diagnose, "where an error of an op comes from")
    diagnose.add_arguments(diagnose_parser, device, default_device())

    options = parser.parse_args(arguments)
    try:
        return options.command(options)
    except results.Unreadable as error:
        print(error, file=sys.stderr)
        return 2


def device(text: str) -> torch.device:
    """A device that is there; argparse turns the error into exit code 2."""
    try:
        torch.empty(0, device=text)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from error
    return torch.device(text)


def seconds(text: str) -> float:
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a time")
    return float(text)


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
    found = results.begin("check")
    found.not_measured = selection.absent(wanted(options), options.device)
    chosen = [case for case in selection.CHECK if options.case in str(case)]
    runs = [(c, b) for b in wanted(options) for c in chosen if selection.runs(c, b, options.device)]
    try:
        for case, backend in report.progress(runs, "check"):
            with bench.failures_of(str(case), backend, found):
                found.accuracy += accuracy.measure(case, backend, options.device)
            save(found, options)
        found.complete = True
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    save(found, options)
    print(tables.accuracy_table(found.accuracy))
    if found.not_measured:
        print(tables.left_out(found.not_measured))
    failed = sum(not row.passed for row in found.accuracy)
    crashed = sum(entry.failed for entry in found.not_measured)
    print(f"{len(found.accuracy) - failed} passed, {failed} failed" + f", {crashed} cases crashed" * bool(crashed))
    if not found.complete:
        return INTERRUPTED
    return (1 if failed or crashed else 0) if runs else 2


def run_bench(options: argparse.Namespace) -> int:
    found = results.begin("bench")
    request = bench.Request(
        options.device, options.providers, options.peers, options.case, options.skip, options.budget
    )

    interrupted = False
    try:
        bench.run(request, found, lambda: save(found, options))
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted", file=sys.stderr)
    print(tables.bench_text(found))
    if options.html:
        page.write(found, options.html)
    if interrupted:
        return INTERRUPTED
    ours_failed = any(entry.failed and entry.provider in backends.BACKENDS for entry in found.not_measured)
    return (1 if ours_failed else 0) if found.measurements or ours_failed else 2


def save(found: results.Results, options: argparse.Namespace) -> None:
    if options.json:
        results.write(found, options.json)


def run_page(options: argparse.Namespace) -> int:
    page.write(results.read(options.results), options.html)
    return 0


def run_compare(options: argparse.Namespace) -> int:
    changes, common = compare.compare(results.read(options.before), results.read(options.after))
    for change in changes:
        print(change)
    regressions = sum(change.regression for change in changes)
    print(f"{common} entries in both files, {regressions} regressions")
    if not common:
        return 2
    return 1 if regressions else 0


def wanted(options: argparse.Namespace) -> Sequence[str]:
    return [options.backend] if options.backend else backends.BACKENDS


if __name__ == "__main__":
    sys.exit(main())
