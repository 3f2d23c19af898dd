"""Channel-last causal conv1d in HIP C++: on ROCm, and on CPU tensors the same kernels with fibers for threads.

conv_fwd.h and conv_bwd.h hold the kernels, walk.h what they share. conv.hip chooses and launches, platform.h hides the
compiler, tuning.h has the numbers. A state [B, D, S], S = W − 1, has its channels side by side: kernels see [B, S, D].
"""

import ctypes

import torch
from torch import Tensor

from ...core import device
from ...core.check import name_of
from . import build

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
WIDTHS = (2, 3, 4)


def _struct(name: str, pointers: str) -> type[ctypes.Structure]:
    """A struct of conv.h: pointers, sizes, type and activation."""
    sizes = ("B", "L", "D", "W", "x_batch_stride", "x_token_stride")
    fields = [
        *[(pointer, ctypes.c_void_p) for pointer in pointers.split()],
        *[(size, ctypes.c_int64) for size in sizes],
        *[(number, ctypes.c_int32) for number in ("type", "silu")],
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Forward = _struct("ConvForward", "x weight bias seq_idx initial_state y final_state")
Backward = _struct(
    "ConvBackward",
    "x weight bias seq_idx initial_state dy dfinal_state dx dweight dbias dinitial_state workspace",
)


def causal_conv1d_fwd(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    dilation: int,
    output_final_state: bool,
    y: Tensor,
    final_state: Tensor,
) -> None:
    _refuse(x=x, weight=weight, residual=residual, cu_seqlens=cu_seqlens, dilation=dilation)
    if x.numel() == 0:
        _fill(final_state, initial_state)
        return
    tensors = {
        "x": x,
        "weight": weight.float(),
        "bias": None if bias is None else bias.float(),
        "seq_idx": seq_idx,
        "initial_state": initial_state,
        "y": y,
        "final_state": final_state,
    }
    _run(_library(x), "conv_forward", Forward, tensors, silu=silu)


def causal_conv1d_bwd(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    silu: bool,
    dilation: int,
    dy: Tensor,
    dfinal_state: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    dinitial_state: Tensor,
) -> None:
    _refuse(x=x, weight=weight, residual=None, cu_seqlens=cu_seqlens, dilation=dilation)
    if x.numel() == 0:
        dweight.zero_()
        dbias.zero_()
        _fill(dinitial_state, dfinal_state)
        return
    library = _library(x)
    workspace = x.new_empty(library.conv_workspace(*x.shape, weight.shape[1]), dtype=torch.float32)
    sums = [t if t.dtype == torch.float32 else torch.empty_like(t, dtype=torch.float32) for t in (dweight, dbias)]
    tensors = {
        "x": x,
        "weight": weight.float(),
        "bias": None if bias is None else bias.float(),
        "seq_idx": seq_idx,
        "initial_state": initial_state,
        "dy": dy,
        "dfinal_state": None if dfinal_state is None else dfinal_state.transpose(1, 2).contiguous(),
        "dx": dx,
        "dweight": sums[0],
        "dbias": sums[1],
        "dinitial_state": dinitial_state,
        "workspace": workspace,
    }
    _run(library, "conv_backward", Backward, tensors, silu=silu)
    for result, total in zip((dweight, dbias), sums):
        if result is not total:
            result.copy_(total)


def _refuse(*, x: Tensor, weight: Tensor, residual: Tensor | None, cu_seqlens: Tensor | None, dilation: int) -> None:
    """Raises an error that names what these kernels do not have."""
    missing = None
    if residual is not None:
        missing = "residual"
    elif cu_seqlens is not None:
        missing = "cu_seqlens"
    elif dilation != 1:
        missing = f"dilation (got {dilation})"
    elif weight.shape[1] not in WIDTHS:
        missing = f"width {weight.shape[1]} (2 to 4)"
    elif x.dtype not in TYPES:
        missing = name_of(x.dtype)
    if missing is not None:
        raise NotImplementedError(f'causal_conv1d: the hip backend has no {missing}; use backend="triton"')


def _library(x: Tensor) -> ctypes.CDLL:
    kind = device.of(x.device).kind
    if kind == "hip":
        return build.hip_library(x.get_device())
    if kind == "cpu":
        return build.cpu_library()
    raise RuntimeError(f"causal_conv1d: the hip backend runs on ROCm and on CPU tensors, the tensors are on {kind}")


def _run(
    library: ctypes.CDLL,
    name: str,
    struct: type[ctypes.Structure],
    tensors: dict[str, Tensor | None],
    silu: bool,
) -> None:
    """tensors: one for each pointer of the struct, by its name"""
    x, weight = tensors["x"], tensors["weight"]
    assert x is not None and weight is not None
    B, L, D = x.shape
    # The stride of a dimension of size 1 means nothing. 0 lets kernels use vectors.
    batch_stride, token_stride = (x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1))
    values = {
        # An unwanted tensor has no elements, and its pointer is null.
        **{name: None if t is None or t.numel() == 0 else t.data_ptr() for name, t in tensors.items()},
        "B": B,
        "L": L,
        "D": D,
        "W": weight.shape[1],
        "x_batch_stride": batch_stride,
        "x_token_stride": token_stride,
        "type": TYPES[x.dtype],
        "silu": silu,
    }
    if values.keys() != {field[0] for field in struct._fields_}:  # ctypes does not check
        raise TypeError(f"{name}: takes {[field[0] for field in struct._fields_]}, got {list(values)}")
    call = struct(**values)
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
    with device.current(x):
        error = getattr(library, name)(ctypes.addressof(call), stream)
    if error is not None:
        raise RuntimeError(f"causal_conv1d: {name} failed: {error.decode()}")


def _fill(state: Tensor, source: Tensor | None) -> None:
    """Fills the state after no tokens: the state before them, or zeros."""
    if state.numel() == 0:
        return
    if source is None:
        state.zero_()
    else:
        state.copy_(source)
