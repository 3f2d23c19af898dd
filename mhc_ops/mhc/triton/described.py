"""Kernels that take tensors as descriptors, by which a GPU copies whole blocks (TMA).

`launch` gives such a kernel the tensors themselves; descriptors are made here at every start, also when a call is
replayed with the addresses of other tensors.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...core.launch import starter

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def described(tensor, block):
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, block, layout)


class Described:
    """A kernel as `launch` takes it. blocks: of each argument that is a descriptor, what is copied at once."""

    def __init__(self, kernel: Any, blocks: dict[str, list[int]]) -> None:
        self.kernel, self.blocks = kernel, blocks
        self.__name__, self.arg_names = kernel.__name__, kernel.arg_names
        self.places = {self.arg_names.index(name): block for name, block in blocks.items()}

    def with_descriptors(self, values):
        return [described(value, self.places[i]) if i in self.places else value for i, value in enumerate(values)]

    def __getitem__(self, grid):
        def run(*values, **options):
            arguments = self.with_descriptors(values)
            compiled = self.kernel[grid](*arguments, **options)
            return Compiled(compiled, {i: arguments[i] for i in self.places})

        return run

    def warmup(self, *values, **options):
        return self.kernel.warmup(*self.with_descriptors(values), **options)


class Compiled:
    """What `launch` records. Its tensors come as addresses; sizes and strides are those of the first call."""

    def __init__(self, kernel: Any, descriptors: dict[int, TensorDescriptor]) -> None:
        self.kernel, self.descriptors = kernel, descriptors

    def __getitem__(self, grid):
        start = starter(self.kernel, grid)

        def run(*arguments, stream):
            arguments = list(arguments)
            for i, descriptor in self.descriptors.items():
                arguments[i] = moved(descriptor, arguments[i])
            start(stream, tuple(arguments))

        return run


class Address(NamedTuple):
    address: int

    def data_ptr(self):
        return self.address


def moved(descriptor, address):
    """The descriptor of such a tensor elsewhere. Its checks, which take 5 µs, hold for this one too."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(descriptor.__dict__, base=Address(address))
    return made
