"""How a command ends: Ctrl-C, a reader that has gone, streams that are closed."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import types
from pathlib import Path

import pytest

from mhc_ops import cli, testing
from mhc_ops.measure import arguments, compare, page, report, results
from mhc_ops.testing.fuzz import Outcome

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "mhc_ops"]
DIAGNOSE = ["diagnose", "mhc_post", "--device", "cpu", "--shape", "3x2x8"]


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "where"),
    [
        (["info"], (report, "versions")),
        (["check", "--device", "cpu"], (results, "begin")),
        (["bench", "--device", "cpu"], (results, "begin")),
        (DIAGNOSE, (cli.diagnose, "diagnose")),
        (["page", "FILE", "--html", "page.html"], (page, "draw")),
        (["compare", "FILE", "FILE"], (compare, "compare")),
        (["info"], (arguments, "default_device")),  # before any command begins
    ],
)
def test_an_interrupted_command(command, where, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    results.write(results.begin("bench"), tmp_path / "FILE")
    monkeypatch.setattr(*where, interrupt)
    try:
        assert cli.main(command) == 130
    except KeyboardInterrupt:  # which would end all the tests
        pytest.fail("KeyboardInterrupt got through")
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"


def takes_signals():
    """As a program in a terminal does: one that a shell started in the background inherits that it ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c():
    """The signal itself, in the middle of the work."""
    command = [*COMMAND, "diagnose", "causal_conv1d", "--device", "cpu", "--shape", "2x999x999"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=takes_signals
    )
    assert running.stderr.readline().startswith("diagnose 1/")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=600)
    assert running.returncode == 130
    assert said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in said


SLOW = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except BaseException as error:  # as C code may have it
    raise ImportError("half of it is missing") from error
