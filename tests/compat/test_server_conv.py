"""What servers call of the convolution, in the forms of vLLM and SGLang, one sequence at a time in fp64."""

import re
from functools import partial

import pytest
import torch
from server_adapters import assert_rounded, draw, filtered, ints, window

from mhc_ops.compat import vllm
from mhc_ops.compat.sglang import conv as sglang

D = 24


def vllm_prefill(x, *own, states, bounds, slots, goes_on):
    return vllm.causal_conv1d_fn(x, *own, states, bounds, slots, goes_on, metadata=object())


def sglang_prefill(x, *own, states, bounds, slots, goes_on):
    return sglang.causal_conv1d_fn(x, *own, states, bounds, None, slots, goes_on, block_table=ints(0, -1)[None])


def sglang_cuda_prefill(x, *own, states, bounds, slots, goes_on):
    return sglang.causal_conv1d_fn_cuda(x, *own, bounds, slots, goes_on, conv_states=states, seq_lens_cpu=[4, 2, 3])


PREFILLS = [(vllm_prefill, 0, torch.bfloat16), (vllm_prefill, 0, torch.float32)]
PREFILLS += [(function, -1, torch.bfloat16) for function in (sglang_prefill, sglang_cuda_prefill)]


@pytest.mark.parametrize(("function", "null", "x_type"), PREFILLS)
def test_prefill_in_chunks(function, null, x_type, each_backend):
    """Three sequences in two chunks, one of them shorter than the state, and a null slot; a longer buffer, turned. The
    second sequence begins again, and a last row is padding."""
    weight, bias, normal = draw(D)
    whole = [normal(length, D) for length in (9, 3, 6)]
    conv_states = normal(6, 5, D).transpose(1, 2)
    before, slots = conv_states.clone(), (4, 2, 5)
    for begins, ends in (((0, 0, 0), (7, 2, 1)), ((7, 0, 1), (9, 3, 6))):
        chunks = [tokens[first:last] for tokens, first, last in zip(whole, begins, ends)]
        chunks.insert(1, normal(4, D))  # of the null slot
        lengths = [*map(len, chunks)]
        y = function(
            torch.cat([*chunks, normal(1, D)]).to(x_type).T,
            weight,
            bias,
            states=conv_states,
            bounds=torch.tensor([0, *lengths]).cumsum(0).int(),
            slots=ints(slots[0], null, *slots[1:], 3),  # one more than there are sequences
            goes_on=torch.tensor([begins[0] > 0, True, *(begin > 0 for begin in begins[1:])]),
        )
        assert y.dtype == x_type and y.shape == (D, sum(lengths) + 1)
        first, skipped, *rest, padding = y.T.split([*lengths, 1])
        assert not skipped.any() and not padding.any()
        for rows, tokens, slot, begin, end in zip((first, *rest), whole, slots, begins, ends, strict=True):
            assert_rounded(rows, filtered(tokens, weight, bias)[begin:end])
            assert torch.equal(conv_states[slot, :, :3], window(tokens[:end], 4))
    assert torch.equal(conv_states[..., 3:], before[..., 3:])
    assert torch.equal(conv_states[[0, 1, 3]], before[[0, 1, 3]])


def test_prefill_of_a_batch_and_without_states(each_backend):
    weight, bias, normal = draw(D)
    x, states = normal(2, D, 5), normal(2, D, 3)
    of_states = {"has_initial_state": torch.zeros(2, dtype=torch.bool), "conv_states": states}
    for given in (of_states, {}):
        y = sglang.causal_conv1d_fn_cuda(x, weight, bias, **given)
        for rows, tokens in zip(y.mT, x.mT):
            assert_rounded(rows, filtered(tokens, weight, bias))
    assert torch.equal(states, x[..., 2:])


