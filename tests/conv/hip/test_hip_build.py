"""build.py: what is compiled again, by whom, and what is said where that does not work."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch

import mhc_ops
from mhc_ops.conv.hip import build
from mhc_ops.core import backend

# Counts its calls, takes its time, and writes what it is told to.
COMPILER = """\
#!/bin/sh
if [ "$1" = --version ]; then
    echo "HIP version: 6.4.43482-0f2d60242"
    exit
fi
echo call >>{folder}/calls
sleep {seconds}
while [ "$1" != -o ]; do shift; done
cp {content} "$2"
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MHC_OPS_CACHE", str(tmp_path / "cache"))
    build.cpu_library.cache_clear()
    yield tmp_path / "cache"
    build.cpu_library.cache_clear()


@pytest.fixture
def stub(tmp_path):
    def make(seconds=0, content="library"):
        compiler, library = tmp_path / "compiler", tmp_path / "content"
        library.write_bytes(content if isinstance(content, bytes) else content.encode())
        compiler.write_text(COMPILER.format(folder=tmp_path, seconds=seconds, content=library))
        compiler.chmod(0o755)
        return str(compiler)

    return make


def calls(tmp_path):
    return (tmp_path / "calls").read_text().count("call")


def conv():
    return mhc_ops.causal_conv1d(torch.zeros(1, 2, 4), torch.zeros(4, 2), backend="hip")


def refused(message):
    return pytest.raises(RuntimeError, match=f"^causal_conv1d: .*{message}")


def test_compiled_once_and_again_where_it_was_cut_off(cache, stub, tmp_path):
    command = (stub(), "-x")
    library = build.compiled(command)
    whole = library.read_bytes()
    assert whole.startswith(b"library") and library == build.compiled(command)
    assert calls(tmp_path) == 1
    for times, left in enumerate((0, 5, 20, -1), start=2):
        library.write_bytes(whole[:left])
        assert build.compiled(command).read_bytes() == whole and calls(tmp_path) == times


def test_ranks_do_not_all_compile(cache, stub, tmp_path):
    program = f"from mhc_ops.conv.hip import build; print(build.compiled(({stub(seconds=2)!r}, '-x')))"
    call, root = [sys.executable, "-c", program], build.SOURCE.parents[2]
    processes = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    made = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0] and len(made) == 1 and calls(tmp_path) == 1


def test_without_locks_each_compiles(cache, stub, monkeypatch):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(build.fcntl, "flock", refuse)
    assert build.compiled((stub(), "-x")).exists()


def test_a_compiler_that_does_not_work_is_said(cache, monkeypatch):
    for compiler in ("false", "no-such-compiler"):
        monkeypatch.setattr(backend, "CXX", compiler)
        with refused(rf"the compiler '{compiler}' does not work: .*; set CXX to"):
            conv()


def test_a_folder_that_cannot_be_written_is_said(cache, stub, monkeypatch):
    cache.write_text("a file, so that not even root can make a folder of it")
    monkeypatch.setattr(backend, "CXX", stub())
    with refused(rf"in {cache} \(.*\); set MHC_OPS_CACHE to a writable folder"):
        conv()


@pytest.fixture
def planted(cache, stub):
    """A library with its hash, where the one of this command would be."""
    cache.mkdir()
    command = (stub(), "-x")
    library = cache / f"conv_{build._key(command)}.so"
    library.write_bytes(build._with_hash(b"not ours"))
    cache.chmod(0o755)
    library.chmod(0o644)
    return command, library


def test_what_others_write_is_refused(cache, planted, tmp_path):
    command, library = planted
    of_each = (cache, "chmod go-w", (0o777, 0o775, 0o1777, 0o757)), (library, "delete", (0o666, 0o664, 0o646))
    for path, remedy, modes in of_each:
        for mode in modes:
            path.chmod(mode)
            with refused(f"{path} can be written by other users, .*; {remedy} {path}"):
                build.compiled(command)
        path.chmod(0o755)
    assert not (tmp_path / "calls").exists() and len(list(cache.iterdir())) == 1


def test_what_belongs_to_another_user_is_refused(cache, planted, monkeypatch):
    """Root gives it to one; without root, this module is told another user. What is root's is taken by all."""
    command, library = planted
    with monkeypatch.context() as other:
        other.setattr(build.os, "geteuid", lambda: os.getuid() + 1)
        if os.getuid() == 0:
            assert build.compiled(command) == library
            os.chown(library, 1234, -1)
            with refused(f"{library} belongs to user 1234, not to you"):
                build.compiled(command)
            os.chown(cache, 1234, -1)
        with refused(rf"{cache} belongs to user \d+, not to you \(user \d+\) or root"):
            build.compiled(command)


def test_what_is_made_is_taken_again(cache, stub, tmp_path):
    """Whatever umask allows."""
    before = os.umask(0)
    try:
        made = {build.compiled((stub(), "-x")) for _ in range(2)}
    finally:
        os.umask(before)
    assert len(made) == calls(tmp_path) == 1 and cache.stat().st_mode & 0o777 == 0o755


def test_what_the_compiler_made_and_said(cache, stub, monkeypatch, tmp_path):
    """The hash at the end of a library is no hindrance; one that cannot be loaded, and a failure, are said."""
    source, library = tmp_path / "seven.c", tmp_path / "seven.so"
    source.write_text("int seven(void) { return 7; }")
    try:
        compiler = build.cpu_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    subprocess.run([compiler, "-x", "c", *build.LIBRARY_FLAGS, source, "-o", library], check=True)
    assert ctypes.CDLL(str(build.compiled((stub(content=library.read_bytes()), "-x")))).seven() == 7
    before = {path for path in cache.iterdir() if path.suffix == ".so"}
    with pytest.raises(RuntimeError, match="unknown_option"):
        build.compiled((compiler, *build.CPU_FLAGS, "-funknown_option"))
    assert {path for path in cache.iterdir() if path.suffix != ".lock"} == before
    monkeypatch.setattr(backend, "CXX", stub(content="no library"))
    with refused(rf"cannot load the compiled kernels \(.*\); delete {cache}/conv_"):
        conv()


def test_another_rocm_is_refused(stub):
    compiler = stub()
    for of_torch in ("6.4.43482-0f2d60242", "6.2.41133", None):
        build.refuse_another_rocm(compiler, of_torch)
    for of_torch, major in (("7.0.51831-a3e329ad8", 7), ("5.7.31921", 5)):
        said = f"{compiler} is of ROCm 6, this PyTorch of ROCm {major}; set ROCM_PATH to the folder of a ROCm {major}"
        with refused(said):
            build.refuse_another_rocm(compiler, of_torch)
