"""Launch Triton kernels by the names of their arguments, and record the launches for a replay."""

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

COMPILE_OPTIONS = frozenset(("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_cooperative_grid"))

# Private names of Triton. A Triton without one of them launches the long way, and `lacks` lists it.
OF_KERNEL = ("function", "packed_metadata")
_OF_BOTH = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
OF_LAUNCHER = {"3.6": _OF_BOTH, "3.7": (*_OF_BOTH, "arg_annotations", "kernel_signature")}  # C functions that are known
OF_RUNTIME = ("launch_enter_hook", "launch_exit_hook")

MOST_DESCRIPTORS = 1024  # per argument: a training step of a deep model has about as many addresses

Start = Callable[[Any, Sequence[Any]], None]  # start(stream, arguments)
Described = Mapping[int, dict[str, Any]]
NONE: Described = MappingProxyType({})
_recording = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """launch(kernel, (blocks,), x_ptr=x, T=T, BLOCK_T=16, num_warps=4): every argument of the kernel, and options."""
    options = {name: arguments.pop(name) for name in COMPILE_OPTIONS & arguments.keys()}
    names = kernel.arg_names
    if arguments.keys() != set(names):
        missing, unknown = sorted(set(names) - arguments.keys()), sorted(arguments.keys() - set(names))
        raise TypeError(f"{kernel.__name__}: missing {missing}, unknown {unknown}")
    values = [arguments[name] for name in names]
    compilations = getattr(_recording, "compilations", None)
    if compilations is not None:
        compilations.append(partial(kernel.warmup, *values, grid=grid, **options))
        return
    compiled = kernel[grid](*values, **options)
    launches = getattr(_recording, "launches", None)
    if launches is not None:
        launches.append((compiled, (*grid, 1, 1)[:3], values))


def record(launches: list[Any] | None) -> list[Any] | None:
    """Appends this thread's launches to the list from now on. Returns the list used before."""
    before = getattr(_recording, "launches", None)
    _recording.launches = launches
    return before


@contextlib.contextmanager
def collected() -> Iterator[list[Callable[[], Any]]]:
    """Within it, this thread's launches are not executed; each becomes a function that compiles its kernel."""
    found: list[Callable[[], Any]] = []
    _recording.compilations = found
    try:
        yield found
    finally:
        _recording.compilations = None


def starter(compiled: Any, grid: tuple[int, int, int], described: Described = NONE) -> Start:
    """A function that starts this compiled kernel on other tensors.

    It calls the C function beneath `compiled[grid]`, which saves two thirds of a launch. It calls `compiled[grid]`
    itself where this Triton's C function is unknown, and while a launch hook is set, as Triton's profiler sets one.
    described: what each descriptor among the arguments holds besides its tensor, by its place. `start` takes the
      tensor's address there."""
    own = getattr(compiled, "starter", None)  # of a kernel that finds an argument itself
    if own is not None:
        return own(grid)
    slow = compiled[grid]

    def start_slowly(stream: Any, arguments: Sequence[Any]) -> None:
        values = list(arguments)
        for place, rest in described.items():
            values[place] = Descriptor(values[place], rest)
        slow(*values, stream=stream)

    return _c_launcher(compiled, grid, start_slowly, described) or start_slowly


def lacks(compiled: Any) -> list[str]:
    """The private names of Triton without which a compiled kernel for CUDA is started the long way."""
    import triton

    if _version() not in OF_LAUNCHER:
        return [f"the C function of triton {_version()}"]
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    names = (
        ("compiled", compiled, OF_KERNEL),
        ("compiled.run", getattr(compiled, "run", None), OF_LAUNCHER[_version()]),
        ("triton.knobs.runtime", runtime, OF_RUNTIME),
    )
    return [f"{of}.{name}" for of, value, known in names for name in known if not hasattr(value, name)]


def _version() -> str:
    import triton

    return ".".join(triton.__version__.split(".")[:2])


class Quick(NamedTuple):
    """Starts a compiled kernel by Triton's C function. native.c reads the fields and does the same.

    described: the place of each descriptor among the arguments, and its parts by the address of its tensor. Triton's
    own wrapper makes each descriptor anew, which takes as long as two launches. A launch copies the descriptor, so a
    captured graph has its own."""

    launch: Callable[..., None]
    grid: tuple[int, int, int]
    fixed: tuple[Any, ...]
    spread: bool  # the C function takes the arguments one by one, not as one sequence
    slowly: Start  # while a launch hook is set
    runtime: Any  # which has the hooks
    described: tuple[tuple[int, "Made"], ...]

    def __call__(self, stream: Any, arguments: Sequence[Any]) -> None:
        launch, grid, fixed, spread, slowly, runtime, described = self
        try:
            hooked = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
        except AttributeError:  # None or a function, which Triton takes too
            hooked = True
        if hooked:
            slowly(stream, arguments)
            return
        if described:
            arguments = self.with_descriptors(arguments)
        if spread:
            launch(*grid, stream, *fixed, *arguments)
        else:
            launch(*grid, stream, *fixed, arguments)

    def with_descriptors(self, arguments: Sequence[Any]) -> list[Any]:
        values = list(arguments)
        for place, of_address in reversed(self.described):  # the last first: places stay
            values[place : place + 1] = of_address[arguments[place]]
        return values


def _c_launcher(compiled: Any, grid: tuple[int, int, int], slowly: Start, described: Described = NONE) -> Start | None:
    run: Any = getattr(compiled, "run", None)
    if type(run).__name__ != "CudaLauncher" or lacks(compiled) or run.global_scratch_size or run.profile_scratch_size:
        return None
    found = _beneath_wrapper(run.launch, described) if described else (run.launch, ())
    if found is None:
        return None
    launch, made = found
    from triton import knobs

    fixed: tuple[Any, ...] = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    if spread := _version() == "3.6":
        fixed += (None, None, compiled.packed_metadata, None, None, None)
    else:
        fixed += (compiled.packed_metadata, *[None] * 5, run.arg_annotations, run.kernel_signature)
    return cast(Start, Quick(launch, grid, fixed, spread, slowly, knobs.runtime, made))


def _beneath_wrapper(wrapper: Any, described: Described) -> tuple[Any, tuple[tuple[int, "Made"], ...]] | None:
    """The C function that Triton's wrapper for descriptors calls, and what makes the parts of each descriptor."""
    if not inspect.isfunction(wrapper):
        return None
    names = inspect.getclosurevars(wrapper)
    inner, make = names.nonlocals, names.globals.get("make_tensordesc_arg")
    if make is None or not inner.keys() >= {"launcher", "tensordesc_indices", "tensordesc_meta"}:
        return None
    if inner["tensordesc_indices"] != described.keys():
        return None
    places = sorted(described)
    made = [Made(make, described[place], meta) for place, meta in zip(places, inner["tensordesc_meta"])]
    return inner["launcher"], tuple(zip(places, made))


class Made(dict[int, list[Any]]):
    """The C function's arguments for a descriptor, by the address of its tensor."""

    def __init__(self, make: Callable[..., list[Any]], rest: dict[str, Any], meta: Any) -> None:
        self.make, self.rest, self.meta = make, rest, meta

    def __missing__(self, address: int) -> list[Any]:
        if len(self) >= MOST_DESCRIPTORS:
            self.clear()
        return self.setdefault(address, self.make(Descriptor(address, self.rest), self.meta))


class Address:
    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Descriptor:
    """Stands for a TensorDescriptor whose tensor is known by its address alone."""

    def __init__(self, address: int, rest: dict[str, Any]) -> None:
        self.__dict__ = {**rest, "base": Address(address)}
