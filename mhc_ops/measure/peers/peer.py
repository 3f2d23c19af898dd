"""What a peer is, how it is loaded, and how it is checked before it is timed.

Nothing of a peer is imported before it is asked to prepare a subject.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .. import accuracy
from ..cases import Tensors
from ..conv_cases import AnyCase

SINKHORN_ITERS = 20
POST_MULT = 2.0
EPS = 1e-6

# The same function is one that is off by no more than five roundings in a row, in norm: a projection, its sums, two
# maps and the stored result. A transposed or missing term is off by far more.
ROUNDINGS = 5
TF32_ROUNDING = 2**-11
TENSOR_CORES = ROUNDINGS * TF32_ROUNDING  # what fp32 tensors are held to where tensor cores round them to tf32
NO_TENSOR_CORES = accuracy.NORM_TOLERANCE[torch.float32]

WITH_GRADIENTS = " with gradients"
Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Prepared:
    """A subject as a peer computes it: `call(**tensors)` returns our outputs, in our order and meaning.

    tensors: the peer's own leaves, converted once from ours; their gradients come in the peer's layout and type.
    call: differentiable with the peer's backward, given contiguous cotangents for every output, in the order of the
          outputs; a backward may overwrite the cotangent of x_next. Of mhc_layer, h_out may be the layer itself.
    same: the leaves that hold a tensor of ours as it is: their gradients can be compared. Their name -> our name.
    """

    tensors: Tensors
    call: Callable[..., tuple[Tensor, ...]]
    same: Mapping[str, str]


@dataclass(frozen=True)
class Peer:
    """A library with such operators of its own.

    package: its distribution's name on PyPI
    precision: what it computes in, where that is less than fp32
    fp32_tolerance: what its results are held to where tensors are fp32
    load: its module with the functions used here; RuntimeError where it is not installed or does not import
    prepare: (subject, our tensors with the tokens in one dimension) -> None where the peer lacks that op or cannot take
             these sizes and types; RuntimeError where it is not installed or does not import
    """

    name: str
    package: str
    precision: str
    fp32_tolerance: float
    load: Callable[[], ModuleType]
    prepare: Callable[[str, Tensors], Prepared | None]

    def tolerance(self, dtype: torch.dtype) -> float:
        """In norm, for an op on tensors of this type."""
        return ROUNDINGS * accuracy.ROUNDING[dtype] if dtype in accuracy.ROUNDING else self.fp32_tolerance


def version(peer: Peer) -> str | None:
    """Of the installed distribution, or None."""
    try:
        return importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def why_not(peer: Peer) -> str | None:
    """Why it cannot run here, or None."""
    try:
        peer.load()
    except RuntimeError as error:
        return str(error)
    return None


def load_module(module: str, peer: Peer) -> ModuleType:
    if version(peer) is None:
        raise RuntimeError(f"{peer.name} is not installed: pip install {peer.package}")
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise RuntimeError(f"{peer.name} {version(peer)} does not import here: {error}") from error


def measure(peer: Peer, case: AnyCase, device: torch.device | str = "cpu") -> list[accuracy.Row] | None:
    """How far its outputs and the gradients of tensors it lays out as we do are from fp64; None where it lacks the op.

    Judged at its own precision, with and without gradients: some peers run other kernels where none is asked for.
    """
    subject, ours = case.subject, case.inputs(device)
    prepared = peer.prepare(subject.name, ours)
    if prepared is None:
        return None

    def copies() -> Tensors:
        return {name: t.clone() if name in subject.mutated else t.detach() for name, t in prepared.tensors.items()}

    with torch.no_grad():
        plain = prepared.call(**copies())
    results = dict(zip(subject.outputs, plain))
    cotangents = accuracy.random_cotangents(subject, results, case.seed)
    exact = accuracy.truth(subject, ours, cotangents, results)
    if subject.differentiable:  # the truth is there before a backward may overwrite a cotangent
        leaves = {name: t.requires_grad_(t.is_floating_point()) for name, t in copies().items()}
        outputs = prepared.call(**leaves)
        wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        gradients = dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), cotangents)))
        results |= {f"{name}{WITH_GRADIENTS}": output for name, output in zip(subject.outputs, outputs)}
        for theirs, name in prepared.same.items():
            if theirs in gradients:
                results[f"d{name}"] = gradients[theirs].view_as(ours[name])
    tolerance = peer.tolerance(next(iter(ours.values())).dtype)
    return [
        accuracy.judge(case, peer.name, name, result.detach(), exact[name.removesuffix(WITH_GRADIENTS)], tolerance)
        for name, result in results.items()
    ]