"""


def test_ctrl_c_while_torch_is_imported(tmp_path):
    """Nothing is printed, even if an import turns the interruption into another exception."""
    (tmp_path / "torch.py").write_text(SLOW)
    module, function = re.search(
        r'^mhc-ops = "(.+):(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    ).groups()
    script = f"import sys; from {module} import {function}; sys.exit({function}())"  # as pip writes it
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", script, "--help"]
    running = subprocess.Popen(command, env=environment, preexec_fn=takes_signals, **streams)
    assert running.stdout.readline() == "importing\n"
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=600)
    assert (running.returncode, said) == (130, "")


def test_a_reader_that_has_gone():
    """As in `mhc-ops info | head -1`: nothing is said, not even when Python ends."""
    reading, writing = os.pipe()
    os.close(reading)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([*COMMAND, "info"], stdout=writing, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_stream_that_is_closed(name, monkeypatch):
    """As by `>&-`."""
    monkeypatch.setattr(sys, name, None)
    assert cli.main(DIAGNOSE) == 0


def test_letters_that_a_terminal_lacks(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii"))
    monkeypatch.setattr(report, "versions", lambda: {"device": "µ-controller"})
    assert cli.main(["info"]) == 0
    assert b"?-controller" in printed.getvalue()


@pytest.fixture
def terminal(monkeypatch):
    """Makes stderr or stdout a terminal of so many columns; returns what reads its lines, without colours."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def open_terminal(name, columns):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        monkeypatch.setattr(sys, name, os.fdopen(theirs, "w", encoding="utf-8"))
        monkeypatch.setattr(sys, "__stdout__", None)

        def lines():
            shown = b""
            while not shown or select.select([ours], [], [], 0)[0]:
                shown += os.read(ours, 4096)
            shown = shown.decode()
            return [re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", line) for line in re.split("[\r\n]+", shown)]

        return lines

    return open_terminal


@pytest.mark.parametrize("columns", [10, 40, 200])
def test_progress_fits_the_terminal(columns, terminal):
    """Its size is that of stderr: stdout may be a file."""
    lines = terminal("stderr", columns)
    items = [f"mhc_forward_pre 2x128x4x256 bfloat16 no gamma {i}" for i in range(120)]
    shown = [lines()[-1] for _ in report.progress(items, "check")]
    assert shown == [f"check {nth}/120: {item}"[: columns - 1] for nth, item in enumerate(items, 1)]


def test_no_letters_for_a_terminal_that_cannot_move_its_cursor(terminal, monkeypatch):
    lines = terminal("stderr", 80)
    monkeypatch.setenv("TERM", "dumb")
    assert [lines()[0] for _ in report.progress(["one", "two"], "work")] == ["work 1/2: one", "work 2/2: two"]


def test_status_speaks_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    show = report.status("fuzz: case")
    for number in range(25):
        now[0] = float(number)
        show(number)
    assert capsys.readouterr().err == "fuzz: case 10\nfuzz: case 20\n"


@pytest.fixture
def fuzz(monkeypatch):
    """A module whose run yields what a test wants; returns what run was called with."""
    module = types.ModuleType("fuzz")
    module.outcomes, module.called = [], []

    def run(seconds, device, backends, seed, progress):
        module.called.append((seconds, str(device), list(backends), seed))
        for number, outcome in enumerate(module.outcomes):
            progress(number)
            if outcome.case == "Ctrl-C":
                raise KeyboardInterrupt
            yield outcome

    module.run = run
    monkeypatch.setitem(sys.modules, "mhc_ops.testing.fuzz", module)
    monkeypatch.setattr(testing, "fuzz", module, raising=False)  # where the real one was imported before
    return module


FUZZ = ["check", "--device", "cpu", "--backend", "reference", "--fuzz", "2.5"]
FINE = Outcome("mhc_post 3x2x8", "reference", True, "")
OFF = Outcome("mhc_pre 1x8x64", "reference", False, "dphi: 2.00")
FAILED = "FAIL: mhc_pre 1x8x64 reference: dphi: 2.00 (--seed 7)\n"


@pytest.mark.parametrize(
    ("outcomes", "code", "printed"),
    [
        ([FINE, FINE], 0, "2 cases, 0 failed, seed 7\n"),
        ([FINE, OFF, FINE], 1, f"{FAILED}3 cases, 1 failed, seed 7\n"),
        ([OFF, Outcome("Ctrl-C", "", True, "")], 130, f"{FAILED}1 cases, 1 failed, seed 7\n"),
    ],
)
def test_fuzz(outcomes, code, printed, fuzz, capsys):
    fuzz.outcomes = outcomes
    assert cli.main([*FUZZ, "--seed", "7"]) == code
    assert fuzz.called == [(2.5, "cpu", ["reference"], 7)]
    said = capsys.readouterr()
    assert said.out == printed
    assert code != 130 or said.err.splitlines()[-1] == "interrupted"


def test_fuzz_draws_a_seed_and_says_it(fuzz, capsys):
    fuzz.outcomes = [FINE]
    seeds = set()
    for _ in range(3):
        assert cli.main(FUZZ) == 0
        seeds.add(fuzz.called[-1][-1])
        assert capsys.readouterr().out == f"1 cases, 0 failed, seed {fuzz.called[-1][-1]}\n"
    assert len(seeds) > 1
    assert cli.main(["check", "--device", "cpu", "--fuzz", "1"]) == 0
    assert "reference" in fuzz.called[-1][2] and "tilelang" not in fuzz.called[-1][2]


def test_fuzz_with_nothing_to_do(fuzz, capsys):
    assert cli.main(FUZZ) == 2
    assert capsys.readouterr().out.startswith("0 cases, 0 failed")
    assert cli.main(["check", "--device", "cpu", "--backend", "tilelang", "--fuzz", "1"]) == 2
    assert "mhc-ops check: conv: tilelang did not run: there are no tilelang kernels" in capsys.readouterr().err
    assert len(fuzz.called) == 1


@pytest.mark.parametrize("options", [[*FUZZ, "--case", "mhc"], [*FUZZ, "--json", "file"], ["check", "--seed", "3"]])
def test_options_that_do_not_go_together(fuzz, options, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("mhc-ops check: --")
    assert fuzz.called == []
