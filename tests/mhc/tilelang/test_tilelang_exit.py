"""A process that leaves or forks while a thread of its own compiles goes on as any other does."""

import sys

import pytest
from processes import output_of

pytest.importorskip("tilelang")

BEGIN = """
import os, signal, threading
from functools import partial
from mhc_ops.mhc.tilelang import build, sinkhorn

kernel = partial(sinkhorn.sinkhorn_fwd_kernel, dtype=build.F32, without_eps=False, threads=build.ON_CPU)
"""
LEAVE = """
inside, compile = threading.Event(), build.tilelang.compile

def announced(*arguments, **options):
    inside.set()
    return compile(*arguments, **options)

build.tilelang.compile = announced
threading.Thread(target=kernel, kwargs={"n": 8}, daemon=True).start()
inside.wait()
"""
FORK = """
kernel(n=2)
child = os.fork()
signal.alarm(60)  # ends a process that waits for ever
kernel(n=3)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize("program", [LEAVE, FORK], ids=["leaving", "forking"])
def test_in_a_process(program, tmp_path):
    """Nothing is compiled for it yet. Python does not wait for threads of torch's autograd, which call backward kernels
    first, nor for daemons: one that was in TVM's C++ then ended the process with "terminate called without an active
    exception", "Aborted". Workers of a DataLoader are forks, without other threads: a child waited for the one that
    compiles."""
    output_of(sys.executable, "-c", BEGIN + program, TILELANG_CACHE_DIR=str(tmp_path))
