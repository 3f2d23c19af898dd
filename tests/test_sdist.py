"""The source distribution has all that the repository has: its tests run, and its pages are there."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_THE_REPOSITORY = (".ci/run", ".clang-format", ".gitignore", ".pre-commit-config.yaml")  # of git and of its hooks
MADE = ("PKG-INFO", "setup.cfg", "mhc_ops.egg-info/")  # by setuptools
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


@pytest.fixture(scope="module")
def files():
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository, whose files are compared")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def test_the_sdist_is_complete(files, tmp_path):
    source, built = tmp_path / "source", tmp_path / "built"
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    (source / "tests" / "__pycache__").mkdir()
    (source / "tests" / "__pycache__" / "conftest.cpython-311.pyc").touch()  # what a checkout has that was used
    done = subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (archive,) = built.iterdir()
    with tarfile.open(archive) as opened:
        found = {member.name.partition("/")[2]: member for member in opened if member.isfile()}
    ours = {name for name in found if not name.startswith(MADE)}
    assert sorted(files - ours - {*OF_THE_REPOSITORY}) == []
    assert sorted(ours - files) == []
    scripts = [name for name in ours if os.access(ROOT / name, os.X_OK)]
    assert "run.sh" in scripts and all(found[name].mode & 0o100 for name in scripts)
