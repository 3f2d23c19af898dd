"""Declare an op once; torch sees one custom op, eager calls launch directly.

A contract is a typed function that allocates the outputs:

    @op("mhc")
    def mhc_post_fwd(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        return torch.empty_like(x)

Its signature is the schema and its body is the fake. The real call allocates with it and hands inputs and outputs to
`mhc_ops.<family>.<backend>.mhc_post_fwd`, which only fills.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import backend as backends
from . import device, replay
from .modes import has_tangent, is_eager, is_transformed, needs_grad, traced_under_derivatives

IN_REFERENCE = "works with backend='reference' only"
Run = Callable[..., Any]
Gradient = Callable[[Run, tuple[Any, ...], tuple[Tensor, ...], list[Tensor | None]], tuple[Tensor | None, ...]]


def op(family: str, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], "Op"]:
    """Decorator: make an Op of a contract. mutates: the inputs that its launchers write to."""
    return lambda contract: Op(family, contract, mutates)


class Op:
    """Call it as op(*inputs, backend); all inputs are positional, tensors contiguous and checked by the caller."""

    def __init__(self, family: str, contract: Callable[..., Any], mutates: tuple[str, ...]):
        self.family = family
        self.name = contract.__name__
        self.contract = contract
        self.function: type[torch.autograd.Function] | None = None
        self.transformed = None if mutates else self._for_transforms(_setup_nothing, self._no_second_derivative)
        if family not in backends.families():
            backends.register_family(family)
        inputs, outputs = torch.library.infer_schema(contract, mutates_args=mutates).split(" -> ")
        schema = f"{inputs.removesuffix(')')}, str backend) -> {outputs}"
        self.traced = torch.library.custom_op(f"mhc_ops::{self.name}", self.launch, mutates_args=mutates, schema=schema)
        self.traced.register_fake(self._fake)
        if mutates:
            self.traced.register_vmap(self._no_vmap)

    def __call__(self, *inputs_and_backend: Any) -> Any:
        if torch.compiler.is_compiling():
            if traced_under_derivatives():
                raise NotImplementedError(f"{self.name}: a derivative by torch.func under torch.compile {IN_REFERENCE}")
        elif has_tangent(inputs_and_backend):
            self._no_forward_mode()
        if not is_eager(inputs_and_backend):
            return self.dispatched(*inputs_and_backend)
        if self.function is not None and needs_grad(inputs_and_backend):
            return self.function.apply(*inputs_and_backend)
        return self.launch(*inputs_and_backend)

    def dispatched(self, *inputs_and_backend: Any) -> Any:
        """By torch, or by torch.func while one of its transforms is under way."""
        if self.transformed is not None and is_transformed():
            return self.transformed.apply(*inputs_and_backend)
        return self.traced(*inputs_and_backend)

    def once(self, *inputs_and_backend: Any) -> Any:
        """Within a backward that torch keeps for a second derivative (create_graph), which is then refused.

        Not by torch's once_differentiable: its node leads to none of the inputs, so torch.autograd.grad does not come
        across it, and gradients through it are left out in silence.
        """
        assert self.transformed is not None
        return self.transformed.apply(*inputs_and_backend)

    def launch(self, *inputs_and_backend: Any) -> Any:
        *inputs, backend = inputs_and_backend
        outputs = self.contract(*inputs)
        with device.current(inputs[0]):
            launcher = backends.load(self.family, backend, self.name, inputs[0].device)
            replay.fill(self.name, backend, launcher, inputs, as_tuple(outputs))
        return outputs

    def _fake(self, *inputs_and_backend: Any) -> Any:
        return self.contract(*inputs_and_backend[:-1])

    def _no_second_derivative(self, ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(f"{self.name}: a second derivative {IN_REFERENCE}")

    def _no_forward_mode(self, ctx: Any = None, *tangents: Any) -> None:
        raise NotImplementedError(f"{self.name}: forward-mode differentiation {IN_REFERENCE}")

    def _no_vmap(self, *_: Any) -> None:
        raise NotImplementedError(f"{self.name}: vmap of an op that writes to its inputs {IN_REFERENCE}")

    def _for_transforms(self, setup: Callable[..., None], back: Callable[..., Any]) -> type[torch.autograd.Function]:
        """The op as torch.func takes it: torch's own autograd for custom ops does not work there.

        Eager calls do not go this way, since torch binds the arguments of such a function anew in every call (10 µs).
        """

        class Transformed(torch.autograd.Function):
            generate_vmap_rule = True  # a call for each element

            @staticmethod
            def forward(*inputs_and_backend: Any) -> Any:
                return self.traced(*inputs_and_backend)

            setup_context = staticmethod(setup)
            backward = staticmethod(back)
            jvp = staticmethod(self._no_forward_mode)

        return Transformed

    def gradient(
        self, outputs: int, saved: tuple[int, ...] | None = None, unread: tuple[int, ...] = ()
    ) -> Callable[[Gradient], Gradient]:
        """Decorator: `gradient(run, inputs, saved, cotangents)` returns one gradient per tensor input.

        `run(other_op, *inputs)` calls another op on the path and backend of the forward. The first `outputs` outputs
        have cotangents, each contiguous, or None where nothing used that output; no gradient flows through the others,
        the intermediates. Outputs at the indices `saved` are kept for the backward: all intermediates by default.
        Of inputs at the indices `unread` only the type is kept and comes in their place. Where nothing used any output,
        there is no gradient.
        """

        def register(gradient: Gradient) -> Gradient:
            def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
                results = as_tuple(output)
                ctx.set_materialize_grads(False)
                ctx.mark_non_differentiable(*results[outputs:])
                values = [
                    value.dtype if index in unread and isinstance(value, Tensor) else value
                    for index, value in enumerate(inputs)
                ]
                ctx.constants = [None if isinstance(value, Tensor) else value for value in values]
                tensors = [value if isinstance(value, Tensor) else None for value in values]
                kept = range(outputs, len(results)) if saved is None else saved
                ctx.save_for_backward(*tensors, *[results[index] for index in kept])

            def backward(ctx: Any, cotangents: tuple[Tensor | None, ...], path: str) -> tuple[Any, ...]:
                count = len(ctx.constants)
                if all(cotangent is None for cotangent in cotangents[:outputs]):
                    return (None,) * count
                unpacked = ctx.saved_tensors  # once: checkpointing and offloading unpack on each access
                tensors, of_output = unpacked[:count], unpacked[count:]
                *inputs, backend = (
                    constant if tensor is None else tensor for tensor, constant in zip(tensors, ctx.constants)
                )
                contiguous = [None if c is None else c.contiguous() for c in cotangents[:outputs]]

                def run(other: Op, *arguments: Any) -> Any:
                    return getattr(other, path)(*arguments, backend)

                gradients = gradient(run, tuple(inputs), of_output, contiguous)
                return *gradients, *[None] * (count - len(gradients))

            class Function(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, *inputs_and_backend: Any) -> Any:
                    outputs = self.launch(*inputs_and_backend)
                    setup_context(ctx, inputs_and_backend, outputs)
                    return outputs

                @staticmethod
                def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
                    return backward(ctx, cotangents, "once" if torch.is_grad_enabled() else "launch")

            Function.__name__ = Function.__qualname__ = self.name
            self.function = Function
            self.transformed = self._for_transforms(
                setup_context, lambda ctx, *cotangents: backward(ctx, cotangents, "dispatched")
            )
            self.traced.register_autograd(
                lambda ctx, *cotangents: backward(ctx, cotangents, "traced"), setup_context=setup_context
            )
            return gradient

        return register


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
