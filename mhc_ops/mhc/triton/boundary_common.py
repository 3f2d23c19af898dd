"""Shared by the boundary's two large kernels, in Gluon: tensors that are copied block by block, and small tables."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import configs

n = gl.constexpr(configs.BOUNDARY_STREAMS)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name up to triton 3.6

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@functools.cache
def shared(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """The layout in shared memory of blocks that are copied."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), _DTYPES[dtype])


def by_streams(tensor: Tensor, block_t: int, block_d: int) -> TensorDescriptor:
    """[.., n, D], copied as blocks [n, block_t, block_d]"""
    streams, D = tensor.shape[-2:]
    shape, strides = [streams, tensor.numel() // (streams * D), D], [D, streams * D, 1]
    return described(tensor, shape, strides, [streams, block_t, block_d])


def by_rows(tensor: Tensor, columns: int, block_t: int, block: int) -> TensorDescriptor:
    """One row a token, copied as blocks [block_t, block]"""
    return described(tensor, [tensor.numel() // columns, columns], [columns, 1], [block_t, block])


def described(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(shape), list(strides), block, shared(tuple(block), tensor.dtype))


# fp32 to bf16 and back, two at a time: one at a time each takes an instruction at a quarter of the rate.
@gluon.jit
def narrow(tile):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [tile], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def widen(tile):
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [tile], dtype=gl.float32, is_pure=True, pack=2
    )


# One column of a table as [tokens, 1], beside a tile
@gluon.jit
def beside_tile(column, TILE: gl.constexpr):
    return gl.expand_dims(gl.convert_layout(column, gl.SliceLayout(1, TILE), assert_trivial=True), 1)


# The columns of a table; a thread holds all of them
@gluon.jit
def columns4(table, TILE: gl.constexpr):
    even, odd = gl.split(gl.reshape(table, [table.shape[0], 2, 2]))
    c0, c2 = gl.split(even)
    c1, c3 = gl.split(odd)
    return beside_tile(c0, TILE), beside_tile(c1, TILE), beside_tile(c2, TILE), beside_tile(c3, TILE)


@gluon.jit
def columns16(table, TILE: gl.constexpr):
    even, odd = gl.split(gl.reshape(table, [table.shape[0], 8, 2]))
    by4_0, by4_2 = gl.split(gl.reshape(even, [table.shape[0], 4, 2]))
    by4_1, by4_3 = gl.split(gl.reshape(odd, [table.shape[0], 4, 2]))
    c0, c4, c8, c12 = columns4(by4_0, TILE)
    c1, c5, c9, c13 = columns4(by4_1, TILE)
    c2, c6, c10, c14 = columns4(by4_2, TILE)
    c3, c7, c11, c15 = columns4(by4_3, TILE)
    return c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, c12, c13, c14, c15


# h_res from a table's columns, all in one thread: that of the old stream i and the new stream j at i·n + j
@gluon.jit
def mixing(table, TILE: gl.constexpr, TRANSPOSED: gl.constexpr):
    columns = columns16(table, TILE)
    found = ()
    for ij in gl.static_range(n * n):
        found = found + (columns[ij % n * n + ij // n if TRANSPOSED else ij],)
    return found


# x_next[j] = h_post[j]·h_out + Σ_i h_res[i, j]·x[i], or + x[j] without h_res, with the roundings of `mix` in post.py,
# stored ones included
@gluon.jit
def mixed(x, h_out, h_post, h_res, j: gl.constexpr):
    if h_res is None:
        weight, _ = gl.broadcast(h_post[j], h_out)
        value = gl.fma(weight, h_out, x[j])
    else:
        value = h_post[j] * h_out
        for i in gl.static_range(n):
            weight, _ = gl.broadcast(h_res[i * n + j], x[i])
            value = gl.fma(weight, x[i], value)
    return narrow(value)


# The next of COUNT places that are used in turn, and the parity of how often it was used before
@gluon.jit
def advance(at, phase, COUNT: gl.constexpr):
    at += 1
    if at == COUNT:
        at = 0
        phase ^= 1
    return at, phase
