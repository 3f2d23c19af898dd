"""build.py: what is compiled again, by whom, and what is said where that does not work."""

import ctypes
import os
import re
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


def one_sentence(error):
    return len(str(error.value).splitlines()) == 1 and str(error.value).startswith("causal_conv1d: ")


def test_only_what_conv_hip_includes_is_shipped():
    """So that a change to anything else compiles nobody's kernels again."""
    included, waiting = set(), [build.SOURCE / "conv.hip"]
    while waiting:
        path = waiting.pop()
        included.add(path)
        names = re.findall(r'#include "(.*)"', path.read_text())
        waiting += [build.SOURCE / name for name in names if build.SOURCE / name not in included]
    assert included == {path for path in build.SOURCE.iterdir() if path.suffix not in (".py", ".sh", "")}


def test_compiled_once(cache, stub, tmp_path):
    command = (stub(), "-x")
    library = build.compiled(command)
    assert library.read_bytes().startswith(b"library") and library == build.compiled(command)
    assert calls(tmp_path) == 1


@pytest.mark.parametrize("left", [0, 5, 20, -1])
def test_a_cut_off_library_is_compiled_again(cache, stub, tmp_path, left):
    command = (stub(), "-x")
    library = build.compiled(command)
    whole = library.read_bytes()
    library.write_bytes(whole[:left])
    assert build.compiled(command).read_bytes() == whole
    assert calls(tmp_path) == 2


def test_ranks_do_not_all_compile(cache, stub, tmp_path):
    program = f"from mhc_ops.conv.hip import build; print(build.compiled(({stub(seconds=2)!r}, '-x')))"
    call, root = [sys.executable, "-c", program], build.SOURCE.parents[2]
    processes = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)]
    made = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(made) == 1 and calls(tmp_path) == 1


def test_without_locks_each_compiles(cache, stub, monkeypatch):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(build.fcntl, "flock", refuse)
    assert build.compiled((stub(), "-x")).exists()


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_a_compiler_that_does_not_work_is_said(cache, monkeypatch, compiler):
    monkeypatch.setattr(backend, "_CXX", compiler)
    with pytest.raises(RuntimeError, match=rf"the compiler '{compiler}' does not work: .*; set CXX to") as error:
        conv()
    assert one_sentence(error)


def test_a_folder_that_cannot_be_written_is_said(cache, stub, monkeypatch):
    cache.write_text("a file, so that not even root can make a folder of it")
    monkeypatch.setattr(backend, "_CXX", stub())
    with pytest.raises(RuntimeError, match=rf"in {cache} \(.*\); set MHC_OPS_CACHE to a folder that") as error:
        conv()
    assert one_sentence(error)


def planted(cache, command):
    """A library with its hash, where the one of this command would be."""
    cache.mkdir(exist_ok=True)
    library = cache / f"conv_{build._key(command)}.so"
    library.write_bytes(build._with_hash(b"not ours"))
    return library


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777, 0o757], ids=oct)
def test_a_folder_that_others_write_is_refused(cache, stub, tmp_path, mode):
    command = (stub(), "-x")
    planted(cache, command)
    cache.chmod(mode)
    said = f"{cache} can be written by other users, .*; chmod go-w {cache} where it is yours, or set MHC_OPS_CACHE to a"
    with pytest.raises(RuntimeError, match=said) as error:
        build.compiled(command)
    assert one_sentence(error)
    assert not (tmp_path / "calls").exists()
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o646], ids=oct)
def test_a_library_that_others_write_is_refused(cache, stub, mode):
    command = (stub(), "-x")
    library = planted(cache, command)
    cache.chmod(0o755)
    library.chmod(mode)
    with pytest.raises(
        RuntimeError, match=f"{library} can be written by other users, .*; delete {library}, or"
    ) as error:
        build.compiled(command)
    assert one_sentence(error)


@pytest.mark.parametrize("what", ["folder", "library"])
def test_what_belongs_to_another_user_is_refused(cache, stub, monkeypatch, what):
    """Root may give it to one; anybody else can be another one in the eyes of this module."""
    command = (stub(), "-x")
    library = planted(cache, command)
    cache.chmod(0o755)
    library.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(cache if what == "folder" else library, 1234, -1)
    elif what == "folder":
        monkeypatch.setattr(build.os, "geteuid", lambda: os.getuid() + 1)
    else:
        pytest.skip("only root gives a file to another user")
    path = cache if what == "folder" else library
    said = rf"{path} belongs to user \d+, not to you \(user \d+\) or root, .*, or set MHC_OPS_CACHE to a"
    with pytest.raises(RuntimeError, match=said) as error:
        build.compiled(command)
    assert one_sentence(error)


def test_what_is_root_s_is_taken(cache, stub, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root has files of root")
    command = (stub(), "-x")
    library = planted(cache, command)
    cache.chmod(0o755)
    library.chmod(0o644)
    monkeypatch.setattr(build.os, "geteuid", lambda: 1234)
    assert build.compiled(command) == library


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077], ids=oct)
def test_what_is_made_is_taken_again(cache, stub, tmp_path, umask):
    command, before = (stub(), "-x"), os.umask(umask)
    try:
        assert build.compiled(command) == build.compiled(command)
    finally:
        os.umask(before)
    assert calls(tmp_path) == 1
    assert cache.stat().st_mode & 0o777 == 0o755 & ~umask


def test_a_library_that_cannot_be_loaded_is_said(cache, stub, monkeypatch):
    monkeypatch.setattr(backend, "_CXX", stub(content="no library"))
    with pytest.raises(RuntimeError, match=rf"cannot load the compiled kernels \(.*\); delete {cache}/conv_") as error:
        conv()
    assert one_sentence(error)


def test_the_hash_is_no_hindrance(cache, stub, tmp_path):
    source, library = tmp_path / "seven.c", tmp_path / "seven.so"
    source.write_text("int seven(void) { return 7; }")
    try:
        compiler = build.cpu_compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    subprocess.run([compiler, "-x", "c", *build.LIBRARY_FLAGS, source, "-o", library], check=True)
    assert ctypes.CDLL(str(build.compiled((stub(content=library.read_bytes()), "-x")))).seven() == 7


@pytest.mark.parametrize("of_torch", ["6.4.43482-0f2d60242", "6.2.41133", None])
def test_the_rocm_of_torch_is_taken(stub, of_torch):
    build.refuse_another_rocm(stub(), of_torch)


@pytest.mark.parametrize("of_torch", ["7.0.51831-a3e329ad8", "5.7.31921"])
def test_another_rocm_is_refused(stub, of_torch):
    compiler, major = stub(), of_torch[0]
    said = rf"{compiler} is of ROCm 6, this PyTorch of ROCm {major}; set ROCM_PATH to the folder of a ROCm {major}"
    with pytest.raises(RuntimeError, match=said) as error:
        build.refuse_another_rocm(compiler, of_torch)
    assert one_sentence(error)
