"""Kernels are started again by the C function beneath Triton's launcher, with the arguments that Triton gives it."""

import pytest

from mhc_ops.core import launch

ARGUMENTS = (1024, 2048, None, 7, 0.5, 128)  # addresses, numbers and constants, in the order of the kernel's arguments


@pytest.fixture
def compiled():
    """A kernel as compiled for CUDA; what its C function is called with is kept."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    run = object.__new__(driver.CudaLauncher)
    calls = []
    attributes = dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    attributes |= {"global_scratch_align": 1, "profile_scratch_align": 1, "num_ctas": 1}
    attributes |= {"launch_cooperative_grid": False, "launch_pdl": False}
    attributes |= {
        "arg_annotations": object(),
        "kernel_signature": b"signature",
        "launch": lambda *all: calls.append(all),
    }
    vars(run).update(attributes)
    return Compiled(run, calls)


class Compiled:
    function, packed_metadata = 4711, (4, 1, 0)

    def __init__(self, run, calls):
        self.run, self.calls = run, calls

    def __getitem__(self, grid):
        """As triton.compiler.CompiledKernel has it, where nobody hooks into launches."""

        def slow(*arguments, stream):
            self.run(*grid, stream, self.function, self.packed_metadata, None, None, None, *arguments)

        return slow


def test_as_triton_calls_it(compiled):
    grid = (3, 2, 1)
    compiled[grid](*ARGUMENTS, stream=11)
    start = launch.starter(compiled, grid)
    assert launch._c_launcher(compiled, grid) is not None, "this Triton's is not known: see core/launch.py"
    start(11, ARGUMENTS)
    slow, quick = compiled.calls
    assert quick == slow


def test_who_hooks_into_launches_is_served(compiled, monkeypatch):
    from triton import knobs

    seen = []
    monkeypatch.setattr(launch, "_c_launcher", lambda compiled, grid: lambda stream, arguments: seen.append("quick"))
    start = launch.starter(compiled, (1, 1, 1))
    start(0, ARGUMENTS)
    knobs.runtime.launch_enter_hook.add(print)
    try:
        start(0, ARGUMENTS)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert (seen, len(compiled.calls)) == (["quick"], 1)


@pytest.mark.parametrize("attribute", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_with_scratch_memory_goes_the_long_way(attribute, compiled):
    setattr(compiled.run, attribute, 64)
    assert launch._c_launcher(compiled, (1, 1, 1)) is None


def test_an_unknown_triton_goes_the_long_way(compiled, monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "9.9.0")
    assert launch._c_launcher(compiled, (1, 1, 1)) is None
    launch.starter(compiled, (1, 1, 1))(0, ARGUMENTS)
    assert len(compiled.calls) == 1
