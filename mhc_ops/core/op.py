"""Declare an op once: torch sees one custom op, eager calls launch directly.

A contract is a typed function that allocates the outputs. Inputs and outputs keep their names from here to the kernel:

    class PostOutputs(NamedTuple):
        x_next: Tensor

    @op("mhc")
    def mhc_post_fwd(x: Tensor, h_out: Tensor, h_post: Tensor, h_res: Tensor) -> PostOutputs:
        return PostOutputs(x_next=torch.empty_like(x))

Its signature is the schema; an input that is itself a NamedTuple, as PreOptions, enters it field by field. Its body is
the fake. The real call allocates with it and hands inputs and outputs to `mhc_ops.<family>.<backend>.mhc_post_fwd`,
which fills the outputs.

    mhc_post_fwd.gradient_is(mhc_post_bwd, residual=True)

The names say what the gradient needs: inputs and outputs, which are kept for it, and d<output>, the cotangents. A
gradient of more than one op is a function: see `Op.gradient`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from . import backend as backends
from . import device, native, private
from .alike import Alike, find_like
from .check import check_apart, check_memory, check_tensor, check_writable
from .dispatch import Dispatched
from .layout import Layout, resolved
from .modes import (
    has_tangent,
    is_dtensor,
    is_eager,
    is_transformed,
    register_shardings,
    traced_under_derivatives,
)
from .replay import getter, replayed

IN_REFERENCE = "works with backend='reference' only"

Inputs = dict[str, Any]
Gradients = dict[str, Tensor | None]
STRIDED = torch.strided
ALL_CONTIGUOUS: Mapping[str, Layout] = MappingProxyType({})


def op(
    family: str,
    mutates: tuple[str, ...] = (),
    unwritten: tuple[str, ...] = (),
    layouts: Mapping[str, Layout] = ALL_CONTIGUOUS,
) -> Callable[[Callable[..., Any]], "Op"]:
    """Decorator: makes an Op of a contract.

    mutates: the inputs that launchers write to. One that may be None is an input that need not be given.
    unwritten: outputs with one element of storage that launchers leave as they are, because no code reads them.
    layouts: how launchers take an input; contiguous without an entry.
    """
    return lambda contract: Op(family, contract, mutates, unwritten, layouts)


class Op:
    """Called as op(backend=..., x=x, ...), every input by its name. The caller has checked the tensors."""

    def __init__(
        self,
        family: str,
        contract: Callable[..., Any],
        mutates: tuple[str, ...],
        unwritten: tuple[str, ...],
        layouts: Mapping[str, Layout],
    ):
        self.family = family
        self.name = contract.__name__
        self.contract = contract
        self.mutates, self.unwritten, self.layouts = mutates, unwritten, layouts
        signature = inspect.signature(contract)
        self.inputs = {name: getattr(p.annotation, "_fields", ()) for name, p in signature.parameters.items()}
        self.groups = {name: p.annotation for name, p in signature.parameters.items() if self.inputs[name]}
        self.outputs = signature.return_annotation
        self.differentiate: Callable[..., Gradients] | None = None
        self.asks_given = False
        self.reads: tuple[str, ...] = ()  # the inputs and outputs that the gradient needs
        self.varying: tuple[str, ...] = ()  # the outputs that carry a gradient
        self.function: type[Eager] = type(self.name, (Eager,), {})
        # torch.autograd.Function.apply would look for transforms once more.
        self.apply: Callable[..., Any] = super(torch.autograd.Function, self.function).apply  # type: ignore[misc]
        self.transformed = None if mutates else self._for_transforms(_setup_nothing, self._no_second_derivative)
        if family not in backends.families():
            backends.register_family(family)
        parameters = _parameters(signature)
        schema = _schema(parameters, self.outputs, mutates)
        # Two copies of the package do not share ops. For a name that ends with _, DTensor returns the first input.
        name = f"{backends.PACKAGE.replace('.', '_')}::{self.name.removesuffix('_')}"
        is_tensor = {parameter.name: parameter.annotation in (Tensor, Tensor | None) for parameter in parameters}
        self.registered = Dispatched(name, schema, is_tensor, mutates, self._again)
        self.traced = self.registered.op
        self.traced.register_fake(self._fake)
        if mutates:
            self.traced.register_vmap(self._no_vmap)

    def __call__(self, *, backend: str, **inputs: Any) -> Any:
        """All outputs: directly where nothing watches the call, else through torch's dispatcher."""
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        if torch.compiler.is_compiling():
            if traced_under_derivatives():
                raise NotImplementedError(f"{self.name}: a derivative by torch.func under torch.compile {IN_REFERENCE}")
        elif has_tangent(tensors):
            self._no_forward_mode()
        if not is_eager(tensors):
            return self.dispatched(backend=backend, **inputs)
        call = Call(self, backend, inputs, self.outputs._fields)
        return self.outputs(*call(tensors))

    def taken(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor of this name, an input or a kept one, as kernels take it."""
        return self.layouts.get(name, Tensor.contiguous)(resolved(tensor))

    def laid_out(self, inputs: Inputs) -> Inputs:
        return {name: self.taken(name, value) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def apart(self, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """The tensors, with copies of those that share memory with a written one; None if none does. Written ones must
        not share any."""
        found = None
        for written in self.mutates:
            if written not in tensors:
                continue
            for name, tensor in tensors.items():
                if name == written or not private.share_memory(tensor, tensors[written]):
                    continue
                if name in self.mutates:
                    check_apart(self.name.removesuffix("_"), {written: tensors[written], name: tensor})
                else:
                    found = found or dict(tensors)
                    found[name] = tensor.clone()
        return found

    def launch(self, *, backend: str, **inputs: Any) -> Any:
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                check_memory(self.name, name, value)
        outputs = self.contract(**inputs)
        first = next(value for value in inputs.values() if isinstance(value, Tensor))
        with device.current(first):
            launcher = backends.load(self.family, backend, self.name, first.device)
            launcher(**inputs, **outputs._asdict())
        return outputs

    def dispatched(self, *, backend: str, **inputs: Any) -> Any:
        """Called through torch, or through torch.func within one of its transforms."""
        flat = [*self.flattened(inputs), backend]
        if any(is_dtensor(value) for value in flat):
            register_shardings()
        if self.transformed is not None and is_transformed():
            return self.named(self.transformed.apply(*flat))
        if self.mutates:  # nothing flows back through what is overwritten
            with torch.no_grad():
                return self.named(self.traced(*flat))
        return self.named(self.traced(*flat))

    def once(self, *, backend: str, **inputs: Any) -> Any:
        """The op within a backward under create_graph; a second derivative through it raises.

        torch's once_differentiable would not raise: its node leads to none of the inputs, so torch.autograd.grad never
        reaches it and leaves gradients out in silence.
        """
        assert self.transformed is not None
        return self.named(self.transformed.apply(*self.flattened(inputs), backend))

    def through_torch(self, *, backend: str, **inputs: Any) -> Any:
        return self.named(self.traced(*self.flattened(inputs), backend))

    def flattened(self, inputs: Inputs) -> list[Any]:
        """The inputs in the order of the schema."""
        if inputs.keys() != self.inputs.keys():
            raise TypeError(f"{self.name}: takes {list(self.inputs)}, got {list(inputs)}")
        flat: list[Any] = []
        for name, fields in self.inputs.items():
            flat += [getattr(inputs[name], field) for field in fields] if fields else [inputs[name]]
        return flat

    def unflattened(self, flat: Sequence[Any]) -> Inputs:
        inputs, values = {}, iter(flat)
        for name, fields in self.inputs.items():
            inputs[name] = self.groups[name](*[next(values) for _ in fields]) if fields else next(values)
        return inputs

    def named(self, results: Any) -> Any:
        return self.outputs(*(results if isinstance(results, (tuple, list)) else (results,)))

    def _again(self, flat_and_backend: Sequence[Any]) -> Callable[[list[Tensor]], Any]:
        """What does the same for tensors like these."""
        *flat, backend = flat_and_backend
        given = self.unflattened(flat)
        inputs = self.laid_out(given)  # graphs call it without the public function
        for name in self.mutates:
            if inputs[name] is not None:
                check_writable(self.name, name, inputs[name])
        call = Call(self, backend, inputs, self.outputs._fields, repeated=private.keeps_calls)
        copied = [(place, name) for place, name in enumerate(call.names) if inputs[name] is not given[name]]
        unwritten = [self.outputs._fields.index(name) for name in self.unwritten]

        def again(tensors: list[Tensor]) -> Any:
            for place, name in copied:
                tensors[place] = self.taken(name, tensors[place])
            results = call.fill(tensors)
            for place in unwritten:  # torch's checks of an op read every output
                if results[place].numel():  # an empty one has no storage
                    results[place].as_strided((1,), (1,)).zero_()
            return tuple(results) if len(results) > 1 else results[0]

        return again

    def _fake(self, *flat_and_backend: Any) -> Any:
        private.lower_as_a_call(self.registered.overload)
        return _plain(self.contract(**self.unflattened(flat_and_backend[:-1])))

    def _no_second_derivative(self, ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(f"{self.name}: a second derivative {IN_REFERENCE}")

    def _no_forward_mode(self, ctx: Any = None, *tangents: Any) -> None:
        raise NotImplementedError(f"{self.name}: forward-mode differentiation {IN_REFERENCE}")

    def _no_vmap(self, *_: Any) -> None:
        raise NotImplementedError(f"{self.name}: vmap of an op that writes to its inputs {IN_REFERENCE}")

    def _for_transforms(self, setup: Callable[..., None], back: Callable[..., Any]) -> type[torch.autograd.Function]:
        """The op for torch.func, where torch's own autograd for custom ops does not work.

        Eager calls do not use it: torch binds the arguments of such a function in every call, which takes 10 µs.
        """

        class Transformed(torch.autograd.Function):
            generate_vmap_rule = True  # a call for each element

            @staticmethod
            def forward(*flat_and_backend: Any) -> Any:
                return self.traced(*flat_and_backend)

            setup_context = staticmethod(setup)
            backward = staticmethod(back)
            jvp = staticmethod(self._no_forward_mode)

        return Transformed

    def gradient(self, differentiate: Callable[..., Gradients]) -> Callable[..., Gradients]:
        """Decorator of the gradient: `differentiate(run, <names>)` returns gradients by the names of inputs.

        A name is an input or output of the op, which is kept for the gradient; d<output>, a contiguous cotangent, None
        for an unused output; or `given`, the names of the tensors among the inputs. An output whose cotangent is not
        named carries no gradient. `run(other_op, x=x, ...)` calls another op on the path and backend of the forward.
        `differentiate` is not called where no output is used.
        """
        _, *names = inspect.signature(differentiate).parameters
        self._register(names, differentiate)
        return differentiate

    def gradient_is(self, backward: "Op", renamed: dict[str, str] | None = None, **fixed: Any) -> None:
        """The gradient is the op `backward` on inputs of the same names. `renamed` and `fixed` give the others."""
        names = {name: (renamed or {}).get(name, name) for name in backward.inputs if name not in fixed}

        def differentiate(run: Callable[..., Any], **values: Any) -> Gradients:
            return by_input(run(backward, **{name: values[here] for name, here in names.items()}, **fixed))

        self._register(list(names.values()), differentiate)

    def _register(self, names: list[str], differentiate: Callable[..., Gradients]) -> None:
        outputs = self.outputs._fields
        varying = tuple(name for name in outputs if f"d{name}" in names)
        reads = tuple(name for name in names if name in self.inputs or name in outputs)
        unknown = set(names) - {"given"} - set(reads) - {f"d{name}" for name in varying}
        if unknown:
            raise TypeError(f"{self.name}: its gradient asks for {sorted(unknown)}")
        self.varying, self.reads, self.asks_given = varying, reads, "given" in names
        self.differentiate = differentiate

        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            *flat, backend = inputs
            call = Call(self, backend, self.unflattened(flat), outputs)
            tensors = [value for value in flat if isinstance(value, Tensor)]
            call.keep(ctx, tensors, output if isinstance(output, tuple) else (output,))

        def backward(ctx: Any, cotangents: tuple[Tensor | None, ...], path: Callable[..., Any]) -> tuple[Any, ...]:
            call = ctx.call
            run = partial(path, backend=call.backend)
            found = dict(zip(call.names, call.gradients(ctx, cotangents, partial(call.differentiated, run))))
            flat = [found.get(name) for name, fields in self.inputs.items() for _ in fields or (name,)]
            return *flat, None

        self.transformed = self._for_transforms(
            setup_context, lambda ctx, *cotangents: backward(ctx, cotangents, Op.dispatched)
        )
        self.registered.differentiate(
            lambda ctx, *cotangents: backward(ctx, cotangents, Op.through_torch), setup_context
        )


class Call:
    """An eager call of an op without its tensors. They come as a list in the order of `names`.

    inputs: those of this call, or of a like one before they are laid out.
    returns: the outputs that the caller wants. Autograd keeps what the gradient needs besides.
    repeated: whether like calls will follow."""

    def __init__(self, op: Op, backend: str, inputs: Inputs, returns: tuple[str, ...], repeated: bool = False):
        self.op, self.backend, self.returns, self.repeated = op, backend, returns, repeated
        self.names = [name for name, value in inputs.items() if isinstance(value, Tensor)]
        self.constants = {name: value for name, value in inputs.items() if not isinstance(value, Tensor)}
        outputs = op.outputs._fields
        hidden = tuple(name for name in op.reads if name in outputs and name not in returns)
        everything = [*self.names, *returns, *hidden]  # as `keep` has it
        self.kept = [name for name in op.reads if name in everything]
        self.kept_of = getter([everything.index(name) for name in self.kept])
        self.saved: list[tuple[Any, ...]] = []  # shapes, types and devices of what is kept
        self.fixed = [i for i, name in enumerate(returns) if name not in op.varying]
        self.replays = repeated and backend == "triton" and not backends._INTERPRETED
        self.differentiable = op.differentiate is not None and any(
            value.requires_grad for value in inputs.values() if isinstance(value, Tensor)
        )
        self.replayed: Any = self._direct(partial(self.launched, returns))
        self.fill: Any = self.fill_apart if op.mutates else self.replayed
        self.forward: Any = self.written if op.mutates else self.fill
        self.changed_of = getter([place for place, name in enumerate(self.names) if name in op.mutates])
        self.forward_keeping: Any = self._direct(partial(self.launched, (*returns, *hidden)))
        self.backward: Any = partial(self.differentiated, partial(Op.launch, backend=backend))
        self.alike: dict[tuple[bool, ...], Alike] = {}  # by which cotangents there are: how the backward runs

    def _direct(self, function: Any) -> Any:
        return replayed(function) if self.replays else function

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results, in the order of `returns`."""
        if self.differentiable and torch.is_grad_enabled():
            return self.op.apply(self, *tensors)
        return self.forward(tensors)

    def launched(self, outputs: tuple[str, ...], tensors: Sequence[Tensor]) -> list[Tensor]:
        results = self.op.launch(backend=self.backend, **dict(zip(self.names, tensors)), **self.constants)
        return [getattr(results, name) for name in outputs]

    def fill_apart(self, tensors: Sequence[Tensor]) -> Any:
        """Runs an op that writes to its inputs. A copy has strides of its own, which a plan does not know."""
        apart = self.op.apart(dict(zip(self.names, tensors)))
        return self.replayed(tensors) if apart is None else self.launched(self.returns, list(apart.values()))

    def written(self, tensors: Sequence[Tensor]) -> Any:
        """Runs an op that writes to its inputs, and tells torch that it did."""
        results = self.fill(tensors)
        torch.autograd.graph.increment_version(self.changed_of(tensors))
        return results

    def keep(self, ctx: Any, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Saves tensors for the backward. results: what is returned, then what the gradient needs besides."""
        kept = self.kept_of((*tensors, *results))
        if not self.saved:
            self.saved = [_kind(tensor) for tensor in kept]
        ctx.call = self
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        if self.fixed:
            ctx.mark_non_differentiable(*[results[i] for i in self.fixed])

    def gradients(
        self, ctx: Any, cotangents: Sequence[Tensor | None], back: Callable[..., Sequence[Tensor | None]] | None
    ) -> Sequence[Tensor | None]:
        """One gradient for each of `names`. cotangents: one for each of `returns`. back: None launches directly."""
        there = tuple([cotangent is not None for cotangent in cotangents])
        if True not in there:
            return [None] * len(self.names)
        saved = ctx.saved_tensors  # once: checkpointing and offloading unpack on each access
        if back is not None or not self.repeated:
            return (back or self.backward)(self.brought_back([*saved, *cotangents]))
        alike = self.alike.get(there)
        if alike is None:
            alike = self.alike[there] = Alike()
        find = find_like if native.code is None else native.code.find_like
        known = find(alike, saved, cotangents, STRIDED)
        if known is None:
            return self.unlike_others(alike, self.brought_back([*saved, *cotangents]))
        found, tensors = known
        return self.unlike_others(alike, tensors) if found is None else found(tensors)

    def unlike_others(self, alike: Alike, tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        tensors = self.brought_back(tensors)
        given = [tensor for tensor in tensors if tensor is not None]
        found = alike.find(given)
        if found is None:
            found = self._direct(self.backward)
            alike.add(given, found)
        return found(tensors)

    def brought_back(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Kept tensors, then cotangents, as kernels take them: a hook of autograd may return any tensor."""
        found: list[Tensor | None] = []
        for name, tensor, kind in zip(self.kept, tensors, self.saved):
            assert tensor is not None
            check_tensor(self.op.name, name, tensor, (kind[1],), " as it was kept")
            if _kind(tensor) != kind:
                (shape, _, place), (was, _, before) = _kind(tensor), kind
                raise ValueError(
                    f"{self.op.name}: {name} must come back to the backward as it was kept, {list(was)} on {before}, "
                    f"got {list(shape)} on {place} (from saved_tensors_hooks?)"
                )
            found.append(self.op.taken(name, tensor))
        for name, tensor in zip(self.returns, tensors[len(self.kept) :]):
            if tensor is not None:
                check_tensor(self.op.name, f"d{name}", tensor, (tensor.dtype,))
            found.append(None if tensor is None else resolved(tensor).contiguous())
        return found

    def differentiated(self, run: Callable[..., Any], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients. tensors: those kept, then the cotangents."""
        op = self.op
        assert op.differentiate is not None
        values: Inputs = dict.fromkeys(f"d{name}" for name in op.varying)
        values |= {name: self.constants[name] for name in op.reads if name in self.constants}
        values |= zip(self.kept, tensors)
        for name, cotangent in zip(self.returns, tensors[len(self.kept) :]):
            if name in op.varying:
                values[f"d{name}"] = cotangent
        if op.asks_given:
            values["given"] = self.names
        gradients = op.differentiate(run, **values)
        return [gradients.get(name) for name in self.names]


class Eager(torch.autograd.Function):
    """The autograd node of a Call. Each op has a subclass of its own name."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = call.forward_keeping(tensors)
        call.keep(ctx, tensors, results)
        return tuple(results[: len(call.returns)])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        call, back = ctx.call, None
        if torch.is_grad_enabled():
            back = partial(call.differentiated, partial(Op.once, backend=call.backend))
        return None, *call.gradients(ctx, cotangents, back)


def by_input(gradients: Any) -> Gradients:
    """The outputs of a backward op by the inputs' names: dx under x."""
    return {name.removeprefix("d"): gradient for name, gradient in gradients._asdict().items()}


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _setup_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


def _plain(outputs: Any) -> Any:
    """The outputs as a custom op returns them."""
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    """The contract's parameters as the schema has them: each group of options field by field, the backend last."""
    kind, parameters = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for name, parameter in signature.parameters.items():
        fields = inspect.get_annotations(parameter.annotation) if hasattr(parameter.annotation, "_fields") else {}
        for field, annotation in (fields or {name: parameter.annotation}).items():
            parameters.append(inspect.Parameter(field, kind, annotation=annotation))
    return [*parameters, inspect.Parameter("backend", kind, annotation=str)]


def _schema(parameters: list[inspect.Parameter], outputs: Any, mutates: tuple[str, ...]) -> str:
    count = len(outputs._fields)
    returned = tuple[(Tensor,) * count] if count > 1 else Tensor  # type: ignore[misc]

    def flat() -> None: ...

    flat.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return torch.library.infer_schema(flat, mutates_args=mutates)
