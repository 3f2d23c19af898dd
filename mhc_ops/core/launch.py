"""Launch Triton kernels by the names of their arguments, and let whoever records see what was launched."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

COMPILE_OPTIONS = frozenset(("num_warps", "num_stages", "num_ctas", "maxnreg"))

Start = Callable[[Any, tuple[Any, ...]], None]  # start(stream, arguments)
_recording = threading.local()


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """launch(kernel, (blocks,), x_ptr=x, T=T, BLOCK_T=16, num_warps=4): each argument of the kernel, and options."""
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
    """Append what this thread launches from now on to the list; the list that was in place before."""
    before = getattr(_recording, "launches", None)
    _recording.launches = launches
    return before


@contextlib.contextmanager
def collected() -> Iterator[list[Callable[[], Any]]]:
    """Within it, this thread launches nothing: a call compiles one of the kernels that would have been."""
    found: list[Callable[[], Any]] = []
    _recording.compilations = found
    try:
        yield found
    finally:
        _recording.compilations = None


def starter(compiled: Any, grid: tuple[int, int, int]) -> Start:
    """Start this compiled kernel on other tensors: by the C function beneath `compiled[grid]`, where Triton has the one
    that is known here, with what stays the same; it saves two thirds of a launch. Whoever hooks into Triton's launches,
    as its profiler does, is served by `compiled[grid]`."""
    slow = compiled[grid]
    quick = _c_launcher(compiled, grid)
    if quick is None:
        return lambda stream, arguments: slow(*arguments, stream=stream)
    from triton import knobs

    runtime = knobs.runtime

    def start(stream: Any, arguments: tuple[Any, ...]) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            slow(*arguments, stream=stream)
        else:
            quick(stream, arguments)

    return start


def _c_launcher(compiled: Any, grid: tuple[int, int, int]) -> Start | None:
    run: Any = getattr(compiled, "run", None)
    if type(run).__name__ != "CudaLauncher" or run.global_scratch_size or run.profile_scratch_size:
        return None
    import triton

    launch, function, metadata = run.launch, compiled.function, compiled.packed_metadata
    x, y, z = grid
    cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
    version = triton.__version__.split(".")[:2]
    if version == ["3", "6"]:

        def quick(stream: Any, arguments: tuple[Any, ...]) -> None:
            launch(
                x, y, z, stream, function, cooperative, dependent, None, None, metadata, None, None, None, *arguments
            )

        return quick
    if version == ["3", "7"]:
        kinds, signature = run.arg_annotations, run.kernel_signature

        def quick_from_3_7(stream: Any, arguments: tuple[Any, ...]) -> None:
            fixed = (x, y, z, stream, function, cooperative, dependent, metadata, None, None, None, None, None)
            launch(*fixed, kinds, signature, arguments)

        return quick_from_3_7
    return None
