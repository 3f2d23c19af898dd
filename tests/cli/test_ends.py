"""How a command ends: Ctrl-C, or a reader that has gone; and what it says meanwhile."""

import fcntl
import io
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import tty

import pytest

from mhc_ops import cli
from mhc_ops.measure import report
from mhc_ops.testing import fuzz
from mhc_ops.testing.fuzz import Outcome


def test_ctrl_c():
    """The signal itself, in the middle of the work."""
    command = "-m mhc_ops diagnose causal_conv1d --device cpu --shape 2x999x999"
    running = subprocess.Popen(
        [sys.executable, *command.split()],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores Ctrl-C
    )
    assert running.stderr.readline().startswith("diagnose 1/")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=600)
    assert running.returncode == 130 and said.splitlines()[-1] == "interrupted" and "Traceback" not in said


def test_a_reader_that_has_gone():
    """As in `mhc-ops info | head -1`: nothing is said, not even when Python ends."""
    reading, writing = os.pipe()
    os.close(reading)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "mhc_ops", "info"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=buffered)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_stream_that_the_shell_closed(closed):
    """The command runs as it would, and the other stream gets what it always does."""
    command = f"'{sys.executable}' -m mhc_ops compare none none {closed}; echo $?"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    said = "mhc-ops compare: none: No such file or directory\n"
    assert (done.stdout, done.stderr) == ("2\n", said if closed == ">&-" else "")


def test_a_terminal_that_lacks_a_letter(monkeypatch):
    """It gets a question mark, and the run goes on."""
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert cli.main(["compare", "µ", "µ"]) == 2
    assert sys.stderr.buffer.getvalue() == b"mhc-ops compare: ?: No such file or directory\n"


FUZZ = "check --device cpu --fuzz 2.5 --backend"
FINE = Outcome("mhc_post 3x2x8", "reference", True, "")
OFF = Outcome("mhc_pre 1x8x64", "reference", False, "dphi: 2.00")
FAILED = "FAIL: mhc_pre 1x8x64 reference: dphi: 2.00 (--seed 7)\n"


@pytest.fixture
def drawn(monkeypatch):
    """Instead of random cases: outcomes that a test puts here, None for Ctrl-C, and what was asked for."""
    outcomes, asked = [], []

    def draw(seconds, device, backends, seed, progress):
        asked.append((seconds, str(device), list(backends), seed))
        for number, outcome in enumerate(outcomes):
            progress(number)
            if outcome is None:
                raise KeyboardInterrupt
            yield outcome

    monkeypatch.setattr(fuzz, "run", draw)
    return outcomes, asked


@pytest.mark.parametrize(("outcomes", "code"), [([FINE] * 2, 0), ([FINE, OFF, FINE], 1), ([OFF, None], 130), ([], 2)])
def test_fuzz(outcomes, code, drawn, run, monkeypatch):
    """Where it is, is said now and then: here each time."""
    monkeypatch.setattr(report, "BETWEEN_LINES", 0.0)
    drawn[0].extend(outcomes)
    failed = outcomes.count(OFF)
    printed = FAILED * failed + f"{len(outcomes) - outcomes.count(None)} cases, {failed} failed, seed 7\n"
    said = "".join(f"fuzz: case {number}\n" for number in range(len(outcomes)))
    assert run(f"{FUZZ} reference --seed 7") == (code, printed, said + "interrupted\n" * (code == 130))
    assert drawn[1] == [(2.5, "cpu", ["reference"], 7)]


def test_fuzz_draws_a_seed_and_takes_the_backends_that_run_here(drawn, run, refused):
    outcomes, asked = drawn
    outcomes.append(FINE)
    for nth in range(3):
        found = run("check --device cpu --fuzz 1")
        _, _, backends, seed = asked[nth]
        assert found == (0, f"1 cases, 0 failed, seed {seed}\n", "")
        assert "reference" in backends and "tilelang" not in backends
    assert len({seed for *_, seed in asked}) > 1
    assert "conv: tilelang did not run: there are no tilelang kernels" in refused(f"{FUZZ} tilelang")
    assert len(asked) == 3


@pytest.mark.parametrize("terminal, moves", [("xterm", True), ("dumb", False)])
def test_progress_on_a_terminal(terminal, moves, monkeypatch):
    """Each place overwrites the last one, and what follows begins on a clean line."""
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("4H", 9, 20, 0, 0))
    tty.setraw(writing)
    monkeypatch.setenv("TERM", terminal)
    with open(writing, "w", encoding="utf-8") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        for _ in report.progress(["a long name", "b"], "check"):
            pass
        report.say("done")
        said = ""
        while "done\n" not in said:  # a read returns what has arrived
            said += os.read(reading, 999).decode()
    os.close(reading)
    lines = "\rcheck 1/2: a long n\x1b[K\rcheck 2/2: b\x1b[K\r\x1b[K\r\x1b[Kdone\n"
    assert said == (lines if moves else "check 1/2: a long name\ncheck 2/2: b\ndone\n")
