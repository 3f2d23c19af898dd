"""Run a Gluon kernel's source on torch CPU tensors: `run(kernel, grid, x_ptr=x, x_desc=descriptor, T=70, BT=16, …)`.

Every partition of gl.warp_specialize is a thread. What it shows: shapes, orders, offsets, masks, and whether the
barriers' phases and byte counts fit together. Copies are as late as they may be: one into shared memory, which is NaN
from its start, happens when a thread waits for its barrier; one out of it when its thread waits for stores. An
asynchronous product is taken when it is waited for. So a tile that is read too early, or overwritten too early, shows.
So does a store to shared memory without a fence before the copy or product that reads it. What it does not show:
layouts, the warps of a partition (barriers between them), what a GPU's memory model allows, and the roundings of matrix
units.
"""

import inspect
import itertools
import math
import threading
import types
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from mhc_ops.core.launch import COMPILE_OPTIONS
from mhc_ops.core.sizes import cdiv
from mhc_ops.mhc.triton import boundary_common

PATIENCE = 20  # seconds that a wait may take before the kernel is said to hang


@torch.no_grad()
def run(kernel, grid, **arguments):
    """The kernel for every program of the grid, one after the other. Tensors are pointers."""
    arguments = {name: value for name, value in arguments.items() if name not in COMPILE_OPTIONS}
    parameters = inspect.signature(kernel.fn).parameters
    assert parameters.keys() == arguments.keys(), parameters.keys() ^ arguments.keys()
    for at in itertools.product(*map(range, reversed(grid))):
        program = Program(at[::-1], grid)
        values = {name: _argument(value) for name, value in arguments.items()}
        program.function(kernel)(**values)
        program.finish_stores()


def _argument(value):
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if isinstance(value, torch.Tensor):
        assert value.is_contiguous()
        return Pointer(value.view(-1))
    return value


class Pointer:
    """An element of a tensor, or a tensor of such."""

    def __init__(self, flat, offset=0):
        self.flat, self.offset = flat, offset

    def __add__(self, more):
        return Pointer(self.flat, self.offset + more)

    def at(self, mask):
        """Offsets of the elements that the mask leaves, and the mask, in one shape."""
        offset, mask = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(mask))
        inside = offset[mask]
        assert inside.numel() == 0 or (inside.min() >= 0 and inside.max() < self.flat.numel()), "out of bounds"
        return inside.long(), mask


class Descriptor:
    """A tensor that is copied block by block."""

    def __init__(self, of):
        self.tensor = of.base.as_strided(tuple(of.shape), tuple(of.strides))
        self.block_shape, self.layout, self.dtype = tuple(of.block_shape), of.layout, of.base.dtype
        assert of.base.data_ptr() % 16 == 0
        self.nbytes_per_cta = math.prod(self.block_shape) * of.base.element_size()

    def window(self, at):
        """The part of the block at these coordinates that lies in the tensor, and where that is in the block."""
        assert min(at) >= 0
        found = self.tensor[tuple(slice(a, a + size) for a, size in zip(at, self.block_shape, strict=True))]
        return found, tuple(slice(0, size) for size in found.shape)


