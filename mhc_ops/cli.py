"""mhc-ops: info, check, bench, page, compare, diagnose, convert, hub."""

import argparse
import importlib
import io
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from .convert import command as convert
from .core import backend as backends
from .core import device as devices
from .core import native
from .hub import command as hub
from .measure import arguments, bench, compare, files, page, report, results, selection
from .measure.diagnose import command as diagnose
from .measure.report import Refused
from .measure.training_step import backend_of
from .testing import accuracy, cases
from .testing.conv_cases import runs

EXIT_CODES = """exit codes:
  0    all well
  1    a result is outside its tolerance, a case crashed, one of our kernels could not be timed, compare found a
       regression, or diagnose an error
  2    the command line is wrong, a file cannot be read or written, or there was nothing to do
  130  interrupted; what check and bench have measured is printed and kept
  141  the reader of the output has closed it, as head does
"""
INTERRUPTED = 130  # 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {_in_one_line(message)} ({self.prog} --help says more)\n")


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    # The shell may have closed a stream (`>&-`), and a terminal may lack a letter: neither ends a run.
    sys.stdout, sys.stderr = (s or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w") for s in (sys.stdout, sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            return _run(words)
        finally:
            report.clear()  # the terminal keeps no progress
            sys.stdout.flush()  # here, since Python cannot handle a closed pipe as it ends
    except BrokenPipeError:
        for number in (1, 2):  # what is still buffered must not fail as Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        return PIPE_CLOSED


def _run(words: Sequence[str] | None) -> int:
    try:
        parser = _parser()
        options = parser.parse_args(words)
        try:
            if wrong := backends.wrong_environment or cases.WRONG_SEED:  # the import is too early for one line
                raise Refused(wrong)
            _refuse_what_cannot_be_written(options)
            return options.command(options)
        except Refused as error:
            report.say(f"{parser.prog} {options.name}: {_in_one_line(error)}")
            return 2
    except KeyboardInterrupt:
        report.say("interrupted")
        return INTERRUPTED


def _in_one_line(message: object) -> str:
    return " ".join(str(message).split())


def _refuse_what_cannot_be_written(options: argparse.Namespace) -> None:
    """Refused if two options name one file."""
    given = {name: value for name, value in vars(options).items() if value is not None}
    read = [*given.get("results", []), *(given[name] for name in ("checkpoint", "upcycle") if name in given)]
    written = [given[name] for name in ("json", "markdown", "svg", "output") if name in given]
    taken: dict[str, Path] = {}
    for path in [*read, *filter(files.is_replaced, written)]:
        other = taken.setdefault(os.path.realpath(path), path)
        if other is not path:
            raise Refused(f"{other} and {path} are one file")


def _parser() -> Parser:
    text = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="mhc-ops",
        description="Check and measure the operators of mhc_ops, and take them elsewhere.",
        epilog=EXIT_CODES,
        formatter_class=text,
    )
    parser.add_argument("--version", action="version", version=f"mhc-ops {report.VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, epilog=EXIT_CODES, formatter_class=text)
        added.set_defaults(command=command, name=name)
        return added

    add("info", run_info, "devices, versions, backends and why one is missing")
    _check_arguments(add("check", run_check, "compare every output of every op with fp64; exit 1 on a FAIL"))
    _bench_arguments(add("bench", run_bench, "time, bandwidth and memory beside eager, torch.compile and a copy"))

    page_parser = add("page", run_page, "draw results kept by bench --json as a page, tables or a picture")
    page_parser.add_argument("results", metavar="RESULTS.json", type=Path, nargs="+")
    kind = partial(page_parser.add_mutually_exclusive_group(required=True).add_argument, metavar="FILE")
    kind("--markdown", type=files.output, help="where to write the page of one file, the main tables of several")
    kind("--svg", type=files.output, help="where to draw the training step, of one file")

    compare_parser = add("compare", run_compare, "what got slower or less exact beyond noise, from one file to another")
    compare_parser.add_argument("before", metavar="A.json", type=Path)
    compare_parser.add_argument("after", metavar="B.json", type=Path)

    diagnose.add_arguments(add("diagnose", diagnose.run_diagnose, "where an error of an op comes from"))
    convert.add_arguments(
        add("convert", convert.run_convert, "mHC of other libraries to and from ours, or into a plain model")
    )
    hub.add_arguments(add("hub", hub.run_hub, "write the package as a folder that Hugging Face's kernels loads"))
    return parser


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", choices=backends.BACKENDS, help="only this one (default: each that runs here)")
    _common_arguments(parser)
    add("--rows", action="store_true", help="show every result, not only those that failed")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--fuzz", metavar="SECONDS", type=arguments.seconds, help="for so long, random cases instead")
    instead("--misuse", metavar="SECONDS", type=arguments.seconds, help="for so long, random calls with odd arguments")
    add("--seed", metavar="N", type=cases.seed, help="of --fuzz and --misuse (default: another one each time)")


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    add, several = parser.add_argument, partial(parser.add_argument, nargs="+", action="extend", default=[])
    several("--providers", metavar="NAME", choices=bench.PROVIDERS, help="only these: %(choices)s")
    add("--peers", action="store_true", help="beside them, other libraries that are installed")
    _common_arguments(parser)


def _common_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--case", metavar="TEXT", default="", help="only cases whose name contains this")
    add("--device", type=arguments.device, default=arguments.default_device(), help="default: %(default)s")
    add("--json", metavar="FILE", type=files.output, help="write everything measured to this file, as it comes")


def run_info(options: argparse.Namespace) -> int:
    lines = [f"{name:9} {value}" for name, value in report.versions().items()]
    here = arguments.default_device()
    if here.type == "cuda":
        for index in range(torch.cuda.device_count()):
            lines.append(f"{f'cuda:{index}':9} {_described(torch.device('cuda', index))}")
        reason = native.why_not()
        lines.append(f"{'replay':9} {'in C' if reason is None else f'not in C: {reason}'}")
    lines.append("")
    for family in backends.families():
        for backend in backends.BACKENDS:
            reason = backends.why_not(family, backend, here)
            lines.append(f"{family:5} {backend:10} {'runs on ' + here.type if reason is None else 'no: ' + reason}")
    report.show("\n".join([*lines, ""]))
    return 0


def _described(device: torch.device) -> str:
    found = devices.of(device)
    capability = ".".join(map(str, found.capability))
    memory = f"{found.shared_memory / 1024:.0f} KB of shared memory"
    return (
        f"{torch.cuda.get_device_name(device)}: capability {capability}, {memory}, {found.processors} multiprocessors"
    )


def run_check(options: argparse.Namespace) -> int:
    if options.fuzz is not None or options.misuse is not None:
        return run_fuzz(options)
    if options.seed is not None:
        raise Refused("--seed goes with --fuzz or --misuse; the usual cases are always the same")
    chosen = selection.named(options.case, selection.CHECK)
    found = results.begin("check")
    found.not_measured = selection.absent(wanted(options), options.device)
    work = [(c, b) for b in wanted(options) for c in chosen if runs(c, b, options.device)]
    try:
        for case, backend in report.progress(work, "check"):
            with found.failures_of(case, backend):
                found.accuracy += accuracy.measure(case, backend, options.device)
            results.write(found, options.json, last=False)
        found.complete = True
    except KeyboardInterrupt:
        report.say("interrupted")
    report.show(*page.printed(found, options.rows))
    results.write(found, options.json)
    if not found.complete:
        return INTERRUPTED
    if not work:
        return 2
    return 1 if found.failed or any(entry.failed for entry in found.not_measured) else 0


def run_fuzz(options: argparse.Namespace) -> int:
    which, seconds = ("fuzz", options.fuzz) if options.misuse is None else ("misuse", options.misuse)
    if options.case or options.json:
        raise Refused(
            f"--{which} draws cases of its own and prints those that fail: --case and --json do not go with it"
        )
    draw = importlib.import_module(f".testing.{which}", __package__)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    absent = selection.absent(wanted(options), options.device)
    here = [b for b in wanted(options) if sum(entry.provider == b for entry in absent) < len(backends.families())]
    if not here:
        raise Refused("; ".join(map(str, absent)))
    total = failed = 0
    interrupted = False
    try:
        for outcome in draw.run(seconds, options.device, here, seed, report.status(f"{which}: case")):
            total += 1
            if not outcome.passed:
                failed += 1
                report.clear()
                print(f"FAIL: {outcome.case} {outcome.backend}: {outcome.detail} (--seed {seed})", flush=True)
    except KeyboardInterrupt:
        report.say("interrupted")
        interrupted = True
    report.clear()
    print(f"{total} cases, {failed} failed, seed {seed}")
    if interrupted:
        return INTERRUPTED
    return (1 if failed else 0) if total else 2


def run_bench(options: argparse.Namespace) -> int:
    found = results.begin("bench")
    interrupted = False
    try:
        bench.run(options, found, partial(results.write, found, options.json, last=False))
    except KeyboardInterrupt:
        interrupted = True
        report.say("interrupted")
    report.show(*page.printed(found))
    results.write(found, options.json)
    if interrupted:
        return INTERRUPTED
    ours_failed = any(entry.failed and backend_of(entry.provider) in backends.BACKENDS for entry in found.not_measured)
    return (1 if ours_failed else 0) if found.measurements or found.steps or ours_failed else 2


def run_page(options: argparse.Namespace) -> int:
    found = [results.read(path) for path in options.results]
    if options.markdown:
        files.write(options.markdown, page.markdown(found))
    elif len(found) > 1:
        raise Refused("--svg draws one file of results; --markdown takes several")
    else:
        files.write(options.svg, page.picture(found[0]))
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