def test_prefix_cache(each_backend):
    """States at the block boundaries, with a chunk that is shorter than the state: the block it reads stays."""
    weight, bias, normal = draw(D)
    whole, states = normal(12, D), normal(9, D, 3)
    for begin, end, first, last in ((0, 7, 0, 1), (7, 8, 1, 1), (8, 10, 2, 2), (10, 12, 2, 2)):
        slots = {"cache_indices": ints(3, 5, 7, 1)[None], "has_initial_state": torch.tensor([begin > 0])}
        slots |= {"block_idx_first_scheduled_token": ints(first), "block_idx_last_scheduled_token": ints(last)}
        slots |= {"initial_state_idx": ints(max(begin - 1, 0) // 4), "num_computed_tokens": ints(begin)}
        slots |= {"block_size_to_align": 4}
        y = vllm.causal_conv1d_fn(whole[begin:end].T, weight, bias, states, ints(0, end - begin), **slots)
        assert_rounded(y.T, filtered(whole, weight, bias)[begin:end])
    for block, slot in enumerate((3, 5, 7)):
        assert torch.equal(states[slot], window(whole[: 4 * block + 4], 4))


STEPS = [(vllm.causal_conv1d_update, 0, form) for form in ("rows", "tokens", "packed", "no slots")]
STEPS += [(sglang.causal_conv1d_update_cuda, -1, form) for form in ("rows", "tokens")]


@pytest.mark.parametrize(("function", "null", "form"), STEPS)
def test_decoding(function, null, form, each_backend):
    """y takes the place of x, and a null slot leaves both as they are. Without slots, sequence i has slot i."""
    weight, bias, normal = draw(D)
    T = 2 if form in ("tokens", "packed") else 1
    whole, states = [normal(5 + T, D) for _ in range(3)], normal(5, 6, D).transpose(1, 2)
    slots = {0: 0, 1: 1, 2: 2} if form == "no slots" else {0: 3, 2: 1}  # of each sequence
    for i, slot in slots.items():
        states[slot, :, :3] = window(whole[i][:5], 4)
    before, x = states.clone(), torch.stack([tokens[5:] for tokens in whole])  # [3, T, D]
    given = x.transpose(1, 2) if form == "tokens" else x.flatten(0, 1)
    more = {} if form == "no slots" else {"conv_state_indices": ints(3, null, 1)}
    if form == "packed":
        more |= {"query_start_loc": ints(0, 2, 4, 6, 6), "max_query_len": 2}
    assert function(given, states, weight, bias, True if null == 0 else "silu", **more) is given
    for i, tokens in enumerate(whole):
        if i in slots:
            assert_rounded(x[i], filtered(tokens, weight, bias)[5:])
            assert torch.equal(states[slots[i], :, :3], window(tokens, 4))
        else:
            assert torch.equal(x[i], tokens[5:])
    others = [slot for slot in range(5) if slot not in slots.values()]
    assert torch.equal(states[others], before[others]) and torch.equal(states[..., 3:], before[..., 3:])


def test_decoding_writes_to_out_and_converts(each_backend):
    weight, bias, normal = draw(D)
    x, state, slots = normal(2, D).float(), normal(3, D, 3), {"conv_state_indices": ints(2, 1)}
    states = [state.clone() for _ in range(3)]
    out, kept = torch.empty_like(x), x.clone()
    y = vllm.causal_conv1d_update(x.bfloat16(), states[0], weight, bias, **slots)
    assert torch.equal(vllm.causal_conv1d_update(x, states[1], weight, bias, **slots), y.float())
    assert vllm.causal_conv1d_update(x, states[2], weight, bias, **slots, out=out) is out
    assert torch.equal(out, y.float()) and torch.equal(x, kept)
    for out, message in (
        (x.new_empty(3, 2, D), "out must be [2, 24], got [3, 2, 24]"),
        (x.new_empty(1, D).expand(2, D), "out must have memory of its own for each element"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            vllm.causal_conv1d_update(x, states[2], weight, bias, **slots, out=out)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])  # checked before the state changes


def test_a_ring_buffer(each_backend):
    """SGLang's CUDA form with cache_seqlens: y takes the place of x, and padding of each kind stays."""
    weight, bias, normal = draw(D)
    whole, rings = normal(7, D), normal(6, D, 4)
    exact = filtered(whole, weight, bias, silu=False)
    for t in range(6):
        y = sglang.causal_conv1d_update_cuda(whole[t : t + 1].clone(), rings[:1], weight, bias, None, ints(t))
        if t > 2:
            assert_rounded(y[0], exact[t])
    x, before = torch.cat([whole[6:], normal(4, D)]), rings.clone()
    kept, lengths, slots = x.clone(), ints(6, 6, 6, 6, -1), ints(0, -1, 5, 6, 0)
    y = sglang.causal_conv1d_update_cuda(x, rings, weight, bias, None, lengths, slots, pad_slot_id=5)
    assert y is x and torch.equal(x[1:], kept[1:]) and torch.equal(rings[1:], before[1:])
    assert_rounded(x[0], exact[6])


@pytest.mark.parametrize("server", [vllm, sglang], ids=["vllm", "sglang"])
def test_speculation(server, each_backend):
    """Drafts of which 1, 3 and 2 are accepted, then in vLLM a step in other slots than those that were read."""
    weight, bias, normal = draw(D)
    true, states, at, accepted = normal(20, D), normal(4, D, 5), 6, ints(1)
    exact, name = filtered(true, weight, bias), "num_accepted_tokens" if server is vllm else "num_accept_tokens"
    states[2, :, :3] = window(true[:at], 4)
    for kept in (1, 3, 2):
        drafts = torch.cat([true[at : at + kept], normal(3 - kept, D)])
        given = {"conv_state_indices": ints(2), name: accepted}
        y = server.causal_conv1d_update(drafts.T[None].clone(), states, weight, bias, "silu", **given)
        assert_rounded(y[0].T, filtered(torch.cat([true[:at], drafts]), weight, bias)[at:])
        at, accepted = at + kept, ints(kept)
    if server is vllm:
        before, slots = states.clone(), {"conv_state_indices": ints(2, 1, 3)[None], name: accepted}
        columns = {"initial_state_idx": ints(0), "block_idx_last_scheduled_token": ints(2)}
        y = vllm.causal_conv1d_update(true[at : at + 1].clone(), states, weight, bias, "silu", **slots, **columns)
        assert_rounded(y, exact[at : at + 1])
        assert torch.equal(states[3, :, :3], window(true[: at + 1], 4)) and torch.equal(states[:3], before[:3])


@pytest.mark.parametrize("tree", [False, True])
def test_verification(tree, each_backend):
    """The window after each draft token, along its parents if the drafts are a tree:
    0 has the children 1 and 2, and 2 the child 3."""
    weight, bias, normal = draw(D)
    before, drafts, states, windows = normal(2, 5, D), normal(2, 4, D), normal(4, D, 3), normal(5, 4, D, 3)
    for slot, tokens in zip((1, 3), before):
        states[slot] = window(tokens, 4)
    kept, parents = states.clone(), torch.full((2, 6), -7)
    given = {"intermediate_conv_window": windows, "intermediate_state_indices": ints(4, 0)}
    if tree:
        given["retrieve_next_token"] = torch.tensor([[1, -1, 3, -1, -1, -1]] * 2)
        given["retrieve_next_sibling"] = torch.tensor([[-1, 2, -1, -1, -1, -1]] * 2)
        given["retrieve_parent_token"] = parents
    slots = {"conv_state_indices": ints(1, 3)}
    y = sglang.causal_conv1d_update(drafts.transpose(1, 2), states, weight, bias, "silu", **slots, **given)
    paths = [[0], [0, 1], [0, 2], [0, 2, 3]] if tree else [list(range(t + 1)) for t in range(4)]
    for i, line in ((0, 4), (1, 0)):
        for t, path in enumerate(paths):
            inputs = torch.cat([before[i], drafts[i][path]])
            assert_rounded(y[i, :, t], filtered(inputs, weight, bias)[-1])
            assert torch.equal(windows[line, t], window(inputs, 4))
    if tree:
        assert parents.tolist() == [[0, 0, 0, 2, -7, -7]] * 2 and torch.equal(states, kept)
    else:
        assert torch.equal(states[3], drafts[1, 1:].T)


def test_parents_of_random_trees():
    """Against the rule, one token after the other."""
    generator = torch.Generator().manual_seed(0)
    for T in (1, 2, 5, 16, 33):
        parents = torch.tensor([[0, *(int(torch.randint(t, (), generator=generator)) for t in range(1, T))]])
        child, sibling, last = torch.full((1, T), -1), torch.full((1, T), -1), {}
        for t in range(1, T):
            parent = int(parents[0, t])
            (sibling if parent in last else child)[0, last.get(parent, parent)] = t
            last[parent] = t
        assert torch.equal(sglang.parents_in(child, sibling), parents)


def test_wrong_use():
    weight, bias, normal = draw(D)
    x, drafts, states, slots = normal(2, D), normal(2, D, 3), normal(4, D, 4), {"conv_state_indices": ints(1, 2)}
    step, prefill = partial(vllm.causal_conv1d_update, weight=weight), partial(vllm.causal_conv1d_fn, weight=weight)
    steps, fn_cuda = partial(sglang.causal_conv1d_update, x, states, weight), sglang.causal_conv1d_fn_cuda
    bounds, goes_on = {"query_start_loc": ints(0, 2)}, {"has_initial_state": torch.ones(1).bool()}
    cache = {"bias": bias, "conv_states": states, "cache_indices": ints(1)[None], **bounds}
    blocks = {"block_idx_first_scheduled_token": ints(0), "block_size_to_align": 8}
    tree, siblings, parents = "retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"
    accepted, token, length = {"num_accepted_tokens": ints(1, 1)}, ints(0, 0)[:, None], "with length at least 5 for 3"
    for message, use in {
        f"conv_state must be [slots, 24, length] {length} tokens": partial(step, drafts, states, **slots, **accepted),
        "query_start_loc needs conv_state_indices, got None": partial(step, x, states, **bounds),
        "max_seqlen must be at least 1, got -1": partial(step, x, states, **slots, **bounds),
        "x must be [tokens, D], got [2, 24, 3]": partial(prefill, drafts, **cache),
        "block_size must be given together, got no tokens_before": partial(prefill, x.T, **cache, **blocks),
        "cache_seqlens must be None": partial(steps, cache_seqlens=ints(1, 1)),
        "has_initial_state needs conv_states, got None": partial(fn_cuda, x.T, weight, **bounds, **goes_on),
        "needs retrieve_next_sibling and x": partial(steps, **{tree: token}),
        f"causal_conv1d_update: {siblings} needs {tree}, got None": partial(steps, **{siblings: token}),
        f"causal_conv1d_update: {parents} needs {tree}, got None": partial(steps, **{parents: token}),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            use()
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        fn_cuda(x.T, weight, scale=2)
