"""What a type checker knows of the package that users install."""

import ast
import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import mhc_ops

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "program.py"


def test_program_uses_every_public_name():
    attributes = [node for node in ast.walk(ast.parse(PROGRAM.read_text())) if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "mhc_ops"}
    assert set(mhc_ops.__all__) <= used


def test_strict_program_against_the_wheel(tmp_path):
    pytest.importorskip("mypy")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "mhc_ops_command.py"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "mhc_ops", source / "mhc_ops", ignore=shutil.ignore_patterns("__pycache__"))
    run("-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", ".", source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    python = environment_with(wheel, tmp_path / "venv")
    shutil.copy(PROGRAM, tmp_path)
    run("-m", "mypy", "--strict", "--python-executable", python, "--cache-dir", "cache", "program.py", cwd=tmp_path)


def environment_with(wheel, folder):
    """The Python of a virtual environment with this wheel, and with what is installed here."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    with ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "here.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin" / "python"


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # not this tree
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
