"""Kernels are started again by the C function beneath Triton's launcher, with the arguments that Triton gives it."""

import pytest

from mhc_ops.core import launch

# Addresses, numbers and constants, in the order of the kernel's arguments; what descriptors hold besides addresses.
ARGUMENTS = (1024, 2048, None, 4096, 0.5, 128)
DESCRIBED = {1: {"shape": [64, 8], "strides": [8, 1], "padding": "zero", "round_f32_to_tf32": False}}
DESCRIBED[3] = DESCRIBED[1] | {"shape": [32, 8]}


@pytest.fixture
def compiled():
    """A kernel as compiled for CUDA; what its C function is called with is kept."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    run = object.__new__(driver.CudaLauncher)
    calls = []
    zeros = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    ones = ("global_scratch_align", "profile_scratch_align", "num_ctas")
    vars(run).update(dict.fromkeys(zeros, 0) | dict.fromkeys(ones, 1), arg_annotations=object())
    vars(run).update(kernel_signature=b"signature", launch=lambda *all: calls.append(all))
    return Compiled(run, calls)


class Compiled:
    function, packed_metadata = 4711, (4, 1, 0)

    def __init__(self, run, calls):
        self.run, self.calls = run, calls

    def __getitem__(self, grid):
        """As triton.compiler.CompiledKernel has it, without launch hooks."""

        def slow(*arguments, stream):
            self.run(*grid, stream, self.function, self.packed_metadata, None, None, None, *arguments)

        return slow


@pytest.fixture
def with_descriptors(compiled):
    """Two of its arguments are descriptors; each is given to the C function as the tensor, its sizes and strides."""
    from triton.backends.nvidia import driver

    kind = "tensordesc<fp32[8, 8]>"
    signature = dict(enumerate(("*fp32", kind, "i32", kind, "constexpr", "i32")))
    compiled.run.launch = driver.wrap_handle_tensordesc(compiled.run.launch, signature, None)
    return compiled


def started_with(value):
    """What the C function is called with; the addresses of tensors as numbers."""
    if isinstance(value, (list, tuple)):
        return [started_with(each) for each in value]
    return value.data_ptr() if isinstance(value, launch.Address) else value


@pytest.mark.parametrize("kernel", ["compiled", "with_descriptors"])
def test_as_triton_calls_it(kernel, request):
    compiled, grid = request.getfixturevalue(kernel), (3, 2, 1)
    described = DESCRIBED if kernel == "with_descriptors" else {}
    values = [launch.Descriptor(a, described[i]) if i in described else a for i, a in enumerate(ARGUMENTS)]
    compiled[grid](*values, stream=11)
    assert launch._c_launcher(compiled, grid, print, described) is not None, "not known: see core/launch.py"
    launch.starter(compiled, grid, described)(11, ARGUMENTS)
    slow, quick = started_with(compiled.calls)
    assert quick == slow


def test_who_hooks_into_launches_is_served(compiled, monkeypatch):
    from triton import knobs

    seen = []
    compiled.run.launch = lambda *all: seen.append("quick")
    monkeypatch.setattr(Compiled, "__getitem__", lambda self, grid: lambda *arguments, stream: seen.append("slow"))
    start = launch.starter(compiled, (1, 1, 1))
    start(0, ARGUMENTS)
    knobs.runtime.launch_enter_hook.add(print)
    try:
        start(0, ARGUMENTS)
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert seen == ["quick", "slow"]


def test_a_kernel_with_scratch_memory_goes_the_long_way(compiled, monkeypatch):
    for attribute in ("global_scratch_size", "profile_scratch_size"):
        monkeypatch.setitem(vars(compiled.run), attribute, 64)
        assert launch._c_launcher(compiled, (1, 1, 1), print) is None
        monkeypatch.undo()


def test_a_triton_without_a_private_name(compiled, monkeypatch):
    """Each is named, and the kernel starts the long way."""
    assert launch.lacks(compiled) == []
    of_run = launch.OF_LAUNCHER[launch._version()]
    for where, owner, names in (("compiled", Compiled, launch.OF_KERNEL), ("compiled.run", compiled.run, of_run)):
        for name in names:
            with monkeypatch.context() as patch:
                patch.delattr(owner, name)
                assert launch.lacks(compiled) == [f"{where}.{name}"]
                assert launch._c_launcher(compiled, (1, 1, 1), print) is None
    monkeypatch.setattr("triton.__version__", "9.9.0")
    launch.starter(compiled, (1, 1, 1))(0, ARGUMENTS)
    assert len(compiled.calls) == 1


def test_a_descriptor_is_made_once_for_an_address(with_descriptors, monkeypatch):
    from triton.backends.nvidia import driver

    made, make = [], driver.make_tensordesc_arg
    monkeypatch.setattr(launch, "MOST_DESCRIPTORS", 3)
    monkeypatch.setattr(
        driver, "make_tensordesc_arg", lambda arg, meta: made.append(arg.base.data_ptr()) or make(arg, meta)
    )
    start = launch.starter(with_descriptors, (1, 1, 1), DESCRIBED)
    for address in (2048, 2048, 512, 2048, 1536, 64, 2048):  # 64 is one more than are kept: all are made anew
        start(0, (1024, address, 5, 4096, 16, 7))
    assert made == [4096, 2048, 512, 1536, 64, 2048]


def test_descriptors_that_are_not_known_go_the_long_way(with_descriptors):
    """Others than recorded, or made in C."""
    assert launch._c_launcher(with_descriptors, (1, 1, 1), print, {1: DESCRIBED[1]}) is None
    with_descriptors.run.launch = print
    assert launch._c_launcher(with_descriptors, (1, 1, 1), print, DESCRIBED) is None
