"""Sequence parallel of the mHC modules, as a style of torch's parallelize_module."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..conv.modules import ShortConv
from ..core.check import listed
from ..mhc import carry as between
from ..mhc.carry import StackCarry
from ..mhc.modules import HyperConnection, HyperHead
from ..mhc.stack import HyperStack
from . import agree

MODULES = (HyperConnection, HyperStack, HyperHead, ShortConv)


class HyperParallel(ParallelStyle):
    """Every rank has a piece of the sequence and all parameters of mHC; the layers inside have their own styles.

    >>> tokens = Shard(1)
    >>> parallelize_module(stack, mesh, {
    ...     "": HyperParallel(),
    ...     "*.layer.up": ColwiseParallel(input_layouts=tokens),
    ...     "*.layer.down": RowwiseParallel(output_layouts=tokens),
    ... })

    For a `HyperStack` (with its connections), `HyperConnection`, `HyperHead` and `ShortConv`, on a mesh of one
    dimension. mHC itself sends nothing: x [B, S, n, D] is sharded along its dimension sequence_dim. The layer gets h_in
    as a DTensor that is sharded in the same way, and may gather it. It returns h_out as a DTensor of any layout or as
    the rank's own piece, as RowwiseParallel(output_layouts=Shard(1)) does. A ShortConv sees whole sequences: x is
    redistributed to it, and its output back.

    x is a DTensor or the rank's piece. Pieces must have one length, which the ranks compare. A DTensor's sequence need
    not be divided evenly, but every rank must have a token. The output is a DTensor, or with use_local_output the
    rank's piece. Parameters are replicated from rank 0; a backward sums their gradients over the ranks. Apply FSDP2
    afterwards, on another dimension of the mesh: to the layers of a stack and to the whole, not to its connections.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        super().__init__()
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MODULES):
            names = listed([kind.__name__ for kind in MODULES])
            raise TypeError(f"HyperParallel: takes a {names}, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"HyperParallel: the mesh must have one dimension, got {device_mesh.ndim}: slice it")
        for part in module.children() if isinstance(module, HyperStack) else [module]:
            self._replicate(part, device_mesh)
            if isinstance(part, HyperConnection):
                part.register_forward_hook(lambda _, args, result: self._with_h_out(result, device_mesh))
        module.register_forward_pre_hook(lambda part, args: self._entering(part, args, device_mesh))
        module.register_forward_hook(lambda part, args, result: self._leaving(part, result, device_mesh))
        return module

    def _replicate(self, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):  # the connection may occur twice
                whole = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=self.src_data_rank)
                own = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                own.register_post_accumulate_grad_hook(_sum_gradient)
                module.register_parameter(name, own)

    def _entering(self, module: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        """args with x sharded. A connection outside of a stack runs as a stack of one."""
        if not args:
            raise TypeError("HyperParallel: x must be given by its position")
        if isinstance(args[0], StackCarry):
            raise TypeError("HyperParallel: the plan must name the HyperStack, not its connections")
        if isinstance(module, HyperStack) and not module.first:
            (x, read), extras = module._pair(*args)
            return (self._sharded(x, mesh), self._sharded(read, mesh, last=1)), *extras
        x, rest = self._sharded(args[0], mesh), args[1:]
        return between.begin(x, every=0) if isinstance(module, HyperConnection) else x, *rest

    def _leaving(self, module: nn.Module, result: Any, mesh: DeviceMesh) -> Any:
        if isinstance(module, HyperConnection):
            carry, *rest = result if not isinstance(result, StackCarry) else (result,)
            x = self._returned(between.end(carry, module.backend), mesh)
            return x if isinstance(result, StackCarry) else (x, *rest)
        if isinstance(result, tuple):  # from a stack: x, p, and a list of what its layers returned besides
            return tuple([value if isinstance(value, list) else self._leaving(module, value, mesh) for value in result])
        return self._returned(result, mesh)

    def _sharded(self, x: Any, mesh: DeviceMesh, last: int = 2) -> Any:
        """last: how many dimensions x has after those of its tokens"""
        if not isinstance(x, Tensor):
            return x  # the module says what is wrong with it
        along, ranks = self.sequence_dim, mesh.size() if isinstance(x, DTensor) else 1
        if not 0 <= along < x.dim() - last:
            shape = list(x.shape)
            raise ValueError(f"HyperParallel: sequence_dim={along} is not a token dimension of x {shape}")
        length = x.shape[along]
        if -(-length // ranks) * (ranks - 1) >= length:  # all ranks but the last have as many as the first
            of_ranks = f" on {ranks} ranks" if ranks > 1 else ""
            raise ValueError(f"HyperParallel: every rank must have a token, got {length}{of_ranks}")
        if not isinstance(x, DTensor):
            if last == 2:  # p of a shifted stack comes with its x
                self._agree(x, mesh)
            return DTensor.from_local(x, mesh, [Shard(along)], run_check=False)
        return self._redistributed(x, mesh)

    def _agree(self, x: Tensor, mesh: DeviceMesh) -> None:
        """Compare the ranks' pieces: each rank derives the shape of the whole DTensor from its own."""
        if mesh.size() > 1:
            length, (n, D) = x.shape[self.sequence_dim], x.shape[-2:]
            others = x.numel() // max(1, length * n * D)
            statement = agree.Statement.about("HyperParallel", mesh.get_group(), x, B=others, L=length, n=n, D=D)
            agree.agreed(statement, x)

    def _returned(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        assert isinstance(x, DTensor)
        x = self._redistributed(x, mesh)
        return x.to_local() if self.use_local_output else x

    def _redistributed(self, x: DTensor, mesh: DeviceMesh) -> DTensor:
        wanted = (Shard(self.sequence_dim),)
        return x if x.placements == wanted else x.redistribute(mesh, wanted)

    def _with_h_out(self, result: Any, mesh: DeviceMesh) -> Any:
        """The carry with h_out as a DTensor, alone or with what the layer returned besides."""
        if isinstance(result, StackCarry):
            return result._replace(h_out=self._whole(result.h_out, result.carry.x, mesh))
        carry, *rest = result
        return self._with_h_out(carry, mesh), *rest

    def _whole(self, h_out: Any, x: Tensor, mesh: DeviceMesh) -> Any:
        if not isinstance(h_out, Tensor) or isinstance(h_out, DTensor):
            return h_out
        assert isinstance(x, DTensor)
        *outer, _, D = x.to_local().shape
        if h_out.shape != (*outer, D):
            layout = f"output_layouts=Shard({self.sequence_dim})"
            shapes = f"{list(h_out.shape)} where the rank's piece is {[*outer, D]}"
            raise ValueError(f"HyperParallel: the layer returned {shapes}; give its RowwiseParallel {layout}")
        shape = torch.Size((*x.shape[:-2], D))
        stride = torch.empty(shape, device="meta").stride()
        piece = h_out.contiguous()  # matches the strides of the whole
        return DTensor.from_local(piece, mesh, [Shard(self.sequence_dim)], run_check=False, shape=shape, stride=stride)

    def __repr__(self) -> str:
        return f"HyperParallel(sequence_dim={self.sequence_dim}, use_local_output={self.use_local_output})"


def _sum_gradient(parameter: Tensor) -> None:
    """Sum a gradient over the ranks right after the backward; else an optimizer would do it in each step."""
    if isinstance(parameter.grad, DTensor):
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
