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

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

PATIENCE = 20  # seconds that a wait may take before the kernel is said to hang


@torch.no_grad()
def run(kernel, grid, **arguments):
    """The kernel for every program of the grid, one after the other. Tensors are pointers, numbers scalars."""
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
    return Int(value) if type(value) is int else value


class Int(int):
    """A scalar of a kernel."""

    def to(self, _dtype):
        return self


def _closed(name):
    base = getattr(int, name)

    def method(self, other):
        result = base(self, other)
        return Int(result) if type(result) is int else result

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "xor", "and", "or", "radd", "rsub", "rmul", "rfloordiv", "rmod"):
    setattr(Int, f"__{_name}__", _closed(f"__{_name}__"))


class Pointer:
    """An element of a tensor, or a tensor of such."""

    def __init__(self, flat, offset=0):
        self.flat, self.offset = flat, offset
        self.dtype = types.SimpleNamespace(element_ty=flat.dtype)

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
        assert len(at) == len(self.block_shape) and min(at) >= 0
        ends = [min(a + b, size) for a, b, size in zip(at, self.block_shape, self.tensor.shape, strict=True)]
        inside = tuple(slice(0, max(0, end - a)) for a, end in zip(at, ends, strict=True))
        return self.tensor[tuple(slice(a, max(a, end)) for a, end in zip(at, ends, strict=True))], inside


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
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return Memory(self.tensor.as_strided(shape, strides), self.unfenced)

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


class Barriers:
    """Shared memory for barriers."""

    def __init__(self, barriers):
        self.barriers = barriers

    def index(self, i):
        return Barriers([self.barriers[int(i)]])

    @property
    def one(self):
        (barrier,) = self.barriers
        return barrier


