"""run.sh and run_tests.sh: which PyTorch they install, above all beside an AMD GPU, and which steps the tests have.

They run in a folder of their own where every tool is a stub: no network, and chosen exit codes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("run.sh", "run_tests.sh", "scripts/venv.sh", "pyproject.toml", "constraints.txt")
# Python and, as its copies in .venv, every tool. -S: without the packages of the Python that runs the tests, so that
# the torch in PYTHONPATH is the only one.
STUB = f"""\
#!/bin/sh
name=$(basename "$0")
echo "$name $*" >>"$LOG"
case "$name $*" in
    "python -m venv"*)
        rm -rf .venv && mkdir -p .venv/bin .venv/lib/python3.0/site-packages
        for name in python pytest ruff mypy mhc-ops; do cp "$0" ".venv/bin/$name"; done
        echo 'PATH="$PWD/.venv/bin:$PATH"' >.venv/bin/activate ;;
    "python -m pip"*) ;;
    python*) PYTHONPATH="$STUBS" exec {shlex.quote(sys.executable)} -S "$@" ;;
    *"not interpreted"*) exit ${{COMPILED:-0}} ;;
    pytest*) [ "${{TRITON_INTERPRET:-}}" = 1 ] && exit ${{INTERPRETED:-0}}; exit 99 ;;
    ruff*) exit ${{RUFF:-0}} ;;
    mypy*) exit ${{MYPY:-0}} ;;
esac
"""
EXTRAS = {"run.sh": "triton", "run_tests.sh": "test"}
PIP = "python -m pip install --quiet --disable-pip-version-check "
STEPS = ["ruff check .", "ruff format --check .", "mypy ", "pytest", "pytest"]


class Done(NamedTuple):
    code: int
    said: str  # on stderr
    calls: list[str]  # of all stubs, in order

    @property
    def made(self):
        """How .venv was made and filled."""
        calls = (re.sub("/dev/fd/.*", "FILE", call) for call in self.calls)
        return [call.removeprefix(PIP) for call in calls if call.startswith(("python -m venv", PIP))]


class Sandbox:
    def __init__(self, folder):
        self.folder, self.stubs, self.kfd, self.log = (folder / name for name in ("project", "stubs", "kfd", "log"))
        for file in FILES:
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self.folder / file)
        self.stubs.mkdir()
        self.stub("python", STUB)
        self.stub("nvidia-smi", "#!/bin/sh\nexit 1\n")

    def stub(self, name, text):
        (self.stubs / name).write_text(text)
        (self.stubs / name).chmod(0o755)

    def has(self, machine):
        """GPUs, amd or nvidia, and a PyTorch for the stub Python: cuda, rocm, or blind, which is rocm without a GPU."""
        if "amd" in machine:
            self.kfd.touch()
        if "nvidia" in machine:
            self.stub("nvidia-smi", "#!/bin/sh\necho 'GPU 0: stub'\n")
        if {"cuda", "rocm", "blind"} & {*machine.split()}:
            package, hip = self.stubs / "torch", None if "cuda" in machine else "6.4.43482"
            package.mkdir()
            (package / "version.py").write_text(f"hip = {hip!r}\n")
            available = f"class cuda:\n    is_available = staticmethod(lambda: {'blind' not in machine})\n"
            (package / "__init__.py").write_text(f"from . import version\n{available}")

    def run(self, script, *arguments, **settings):
        self.log.write_text("")
        environment = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        environment |= {"PATH": f"{self.stubs}:{os.environ['PATH']}", "PYTHON": f"{self.stubs}/python"}
        environment |= {"LOG": str(self.log), "STUBS": str(self.stubs), "KFD": str(self.kfd), **settings}
        command = ["bash", str(self.folder / script), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return Done(done.returncode, done.stderr, self.log.read_text().splitlines())


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


def venv(source, extras):
    """How .venv is made where PyTorch comes from "pypi", "python" (its own packages), or the address of an index."""
    site = " --system-site-packages" if source == "python" else ""
    alone = ["--ignore-installed setuptools>=77 -r FILE", "--no-deps -e ."]  # every tool has its command in .venv
    installs = {"pypi": [f"-c constraints.txt -e .[{extras}]"], "python": alone}
    return [f"python -m venv --clear{site} .venv", *installs.get(source, [f"--index-url {source} torch", *alone])]


@pytest.mark.parametrize(
    ("machine", "settings", "source"),
    [
        ("", {}, "pypi"),
        ("amd", {"CPU": "1"}, "pypi"),
        ("amd nvidia", {}, "pypi"),  # an AMD processor's graphics have the device file too
        ("amd rocm", {}, "python"),
        ("amd rocm", {"TORCH_INDEX": "https://index.example"}, "https://index.example"),  # the stub installs no torch
    ],
)
def test_where_torch_comes_from(sandbox, machine, settings, source):
    sandbox.has(machine)
    done = sandbox.run("run.sh", **settings)
    assert (done.code, done.made) == (0, venv(source, EXTRAS["run.sh"])), done.said
    of_python = list(sandbox.folder.glob(".venv/lib/python3*/site-packages/packages_of_python.pth"))
    assert bool(of_python) == (source == "python")


@pytest.mark.parametrize(("machine", "words"), [("amd", "TORCH_INDEX="), ("amd blind", "sees no GPU")])
def test_an_amd_gpu_that_cannot_be_used_stops(sandbox, machine, words):
    """No PyTorch for it, or one that may not open its device file."""
    sandbox.has(machine)
    done = sandbox.run("run.sh")
    assert done.code == 1 and "CPU=1" in done.said and words in done.said
    assert not any(call.startswith("mhc-ops") for call in done.calls)


def test_what_is_installed_is_kept(sandbox):
    """Another choice of PyTorch makes another .venv. The tests install what the check did not."""
    sandbox.has("rocm")
    assert sandbox.run("run.sh").made == venv("python", EXTRAS["run.sh"])
    assert (sandbox.run("run.sh").code, sandbox.run("run.sh").made) == (0, [])
    assert sandbox.run("run.sh", CPU="1").made == venv("pypi", EXTRAS["run.sh"])
    assert sandbox.run("run_tests.sh", CPU="1").made == venv("pypi", EXTRAS["run_tests.sh"])[1:]
    assert sandbox.run("run.sh", CPU="1").made == []


@pytest.mark.parametrize(
    ("words", "codes", "named"),
    [
        ("", "", ""), ("--all -k a", "", ""), ("", "RUFF=1", "ruff check"), ("", "MYPY=2", "mypy"),
        ("", "COMPILED=1", "pytest -m not interpreted"), ("", "COMPILED=1 INTERPRETED=1", "pytest -m interpreted"),
        # a selection may leave one of the two runs without tests
        ("-k a", "INTERPRETED=5", ""), ("-k a", "COMPILED=5 INTERPRETED=5", "no test is selected by -k a"),
    ],
)  # fmt: skip
def test_every_step_runs_whatever_fails(sandbox, words, codes, named):
    done = sandbox.run("run_tests.sh", *words.split(), **dict(code.split("=") for code in codes.split()))
    steps = [call for call in done.calls if call.split()[0] in ("ruff", "mypy", "pytest")]
    assert [call.startswith(step) for call, step in zip(steps, STEPS, strict=True)] == [True] * len(STEPS)
    assert done.code == bool(named) and named in (done.said.splitlines() or [""])[-1]
    end = f"interpreted{'' if '--all' in words else ' and not thorough'} {words.removeprefix('--all ')}"
    assert [call.endswith(end.rstrip()) for call in steps[-2:]] == [True, True]
