"""How a public function calls its op: it checks and prepares once, then repeats the same Call.

    def mhc_post(x, h_out, h_post, h_res, *, backend=None):
        return run(_prepare_post, x=x, h_out=h_out, h_post=h_post, h_res=h_res, backend=backend)

`_prepare_post` checks, chooses a backend and returns a Request, or the reference's result. A Request names an op with
its tensors; a Call (core/op.py) is the same without them; a KeptCall also knows which of the public function's tensors
the op takes. Eager calls with like arguments (shapes, strides, types, devices, numbers, chosen backend) find the
KeptCall of an earlier one. Its checks hold for them too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from . import backend as backends
from . import native, private
from .alike import KINDS, calls, find_call, keep
from .modes import is_plain, watched
from .op import Call, Op


class Request(NamedTuple):
    """returns: the output or outputs that the public function returns, in order; None stands for a missing one."""

    op: Op
    backend: str
    inputs: dict[str, Any]
    returns: str | tuple[str | None, ...]


class KeptCall(NamedTuple):
    """A Call, and how the public function's tensors and results map to it."""

    call: Call
    taken: list[int] | None  # None: all, in this order
    copied: list[tuple[int, str]]  # place and name of each tensor that is copied first
    single: bool  # one tensor is returned, not a tuple
    missing: list[int]  # places of the returned tuple that hold None

    def __call__(self, tensors: list[Tensor]) -> Any:
        if self.taken is not None:
            tensors = [tensors[i] for i in self.taken]
        for place, name in self.copied:
            tensors[place] = self.call.op.taken(name, tensors[place])
        results = self.call(tensors)
        if self.single:
            return results[0]
        if self.missing:
            results = list(results)
            for place in self.missing:
                results.insert(place, None)  # type: ignore[arg-type]
        return tuple(results)


def run(prepare: Callable[..., Any], **arguments: Any) -> Any:
    """Calls prepare(**arguments) and carries out its Request."""
    if not private.keeps_calls or watched() or private.in_forward_mode():
        return answer(prepare(**arguments))
    find = find_call if native.code is None else native.code.find_call
    found = find(calls, prepare, backends.chosen_by_caller(), arguments, KINDS)
    if found is None:
        return answer(prepare(**arguments))
    kept, tensors, key = found
    return first_call(prepare(**arguments), tensors, key) if kept is None else kept(tensors)


def answer(prepared: Any) -> Any:
    """Carries out a Request without keeping anything."""
    if not isinstance(prepared, Request):
        return prepared
    outputs = prepared.op(backend=prepared.backend, **prepared.op.laid_out(prepared.inputs))
    if isinstance(prepared.returns, str):
        return getattr(outputs, prepared.returns)
    return tuple([None if name is None else getattr(outputs, name) for name in prepared.returns])


def first_call(prepared: Any, tensors: list[Tensor], key: tuple[Any, ...]) -> Any:
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    if not isinstance(prepared, Request) or len(places) < len(tensors) or not all(map(is_plain, tensors)):
        return answer(prepared)  # one tensor passed twice is not kept either: the next call may pass two
    single = isinstance(prepared.returns, str)
    places_of = (prepared.returns,) if isinstance(prepared.returns, str) else prepared.returns
    returns = tuple(name for name in places_of if name is not None)
    missing = [place for place, name in enumerate(places_of) if name is None]
    laid_out = prepared.op.laid_out(prepared.inputs)
    names = [name for name, value in laid_out.items() if isinstance(value, Tensor)]
    taken = [places[id(prepared.inputs[name])] for name in names]
    copied = [(place, name) for place, name in enumerate(names) if laid_out[name] is not prepared.inputs[name]]
    call = Call(prepared.op, prepared.backend, prepared.inputs, returns, repeated=True)
    kept = KeptCall(call, None if taken == list(range(len(tensors))) else taken, copied, single, missing)
    keep(key, tensors, kept)
    return kept(tensors)


def kept_calls() -> list[KeptCall]:
    return [found for alike in calls.values() for _, found in alike if isinstance(found, KeptCall)]


def forget() -> None:
    """Drops all kept calls. Tests that change configs do."""
    calls.clear()