class Memory:
    """Shared memory. `unfenced` holds those addresses that were stored to since the last fence."""

    def __init__(self, tensor, unfenced):
        self.tensor, self.unfenced = tensor, unfenced
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def index(self, i):
        return Memory(self.tensor[int(i)], self.unfenced)

    def permute(self, order):
        return Memory(self.tensor.permute(order), self.unfenced)

    def _reinterpret(self, dtype, shape, _layout):
        """It may be larger than what it is of: what follows in the same allocation comes with it."""
        assert dtype == self.dtype and self.tensor.is_contiguous()
        return Memory(self.tensor.as_strided(shape, torch.empty(shape).stride()), self.unfenced)

    def load(self, _layout):
        return self.tensor.clone()

    def store(self, value):
        assert value.shape == self.tensor.shape and value.dtype == self.tensor.dtype, (value.shape, value.dtype)
        self.tensor.copy_(value)
        self.unfenced.add(self.tensor.data_ptr())


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes have come."""

    def __init__(self):
        self.changed = threading.Condition()
        self.count, self.phase, self.arrived, self.bytes, self.copies = 0, 0, 0, 0, []

    def init(self, count):
        self.count = count

    def expect(self, size):
        self.arrive(expected=size)

    def arrive(self, count=1, expected=0):
        with self.changed:
            self.arrived += count
            self.bytes += expected
            assert self.arrived <= self.count, "more arrivals than the barrier counts in a phase"
            self.end_phase()

    def copy(self, action, size):
        with self.changed:
            self.copies.append((action, size))
            self.changed.notify_all()

    def end_phase(self):
        if self.arrived == self.count and self.bytes == 0 and not self.copies:
            self.phase ^= 1
            self.arrived = 0
            self.changed.notify_all()

    def wait(self, phase):
        with self.changed:
            while self.phase == phase:
                copies, self.copies = self.copies, []
                for action, size in copies:
                    action()
                    self.bytes -= size
                if copies:
                    self.end_phase()
                elif not self.changed.wait(PATIENCE):
                    raise TimeoutError(f"a barrier waits: {self.arrived} of {self.count} arrived, {self.bytes} bytes")


class Program:
    """One program of the grid: what the names of Gluon mean in it."""

    def __init__(self, at, grid):
        self.at, self.grid = at, grid
        self.unfenced = set()
        self.begun = defaultdict(list)  # copies out of shared memory, by the thread that began them
        self.functions = {}
        self.meanings = {id(name): meaning for name, meaning in [*self.of_language(), *self.of_hopper()]}

    def function(self, kernel):
        """The kernel's function, in which the names of Gluon and of other kernels have their meaning here."""
        if id(kernel) not in self.functions:  # its hash takes the compiler
            names = {}
            made = types.FunctionType(kernel.fn.__code__, names, kernel.__name__, kernel.fn.__defaults__)
            self.functions[id(kernel)] = made
            for name, value in kernel.fn.__globals__.items():
                names[name] = self.meaning(value)
            names["range"] = lambda *bounds: map(torch.tensor, range(*bounds))
        return self.functions[id(kernel)]

    def meaning(self, value):
        if isinstance(value, JITFunction):
            return lambda *given, **named: self.function(value)(*given, **named)  # later: they may call one another
        return value.value if isinstance(value, gl.constexpr) else self.meanings.get(id(value), value)

    def of_language(self):
        of_torch = ("bfloat16", "float32", "int64", "reshape", "permute", "sum", "where")
        language = types.SimpleNamespace(
            **dict.fromkeys(("SliceLayout", "DotOperandLayout", "SwizzledSharedLayout"), _nothing),
            **{name: getattr(torch, name) for name in of_torch},
            static_range=range,
            program_id=lambda axis: torch.tensor(self.at[axis]),
            num_programs=lambda axis: self.grid[axis],
            cdiv=cdiv,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
            arange=lambda start, end, layout=None: torch.arange(start, end),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            expand_dims=torch.unsqueeze,
            convert_layout=lambda value, layout, assert_trivial=False: value,
            split=lambda value: value.unbind(-1),
            join=lambda a, b: torch.stack([a, b], dim=-1),
            broadcast=torch.broadcast_tensors,
            fma=lambda a, b, c: fma(a, b, c),
            inline_asm_elementwise=_assembly,
            load=_load,
            store=_store,
        )
        yield gl, language
        yield boundary_common.barrier, _nothing

    def of_hopper(self):
        def copy_in(descriptor, at, barrier, memory):
            assert memory.shape == descriptor.block_shape and memory.dtype == descriptor.dtype
            memory.tensor.fill_(math.nan)

            def action():
                found, inside = descriptor.window(at)
                memory.tensor.zero_()
                memory.tensor[inside] = found

            barrier.copy(action, descriptor.nbytes_per_cta)

        def copy_out(descriptor, at, memory):
            assert memory.shape == descriptor.block_shape and memory.dtype == descriptor.dtype
            assert not self.unfenced, "stores to shared memory without a fence after them"

            def action():
                to, inside = descriptor.window(at)
                to.copy_(memory.tensor[inside])

            self.begun[threading.get_ident()].append(action)

        tma = {"async_copy_global_to_shared": copy_in, "async_copy_shared_to_global": copy_out}
        yield hopper.tma, types.SimpleNamespace(**tma, store_wait=self.finish_stores)
        mbarrier = {"init": Barrier.init, "arrive": Barrier.arrive, "wait": Barrier.wait, "expect": Barrier.expect}
        yield hopper.mbarrier, types.SimpleNamespace(**mbarrier, MBarrierLayout=_nothing)
        yield hopper.fence_async_shared, self.unfenced.clear
        yield hopper.mma_v2, lambda a, b, c: c + a.float() @ b.float()
        yield hopper.warpgroup_mma, _warpgroup_mma
        yield hopper.warpgroup_mma_wait, _warpgroup_mma_wait

    def allocate(self, dtype, shape, _layout):
        if dtype == torch.int64:  # nothing else is of this type
            barriers = [Barrier() for _ in range(shape[0])]
            return barriers[0] if len(shape) == 1 else types.SimpleNamespace(index=barriers.__getitem__)
        return Memory(torch.full(tuple(shape), math.nan, dtype=dtype), self.unfenced)

    def finish_stores(self, left=0):
        begun = self.begun[threading.get_ident()]
        while len(begun) > left:
            begun.pop(0)()

    def warp_specialize(self, functions_and_arguments, *_warps_and_registers):
        def partition(function, arguments):
            with torch.no_grad():  # which a thread has of its own
                function(*arguments)
                self.finish_stores()

        with ThreadPoolExecutor(len(functions_and_arguments)) as threads:
            partitions = [threads.submit(partition, *pair) for pair in functions_and_arguments]
        for ended in partitions:
            ended.result()


