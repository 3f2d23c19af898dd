"""A process that leaves while another thread compiles ends as any other does."""

import subprocess
import sys
import textwrap
import threading

import pytest

pytest.importorskip("tilelang")
from mhc_ops.mhc.tilelang import build

LEAVE = """
    import threading, time
    import tilelang, torch
    import mhc_ops
    from mhc_ops.core import backend
    from mhc_ops.mhc.tilelang import build

    tilelang.disable_cache()
    backend.why_not = lambda family, name, device_type: None
    inside, compile = threading.Event(), tilelang.compile

    def announced(*arguments, **options):
        inside.set()
        return compile(*arguments, **options)

    build.tilelang.compile = announced
    logits = torch.zeros(3, 8, 8)
    threading.Thread(target=lambda: mhc_ops.sinkhorn(logits, backend="tilelang"), daemon=True).start()
    inside.wait()
    time.sleep({delay})
"""


@pytest.mark.parametrize("delay", [0, 0.1])
def test_leaving_while_a_thread_compiles(delay):
    """Python does not wait for threads of torch's autograd, which call backward kernels first, nor for daemons: one
    that was in TVM's C++ then ended the process with "terminate called without an active exception", "Aborted"."""
    program = textwrap.dedent(LEAVE.format(delay=delay))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_one_thread_compiles_for_all(monkeypatch):
    compiling = []

    def compile(function, target):
        compiling.append(threading.current_thread())
        return function

    monkeypatch.setattr(build.tilelang, "compile", compile)
    factory = build.kernel(lambda number, threads: number)
    callers = [threading.Thread(target=factory, args=(number, build.ON_CPU)) for number in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(compiling) == 4
    assert len(set(compiling)) == 1
    assert set(compiling).isdisjoint({*callers, threading.current_thread()})
    assert not compiling[0].daemon  # Python waits for it
