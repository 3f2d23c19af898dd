"""How tests run a command."""

import pytest
import torch

from mhc_ops import cli
from mhc_ops.measure import selection
from mhc_ops.testing import cases


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The folder of the test is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here, capsys):
    """Runs a command, given as a line or as words; returns its exit code and what it prints on stdout and stderr."""

    def run(command):
        try:
            code = cli.main(command.split() if isinstance(command, str) else command)
        except (SystemExit, KeyboardInterrupt) as error:  # the latter would end all the tests
            code = getattr(error, "code", error)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def refused(here, run):
    """Runs a command that must be refused and change no file; returns the one line that says why."""

    def files():
        return {path: (path.is_file() and path.read_bytes(), *path.lstat()[:2]) for path in here.rglob("*")}

    def refused(command):
        before = files()
        code, printed, said = run(command)
        start = f"mhc-ops {command.split()[0] if isinstance(command, str) else command[0]}: "
        assert (code, printed, files()) == (2, "", before)
        assert said.startswith(start) and said.count("\n") == 1 and said[:-1].isprintable()
        return said[:-1].removeprefix(start)

    return refused


@pytest.fixture
def small(monkeypatch):
    """The only case of check and bench."""
    case = cases.Case(cases.MHC_FORWARD_PRE, (9,), 2, 8, torch.bfloat16)
    monkeypatch.setattr(selection, "CHECK", (case,))
    monkeypatch.setattr(selection, "BENCH_CPU", (case,))
    return case
