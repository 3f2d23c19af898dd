"""What every backend of the convolution promises: bits, NaN, states, layouts, empty tensors, decoding."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from conv_oracle import IDS, RETURNS, WITH_IDS, Looping, assert_accurate

import mhc_ops
from mhc_ops.testing import accuracy, fuzz
from mhc_ops.testing.cases import LAYOUTS, laid_out
from mhc_ops.testing.conv_cases import ConvCase

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TYPES = (fp32, fp16, bf16)
NAN = float("nan")


def skip_unless_there(case, backend):
    if not case.runs_on(backend):
        pytest.skip(f"the {backend} backend does not have it")


@pytest.mark.parametrize("places", ["states", "seq_idx", "cu_seqlens states"])
def test_a_sequence_has_the_same_bits_in_any_batch(places, anywhere):
    """Packed, with others in a batch, and in two pieces: outputs and gradients of all but the parameters."""
    backend, device = anywhere
    case = ConvCase(1 if "cu" in places else 3, 12, 13, places=places, residual=backend != "hip", dtype=fp32)
    skip_unless_there(case, backend)
    of_other_configs = [replace(case, B=300, D=64)] * (device == "cuda" and case.B > 1)
    for each in (case, *of_other_configs):
        assert fuzz.in_any_batch(each, backend, torch.device(device)) == [], each


@pytest.mark.parametrize("dilation", [1, 3])
def test_pieces_have_the_bits_of_the_whole(dilation, anywhere):
    """On a CPU, torch takes the last few elements of a call in another way: D, types and SiLU differ."""
    backend, device = anywhere
    variants = product((bf16, fp32, fp64), (1, 7, 65), (False, True)) if backend == "reference" else [(bf16, 20, True)]
    for dtype, D, silu in variants:
        case = ConvCase(2, 37, D, dilation=dilation, silu=silu, dtype=dtype, places="states")
        skip_unless_there(case, backend)
        tensors, pieces = case.inputs(device), []
        whole, state = case.subject.run(tensors, backend), tensors["initial_state"]
        for x in tensors["x"].split([1, 0, 17, 2, 16, 1], 1):
            y, state = case.subject.run(tensors | {"x": x, "initial_state": state}, backend).values()
            pieces.append(y)
        assert torch.equal(torch.cat(pieces, 1), whole["y"]) and torch.equal(state, whole["final_state"])


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("places", ["seq_idx", "seq_idx states", "cu_seqlens states"])
def test_nan_stays_where_it_is(places, silu, anywhere):
    """In any input or cotangent: of padding it changes nothing, of a sequence no other one. Padding gives 0."""
    backend, device = anywhere
    case = ConvCase(1, 20, 8, silu=silu, places=places, residual=backend != "hip", dtype=fp32)
    skip_unless_there(case, backend)
    tensors = case.inputs(device)
    if packed := "cu_seqlens" in places:
        tensors["cu_seqlens"][0] = 3
        own = torch.searchsorted(tensors["cu_seqlens"], torch.arange(case.L, device=device), right=True) - 1
        own[own == len(tensors["cu_seqlens"]) - 1] = -1
    else:
        own = tensors["seq_idx"][0]
    cotangents = accuracy.random_cotangents(case.subject, case.subject.run(tensors, backend))
    clean = accuracy.run(case.subject, tensors, backend, cotangents)
    rows = ["y", "dx", *["dresidual"] * case.residual]
    for bad in own.unique().tolist():
        there, given = own == bad, {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in (given["x"], given.get("residual"), dy := cotangents[0].clone()):
            if tensor is not None:
                tensor[:, there] = NAN
        states = [bad if packed else 0] * (bad >= 0 and (packed or bad == int(own[0])))
        if "initial_state" in given:
            given["initial_state"][states] = NAN
        found = accuracy.run(case.subject, given, backend, [dy, *cotangents[1:]])
        if bad < 0:
            assert all(torch.equal(found[name], clean[name]) for name in found)
            assert not any(found[name][:, there].any() for name in rows)
        assert all(torch.equal(found[name][:, ~there], clean[name][:, ~there]) for name in rows)
        if packed:
            others = [i for i in range(len(tensors["initial_state"])) if i not in states]
            assert all(torch.equal(found[name][others], clean[name][others]) for name in found if "state" in name)
        assert bad < 0 or found["y"][:, there].isnan().all()
    assert clean["dx"][:, own >= 0].all(), "what is no padding has gradients"


@pytest.mark.parametrize("W", [2, 4, 5])
def test_seq_idx_with_a_state(W, anywhere):
    """The state belongs to the sequence of token 0, wherever that goes on; where token 0 is padding, to none."""
    for dtype in TYPES:
        types = {"dtype": dtype, "parameter_dtype": dtype}
        case = Looping(W=W, ids=(RETURNS[0], IDS[1]), places=WITH_IDS, **types)
        skip_unless_there(case, anywhere[0])
        assert_accurate(case, *anywhere)


def test_any_layout_and_nothing_is_modified(anywhere):
    backend, device = anywhere
    case = ConvCase(2, 20, 24, places="states", residual=backend != "hip")
    for layout in LAYOUTS:
        assert_accurate(replace(case, layout=layout), backend, device)
        if backend == "reference":
            assert_accurate(ConvCase(2, 5, 8, n=2, residual=True, layout=layout), backend, device)
    ran = accuracy.run_case(case, backend, device)
    before = {name: tensor.clone() for name, tensor in ran.tensors.items()}
    cotangents = [ran.cotangents[0][:1, :1].expand_as(ran.cotangents[0]), ran.cotangents[1]]
    dx = accuracy.run(case.subject, ran.tensors, backend, [c.contiguous() for c in cotangents])["dx"]
    layouts = [laid_out("x", ran.tensors["x"], layout) for layout in ("sliced", "strided", "transposed")]
    for x in (*layouts, ran.tensors["x"].transpose(0, 1).contiguous().transpose(0, 1)):
        found = accuracy.run(case.subject, ran.tensors | {"x": x}, backend, cotangents)
        assert all(torch.equal(found[name], ran.results[name]) for name in case.subject.outputs)
        assert torch.equal(found["dx"], dx)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ran.tensors.items())
    assert ran.results["final_state"].stride(1) == 1, "a state has its channels side by side"


def derivatives(function, z, order):
    leaf = z.clone().requires_grad_()
    found = [function(leaf)]
    for k in range(order):
        found += torch.autograd.grad(found[-1], leaf, torch.ones_like(leaf), create_graph=k < order - 1)
    return [one.detach().double() for one in found]


def test_silu_of_any_number(where):
    """Where z is as large as its type allows: 1 or 0, never 0·inf. The reference is differentiated twice."""
    backend, device = where
    for dtype in (bf16, fp32, *[fp64] * (backend == "reference")):
        eps, sizes = torch.finfo(dtype).eps, (0, 1e-30, 1, 20, 88, 100, 1000, 1e4, 1e8, 1e30, torch.finfo(dtype).max)
        z = torch.tensor([sign * size for sign in (-1.0, 1.0) for size in sizes], dtype=dtype, device=device)
        one, options = torch.ones_like(z), {"activation": "silu", "backend": backend}
        old = torch.stack([one, 0 * one], -1)  # a filter of the input before

        def by_x(z, weight=one[:, None], options=options):
            return mhc_ops.causal_conv1d(z[None, None], weight, **options)[0, 0]

        def by_state(z, x=0 * one[None, None], weight=old, options=options):
            return mhc_ops.causal_conv1d(x, weight, initial_state=z[None, :, None], **options)[0, 0]

        def by_weight(z, x=one[None, None, None], gamma=one[None]):
            return mhc_ops.short_conv(x, gamma, z[:, None], residual=False, norm_eps=0.0, backend=backend)[0, 0, 0]

        order = 1 + (backend == "reference")
        exact = derivatives(torch.nn.functional.silu, z.double(), order)
        for silu, least in ((by_x, 1e-12), (by_state, 1e-12), (by_weight, 1e-6)):
            for k, found in enumerate(derivatives(silu, z, order)):
                if k < 2:
                    torch.testing.assert_close(found, exact[k], rtol=max(least, 2 ** (k + 1) * eps), atol=1e-36)
                else:
                    torch.testing.assert_close(found.to(dtype), exact[k].to(dtype))


@pytest.mark.parametrize("case", [ConvCase(2, 9, 24), ConvCase(2, 9, 8, n=3)], ids=["conv", "short_conv"])
def test_compiled(case, where, cxx):
    """One graph, forward and backward, and no second graph for other sizes."""
    backend, device = where
    torch.compiler.reset()
    compiled = torch.compile(case.subject.call, fullgraph=True, backend="aot_eager", dynamic=True)
    for stance, B, L in (("default", 2, 9), ("fail_on_recompile", 3, 14), ("fail_on_recompile", 2, 7)):
        sized = replace(case, B=B, L=L, dtype=fp32)
        ran = accuracy.run_case(sized, backend, device)
        with torch.compiler.set_stance(stance):
            found = accuracy.run(replace(case.subject, call=compiled), ran.tensors, backend, ran.cotangents)
        assert torch.equal(found["y"], ran.results["y"])
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, ran.results[name])


def test_nothing_to_do(anywhere):
    for sizes in ((0, 5, 8), (2, 0, 8), (2, 5, 0)):
        ran = accuracy.run_case(ConvCase(*sizes, places="states"), *anywhere)
        assert ran.results["y"].shape == sizes and not any(ran.results[name].any() for name in ("dweight", "dbias"))
        if sizes[1] == 0:
            assert torch.equal(ran.results["final_state"], ran.tensors["initial_state"])
            assert torch.equal(ran.results["dinitial_state"], ran.cotangents[1])
        if anywhere[0] != "hip" and sizes[-1]:
            ran = accuracy.run_case(ConvCase(*sizes, n=2), *anywhere)
            assert ran.results["y"].shape == ran.tensors["x"].shape and not ran.results["dweight"].any()


# T (None: [B, D]), a ring, slots, how much longer the state is than it must be, dilation, W
UPDATES = [
    (None, False, False, 0, 1, 4), (None, True, False, 0, 1, 4), (None, True, True, 3, 2, 3),
    (None, False, False, 2, 1, 1), (1, False, True, 2, 1, 4), (2, False, False, 0, 3, 2), (3, True, False, 0, 1, 4),
    (4, False, False, 1, 1, 3), (4, True, True, 1, 2, 3), (6, True, True, 1, 1, 3),
]  # fmt: skip


@pytest.mark.parametrize(("T", "ring", "with_slots", "extra", "dilation", "W"), UPDATES)
def test_update_is_the_whole_sequence(T, ring, with_slots, extra, dilation, W, where):
    """y and the final state have the bits of the whole sequence, also for more tokens than the state is long."""
    backend, device = where
    B, L, D, length = 3, 12, 7, (W - 1) * dilation + extra
    slots = torch.tensor([4, 0, 2], dtype=torch.int32, device=device) if with_slots else None
    used = torch.arange(B, device=device) if slots is None else slots.long()
    for dtype in (bf16, fp32):
        filters = ConvCase(B, L, D, W, dtype).inputs(device) | {"activation": "silu", "dilation": dilation}
        x, filters["backend"] = filters.pop("x"), backend
        state = torch.full((5 if with_slots else B, D, length), NAN, dtype=dtype, device=device)
        state[used] = 0
        update = partial(mhc_ops.causal_conv1d_update, conv_state=state, conv_state_indices=slots, **filters)
        tokens = []
        for t in range(0, L, T or 1):
            lengths = torch.full((B,), t, dtype=torch.int32, device=device) if ring else None
            y = update(x[:, t] if T is None else x[:, t : t + T], cache_seqlens=lengths)
            tokens.append(y[:, None] if T is None else y)
        assert torch.equal(torch.cat(tokens, 1), mhc_ops.causal_conv1d(x, **filters))
        newest = torch.cat([x.new_zeros(B, length, D), x], 1)[:, L:]
        if ring:  # time t is at t modulo length
            newest = newest[:, [(p - L) % length for p in range(length)]]
        assert torch.equal(state[used], newest.mT)
        assert state[[slot for slot in range(len(state)) if slot not in used]].isnan().all()
