"""What a release is made of: the source distribution, the wheel built from it, and what refuses a release."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import mhc_ops

ROOT = Path(__file__).parents[1]
OF_GIT = (".ci/", ".clang-format", ".github/", ".gitignore", ".pre-commit-config.yaml")  # not in the sdist
MADE = ("PKG-INFO", "setup.cfg", "mhc_ops.egg-info/")  # by setuptools
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; "  # an isolated build has none: the version is read, not run
BUILD = WITHOUT_TORCH + "from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
OPTIONAL = {"tilelang": "tilelang", "triton": "triton", "hub.benchmark": "kernels"}  # modules: the package they need
IMPORT_ALL = """
import importlib, importlib.util, pkgutil, sys, mhc_ops
assert mhc_ops.__file__.startswith(sys.argv[1]), mhc_ops.__file__
for module in pkgutil.walk_packages(mhc_ops.__path__, "mhc_ops."):
    needed = [package for part, package in eval(sys.argv[2]).items() if part in module.name]
    if all(map(importlib.util.find_spec, needed)) and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def run(*command, cwd):
    """Without PYTHONPATH: the wheel is meant, not this tree."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def files():
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository, whose files are copied")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(files, tmp_path_factory):
    """A folder with the sdist, and with the wheel made from the unpacked sdist, as `python -m build` makes them."""
    folder = tmp_path_factory.mktemp("release")
    for name in files:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / "source" / name)
    (folder / "source" / "tests" / "__pycache__").mkdir()
    (folder / "source" / "tests" / "__pycache__" / "conftest.cpython-311.pyc").touch()  # as in a checkout that was used
    run(sys.executable, "-c", BUILD, "build_sdist", folder, cwd=folder / "source")
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder)
    run(sys.executable, "-c", BUILD, "build_wheel", folder, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    return folder


@pytest.fixture(scope="module")
def python(built):
    """An environment with the wheel alone, beside the packages that are installed here."""
    venv.create(built / "venv", symlinks=True)
    python = built / "venv" / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=built)
    (packages,) = (built / "venv").glob("lib/python3*/site-packages")
    (packages / "here.pth").write_text(sysconfig.get_path("purelib"))
    return python


def test_the_sdist_is_complete(files, built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        found = {member.name.partition("/")[2]: member for member in opened if member.isfile()}
    ours = {name for name in found if not name.startswith(MADE)}
    assert ours == {name for name in files if not name.startswith(OF_GIT)}
    scripts = [name for name in ours if os.access(ROOT / name, os.X_OK)]
    assert "run.sh" in scripts and all(found[name].mode & 0o100 for name in scripts)


def test_the_wheel_is_complete(files, built):
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as opened:
        names = set(opened.namelist())
        metadata = email.message_from_bytes(opened.read(f"mhc_ops-{mhc_ops.__version__}.dist-info/METADATA"))
    assert {name for name in files if name.startswith("mhc_ops")} == {name for name in names if "dist-info" not in name}
    assert (metadata["Version"], metadata["License-Expression"]) == (mhc_ops.__version__, "MIT")
    assert "License ::" not in str(metadata) and metadata["Requires-Python"] == ">=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown" and "```python" in metadata.get_payload()
    links = ["".join(found) for found in re.findall(r"\]\(([^)]*)\)|src=\"([^\"]*)\"", metadata.get_payload())]
    assert links and all(link.startswith("https://") for link in links)  # a package index has no tree beside it


def test_the_wheel_runs(python, tmp_path):
    command = python.parent / "mhc-ops"
    assert run(command, "info", cwd=tmp_path).split()[:2] == ["mhc_ops", mhc_ops.__version__]
    assert "PASS" in run(command, "check", "--case", "sinkhorn 173x1x1", "--backend", "reference", cwd=tmp_path)
    run(command, "bench", "--providers", "eager", "--case", "sinkhorn", "--json", "found.json", cwd=tmp_path)
    run(command, "page", "found.json", "--markdown", "page.md", cwd=tmp_path)
    run(python, "-c", IMPORT_ALL, python.parents[1], OPTIONAL, cwd=tmp_path)


def test_strict_program_against_the_wheel(python, tmp_path):
    pytest.importorskip("mypy")
    shutil.copy(ROOT / "tests" / "typing" / "program.py", tmp_path)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--cache-dir", "cache")
    run(*mypy, "program.py", cwd=tmp_path)


def test_the_release_is_refused(tmp_path):
    """Where the tag is not the version of what was built, or the changelog has no section of it."""
    script, changelog = tmp_path / "scripts" / "check_release.sh", tmp_path / "CHANGELOG.md"
    script.parent.mkdir()
    shutil.copy(ROOT / "scripts" / "check_release.sh", script)

    def said(tag):
        done = subprocess.run([script, tag, tmp_path], capture_output=True, text=True)
        return done.returncode and done.stderr

    wheel = tmp_path / "mhc_ops-1.2.3-py3-none-any.whl"
    assert "a tag is v and a version" in said("1.2.3") and f"has no {wheel.name}" in said("v1.2.3")
    (tmp_path / "mhc_ops-1.2.3.tar.gz").touch(), wheel.touch()
    for line in ("1.2.3 – unreleased", "1.2.3 – ", "1.2.3 – 2026", "1.2.3 – 2026-12", "1x2.3 – 2026-12-01"):
        changelog.write_text(f"## {line}\n", encoding="utf-8")
        assert "CHANGELOG.md has no line '## 1.2.3" in said("v1.2.3"), line
    changelog.write_text("## 1.2.3 – 2026-12-01\n", encoding="utf-8")
    assert said("v1.2.3") == 0
