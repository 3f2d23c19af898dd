"""Kernels of a GPU that is not here, on CPU tensors: their launches do nothing. What is left of a call is its host.

The launchers choose as on an H200. What they record is a kernel as Triton compiles one for CUDA, with a C function that
ignores its arguments. Tensors are allocated by the function that torch.compile's code uses on a CPU.
"""

import contextlib
from collections import defaultdict

import pytest

from mhc_ops.core import backend, device, launch, private, replay

NOTHING = "".format  # a C function that takes any arguments


class NoKernel:
    """As triton.compiler.CompiledKernel."""

    function, packed_metadata = 1, (4, 1, 0)

    def __init__(self, driver, values):
        kinds = {i: "tensordesc<bf16[8, 8]>" if hasattr(value, "base") else "i32" for i, value in enumerate(values)}
        self.run = object.__new__(driver.CudaLauncher)
        zeros = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
        vars(self.run).update(dict.fromkeys(zeros, 0), arg_annotations=b"", kernel_signature=b"")
        self.run.launch = driver.wrap_handle_tensordesc(NOTHING, kinds, None)

    def __getitem__(self, grid):
        return lambda *values, stream: None


@contextlib.contextmanager
def launching_nothing(monkeypatch):
    """Within it, backend="triton" takes CPU tensors; yields the names of kernels that were bound."""
    from config_domain import GPUS
    from triton.backends.nvidia import driver
    from triton.runtime.jit import JITFunction

    bound = []

    def run(self, *values, grid, warmup, **options):
        bound.append(self.__name__)
        return NoKernel(driver, values)

    empty = private._found("_C._dynamo.guards._empty_strided_cpu")
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(device, "of", lambda _: GPUS["sm_90"])
        patch.setattr(backend, "why_not", lambda *_: None)
        patch.setattr(backend, "_INTERPRETED", False)
        # No descriptor is ever made: how many are depends on the addresses that torch's allocator gives out.
        patch.setattr(launch, "Made", lambda make, rest, meta: defaultdict(list))
        patch.setattr(replay, "_empty", lambda device, *layout: empty(*layout))
        backend.load.cache_clear()
        yield bound
    backend.load.cache_clear()


@pytest.fixture
def no_launches(monkeypatch):
    with launching_nothing(monkeypatch) as bound:
        yield bound