def fma(a, b, c):
    """a·b + c with one rounding, but for the rare value that fp64 rounds to the middle of two"""
    return (a.double() * b.double() + c.double()).float()


def fma_of_the_interpreter(a, b, c):
    """Two roundings: in the other's place where bits are compared with Triton kernels in its interpreter."""
    return a * b + c


def _nothing(*_, **__):
    """What is not emulated."""


def _warpgroup_mma(a, b, c, use_acc=True, is_async=True):
    """It reads shared memory when it is waited for."""
    assert is_async and not b.unfenced, "a product of shared memory without a fence after the stores to it"
    return lambda: (c() if use_acc else 0) + a.tensor.float() @ b.tensor.float()


def _warpgroup_mma_wait(_left, deps):
    return tuple(product() for product in deps)


def _load(pointer, mask=True, other=0.0):
    inside, mask = pointer.at(mask)
    values = torch.full(mask.shape, other, dtype=pointer.flat.dtype)
    values[mask] = pointer.flat[inside]
    return values


def _store(pointer, value, mask=True):
    offset, value, mask = torch.broadcast_tensors(torch.as_tensor(pointer.offset), value, torch.as_tensor(mask))
    inside, mask = Pointer(pointer.flat, offset).at(mask)
    assert inside.unique().numel() == inside.numel(), "two values are stored to one place"
    assert value.dtype == pointer.flat.dtype
    pointer.flat[inside] = value[mask]


def _turned(tile):
    """Each block of 8 × 8, as the lanes of a warp hold it, transposed."""
    rows, columns = tile.shape
    return tile.reshape(rows // 8, 8, columns // 8, 8).transpose(1, 3).reshape(rows, columns)


INSTRUCTIONS = {  # by the first instruction, and the type of the result
    ("cvt.rn.bf16x2.f32", torch.bfloat16): lambda tile: tile.to(torch.bfloat16),
    ("shl.b32", torch.float32): lambda tile: tile.to(torch.float32),
    ("movmatrix.sync.aligned.m8n8.trans.b16", torch.bfloat16): _turned,
}


def _assembly(text, _constraints, operands, dtype, is_pure, pack):
    (operand,) = operands
    return INSTRUCTIONS[text.split()[0], dtype](operand)