class Program:
    """One program of the grid: what the names of Gluon mean in it."""

    def __init__(self, at, grid):
        self.at, self.grid = at, grid
        self.unfenced = set()
        self.stores = threading.local()  # copies out of shared memory that a thread has begun
        self.functions = {}
        self.meanings = self.of_language() | self.of_hopper()

    def function(self, kernel):
        """The kernel's function, in which the names of Gluon and of other kernels have their meaning here."""
        if id(kernel) not in self.functions:  # its hash takes the compiler
            names = {}
            made = types.FunctionType(kernel.fn.__code__, names, kernel.__name__, kernel.fn.__defaults__)
            self.functions[id(kernel)] = made
            for name, value in kernel.fn.__globals__.items():
                names[name] = self.meaning(value)
            names["range"] = lambda *bounds: map(Int, range(*bounds))
        return self.functions[id(kernel)]

    def meaning(self, value):
        if isinstance(value, JITFunction):
            return lambda *given, **named: self.function(value)(*given, **named)  # later: they may call one another
        if isinstance(value, gl.constexpr):
            return value.value
        try:
            return self.meanings.get(value, value)
        except TypeError:  # not hashable, so none of them
            return value

    def of_language(self):
        inert = {
            name: (lambda *_, **__: None)
            for name in ("SliceLayout", "DotOperandLayout", "BlockedLayout", "NVMMADistributedLayout",
                         "NVMMASharedLayout", "SwizzledSharedLayout", "DistributedLinearLayout")
        }  # fmt: skip
        language = types.SimpleNamespace(
            **inert,
            **{name: getattr(torch, name) for name in ("bfloat16", "float32", "int64", "reshape", "permute", "where")},
            static_range=range,
            program_id=lambda axis: Int(self.at[axis]),
            num_programs=lambda axis: Int(self.grid[axis]),
            cdiv=lambda a, b: Int(-(-a // b)),
            allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
            arange=lambda start, end, layout=None: torch.arange(start, end),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype),
            expand_dims=torch.unsqueeze,
            convert_layout=lambda value, layout, assert_trivial=False: value,
            split=lambda value: (value[..., 0], value[..., 1]),
            join=lambda a, b: torch.stack([a, b], dim=-1),
            broadcast=torch.broadcast_tensors,
            sum=lambda value, axis: torch.sum(value, dim=axis),
            fma=lambda a, b, c: fma(a, b, c),
            inline_asm_elementwise=_assembly,
            load=_load,
            store=_store,
            constexpr=None,
        )
        barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # its name up to triton 3.6
        return {gl: language, barrier: lambda: None}

    def of_hopper(self):
        def copy_in(descriptor, at, barrier, memory):
            assert memory.shape == descriptor.block_shape and memory.dtype == descriptor.dtype
            memory.tensor.fill_(math.nan)

            def action():
                found, inside = descriptor.window(at)
                memory.tensor.zero_()
                memory.tensor[inside] = found

            barrier.one.copy(action, descriptor.nbytes_per_cta)

        def copy_out(descriptor, at, memory):
            assert memory.shape == descriptor.block_shape and memory.dtype == descriptor.dtype
            assert not self.unfenced, "stores to shared memory without a fence after them"

            def action():
                to, inside = descriptor.window(at)
                to.copy_(memory.tensor[inside])

            self.begun().append(action)

        tma = types.SimpleNamespace(
            async_copy_global_to_shared=copy_in,
            async_copy_shared_to_global=copy_out,
            store_wait=self.finish_stores,
        )
        mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda *_: None,
            init=lambda barrier, count: barrier.one.init(count),
            expect=lambda barrier, size: barrier.one.arrive(expected=size),
            arrive=lambda barrier, count=1: barrier.one.arrive(count),
            wait=lambda barrier, phase: barrier.one.wait(phase),
        )
        return {
            hopper.tma: tma,
            hopper.mbarrier: mbarrier,
            hopper.fence_async_shared: self.unfenced.clear,
            hopper.mma_v2: lambda a, b, c: c + a.float() @ b.float(),
            hopper.warpgroup_mma: _warpgroup_mma,
            hopper.warpgroup_mma_wait: _warpgroup_mma_wait,
        }

    def allocate(self, dtype, shape, _layout):
        if dtype == torch.int64:  # nothing else is of this type
            return Barriers([Barrier() for _ in range(shape[0])])
        return Memory(torch.full(tuple(shape), math.nan, dtype=dtype), self.unfenced)

    def begun(self):
        if not hasattr(self.stores, "begun"):
            self.stores.begun = []
        return self.stores.begun

    def finish_stores(self, left=0):
        begun = self.begun()
        while len(begun) > left:
            begun.pop(0)()

    def warp_specialize(self, functions_and_arguments, *_warps_and_registers):
        failed = []

        def partition(function, arguments):
            try:
                with torch.no_grad():  # which a thread has of its own
                    function(*arguments)
                    self.finish_stores()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=partition, args=pair, daemon=True) for pair in functions_and_arguments]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]


def fma(a, b, c):
    """a·b + c with one rounding, but for the rare value that fp64 rounds to the middle of two"""
    return (a.double() * b.double() + c.double()).float()


def fma_of_the_interpreter(a, b, c):
    """With two roundings. To be put in the other's place where results are compared bit by bit with Triton kernels that
    its interpreter runs."""
    return a * b + c


class Product:
    """An asynchronous product: it reads shared memory when it is waited for."""

    def __init__(self, left, right, before):
        self.left, self.right, self.before = left, right, before

    def value(self):
        before = self.before.value() if isinstance(self.before, Product) else self.before
        left = self.left.tensor if isinstance(self.left, Memory) else self.left
        product = left.float() @ self.right.tensor.float()
        return product if before is None else before + product


def _warpgroup_mma(a, b, c, use_acc=True, is_async=False):
    assert not b.unfenced, "a product of shared memory without a fence after the stores to it"
    product = Product(a, b, c if use_acc else None)
    return product if is_async else product.value()


def _warpgroup_mma_wait(_left, deps):
    values = tuple(dep.value() if isinstance(dep, Product) else dep for dep in deps)
    return values[0] if len(values) == 1 else values


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
