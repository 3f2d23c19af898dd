"""A process that leaves or forks while a thread of its own compiles goes on as any other does."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest

pytest.importorskip("tilelang")
from mhc_ops.mhc.tilelang import build, sinkhorn

LEAVE = """
    import threading, time
    from mhc_ops.mhc.tilelang import build, sinkhorn

    inside, compile = threading.Event(), build.tilelang.compile

    def announced(*arguments, **options):
        inside.set()
        return compile(*arguments, **options)

    build.tilelang.compile = announced
    constants = dict(n=8, dtype=build.F32, without_eps=False, threads=build.ON_CPU)
    threading.Thread(target=sinkhorn.sinkhorn_fwd_kernel, kwargs=constants, daemon=True).start()
    inside.wait()
    time.sleep({delay})
"""


def run(program, cache):
    """In a process of its own, for which nothing is compiled yet."""
    env = os.environ | {"TILELANG_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("delay", [0, 0.1])
def test_leaving_while_a_thread_compiles(delay, tmp_path):
    """Python does not wait for threads of torch's autograd, which call backward kernels first, nor for daemons: one
    that was in TVM's C++ then ended the process with "terminate called without an active exception", "Aborted"."""
    run(LEAVE.format(delay=delay), tmp_path)


FORK = """
    import os, signal
    from mhc_ops.mhc.tilelang import build, sinkhorn

    sinkhorn.sinkhorn_fwd_kernel(n=2, dtype=build.F32, without_eps=False, threads=build.ON_CPU)
    child = os.fork()
    signal.alarm(60)  # ends a process that waits for ever
    sinkhorn.sinkhorn_fwd_kernel(n=3, dtype=build.F32, without_eps=False, threads=build.ON_CPU)
    if child:
        assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_compiles(tmp_path):
    """As workers of a DataLoader do. A fork takes no threads along: the child waited for the one that compiles."""
    run(FORK, tmp_path)


def test_one_thread_compiles_for_all(monkeypatch):
    compiling = []

    def compile(function, target):
        compiling.append(threading.current_thread())
        return function

    monkeypatch.setattr(build.tilelang, "compile", compile)
    factory = build.kernel(sinkhorn.sinkhorn_fwd_kernel.__wrapped__)
    constants = [{"n": n, "dtype": build.F32, "without_eps": False, "threads": build.ON_CPU} for n in range(1, 5)]
    callers = [threading.Thread(target=factory, kwargs=of_one) for of_one in constants]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(compiling) == 4
    assert len(set(compiling)) == 1
    assert set(compiling).isdisjoint({*callers, threading.current_thread()})
    assert not compiling[0].daemon  # Python waits for it
