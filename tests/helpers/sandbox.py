"""run.sh and run_tests.sh in a folder of their own, where every tool is a stub: no network, and chosen exit codes."""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = ("run.sh", "run_tests.sh", "scripts/venv.sh", "pyproject.toml", "constraints.txt")
# -S: without the packages of the Python that runs the tests, so that the torch in PYTHONPATH is the only one.
PYTHON = """\
#!/bin/sh
echo "python $*" >>"$LOG"
case "$*" in
    "-m venv"*)
        rm -rf .venv && mkdir -p .venv/bin .venv/lib/python3.0/site-packages && cp "$0" "$STUBS"/tool .venv/bin/
        for name in pytest ruff mypy mhc-ops; do cp "$STUBS/tool" ".venv/bin/$name"; done
        echo 'PATH="$PWD/.venv/bin:$PATH"' >.venv/bin/activate ;;
    "-m pip"*) ;;
    *) PYTHONPATH="$PACKAGES" exec {python} -S "$@" ;;
esac
"""
TOOL = """\
#!/bin/sh
name=$(basename "$0")
echo "$name $*" >>"$LOG"
case "$name $*" in
    *"not interpreted"*) exit ${COMPILED:-0} ;;
    pytest*) [ "${TRITON_INTERPRET:-}" = 1 ] && exit ${INTERPRETED:-0}; exit 99 ;;
    ruff*) exit ${RUFF:-0} ;;
    mypy*) exit ${MYPY:-0} ;;
esac
"""


@dataclass
class Done:
    code: int
    said: str  # on stderr
    calls: list[str]  # of all stubs, in order

    def called(self, start: str) -> list[str]:
        return [call for call in self.calls if call.startswith(start)]


class Sandbox:
    def __init__(self, folder: Path):
        self.folder, self.stubs, self.packages = folder / "project", folder / "stubs", folder / "packages"
        self.kfd = folder / "kfd"
        for file in FILES:
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, self.folder / file)
        self.stubs.mkdir(), self.packages.mkdir()
        self.stub("python", PYTHON.format(python=shlex.quote(sys.executable)))
        self.stub("tool", TOOL)
        self.stub("nvidia-smi", "#!/bin/sh\nexit 1\n")

    def stub(self, name: str, text: str) -> None:
        (self.stubs / name).write_text(text)
        (self.stubs / name).chmod(0o755)

    def torch(self, hip: str | None, sees_gpu: bool = True) -> None:
        """Install a PyTorch for the stub Python."""
        package = self.packages / "torch"
        package.mkdir()
        (package / "version.py").write_text(f"hip = {hip!r}\n")
        available = f"class cuda:\n    is_available = staticmethod(lambda: {sees_gpu})\n"
        (package / "__init__.py").write_text(f"from . import version\n{available}")

    def run(self, script: str, *arguments: str, **settings: str) -> Done:
        log = self.folder.parent / "log"
        log.unlink(missing_ok=True)
        environment = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
        environment |= {"PATH": f"{self.stubs}:{os.environ['PATH']}", "PYTHON": f"{self.stubs}/python", "LOG": str(log)}
        environment |= {"STUBS": str(self.stubs), "PACKAGES": str(self.packages), "KFD": str(self.kfd), **settings}
        command = ["bash", str(self.folder / script), *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return Done(done.returncode, done.stderr, log.read_text().splitlines() if log.exists() else [])
