"""What servers call of the convolution, in the forms of vLLM and SGLang, one sequence at a time in fp64."""

from functools import partial

import pytest
import torch
from server_adapters import draw, ints, window

import mhc_ops
from mhc_ops.compat import vllm
from mhc_ops.compat.sglang import conv as sglang

D = 24


def filtered(tokens, weight, bias, activation="silu"):
    """By the name of mhc_ops, which tests/conv holds to fp64."""
    return mhc_ops.causal_conv1d(tokens[None], weight, bias, activation=activation)[0]


# Of x, weight, bias, states, bounds, slots, and which sequences go on
PREFILLS = {
    "vllm": lambda *given: vllm.causal_conv1d_fn(*given, metadata=object()),
    "sglang": lambda *given: sglang.causal_conv1d_fn(*given[:5], None, *given[5:], block_table=ints(0, -1)[None]),
    "sglang's CUDA": lambda *given: sglang.causal_conv1d_fn_cuda(
        *given[:3], *given[4:], conv_states=given[3], seq_lens_cpu=[4, 2, 3]
    ),
}


@pytest.mark.parametrize("x_type", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("server", PREFILLS)
def test_prefill(server, x_type, each_backend):
    """Four sequences, one of them with a null slot and one shorter than the state, and a row of padding; slots for one
    more; a longer buffer, turned. As with the names of mhc_ops."""
    weight, bias, normal = draw(D)
    x, states, bounds = normal(15, D), normal(6, 5, D).transpose(1, 2), ints(0, 7, 11, 13, 14)
    kept, goes_on, null = states.clone(), torch.tensor([True, True, False, True]), 0 if server == "vllm" else -1
    y = PREFILLS[server](x.to(x_type).T, weight, bias, states, bounds, ints(4, null, 2, 5, 3), goes_on)
    own = {"cu_seqlens": bounds, "has_initial_state": goes_on, "pad_slot_id": null, "activation": "silu"}
    own["conv_state_indices"] = ints(4, null, 2, 5)
    expected = mhc_ops.causal_conv1d_prefill(x, kept, weight, bias, **own)
    assert y.dtype == x_type and torch.equal(y.T.bfloat16(), expected)
    assert torch.equal(states, kept) and not expected[7:11].any()


def test_prefill_of_a_batch_and_without_states(each_backend):
    weight, bias, normal = draw(D)
    x, states = normal(2, D, 5), normal(2, D, 3)
    of_states = {"has_initial_state": torch.zeros(2, dtype=torch.bool), "conv_states": states}
    for given in (of_states, {}):
        y = sglang.causal_conv1d_fn_cuda(x, weight, bias, **given)
        for rows, tokens in zip(y.mT, x.mT):
            assert torch.equal(rows, filtered(tokens, weight, bias))
    assert torch.equal(states, x[..., 2:])


def test_prefix_cache(each_backend):
    """States at the block boundaries, with a chunk that is shorter than the state: the block it reads stays."""
    weight, bias, normal = draw(D)
    whole, states = normal(12, D), normal(9, D, 3)
    for begin, end, first, last in ((0, 2, 0, 0), (2, 7, 0, 1), (7, 8, 1, 1), (8, 10, 2, 2), (10, 12, 2, 2)):
        slots = {"cache_indices": ints(3, 5, 7, 1)[None], "has_initial_state": torch.tensor([begin > 0])}
        slots |= {"block_idx_first_scheduled_token": ints(first), "block_idx_last_scheduled_token": ints(last)}
        slots |= {"initial_state_idx": ints(max(begin - 1, 0) // 4), "num_computed_tokens": ints(begin)}
        slots |= {"block_size_to_align": 4}
        y = vllm.causal_conv1d_fn(whole[begin:end].T, weight, bias, states, ints(0, end - begin), **slots)
        assert torch.equal(y.T, filtered(whole, weight, bias)[begin:end])
    for block, slot in enumerate((3, 5, 7)):
        assert torch.equal(states[slot], window(whole[: 4 * block + 4], 4))


STEPS = [(vllm.causal_conv1d_update, 0, form) for form in ("rows", "tokens", "packed", "no slots")]
STEPS += [(sglang.causal_conv1d_update_cuda, -1, form) for form in ("rows", "tokens")]


@pytest.mark.parametrize(("function", "null", "form"), STEPS)
def test_decoding(function, null, form, each_backend):
    """As by mhc_ops. y takes the place of x; a null slot changes neither. Without slots, sequence i has slot i."""
    weight, bias, normal = draw(D)
    x, states = normal(3, 2 if form in ("tokens", "packed") else 1, D), normal(5, 6, D).transpose(1, 2)
    more = {} if form == "no slots" else {"conv_state_indices": ints(3, null, 1)}
    kept, own = states.clone(), more or {"conv_state_indices": ints(0, 1, 2)}
    options = {"activation": "silu", "pad_slot_id": null if more else -1, **own}
    expected = mhc_ops.causal_conv1d_update(x, kept[..., :3], weight, bias, **options)
    if more:
        expected[1] = x[1]
    if form == "packed":
        more |= {"query_start_loc": ints(0, 2, 4, 6, 6), "max_query_len": 2}
    given = x.transpose(1, 2) if form == "tokens" else x.flatten(0, 1)
    assert function(given, states, weight, bias, True if null == 0 else "silu", **more) is given
    assert torch.equal(x, expected) and torch.equal(states, kept)


def test_decoding_writes_to_out_and_converts(each_backend):
    weight, bias, normal = draw(D)
    x, state, slots = normal(2, D).float(), normal(3, D, 3), {"conv_state_indices": ints(2, 1)}
    states = [state.clone() for _ in range(3)]
    out, kept = torch.empty_like(x), x.clone()
    y = vllm.causal_conv1d_update(x.bfloat16(), states[0], weight, bias, **slots)
    assert torch.equal(vllm.causal_conv1d_update(x, states[1], weight, bias, **slots), y.float())
    assert vllm.causal_conv1d_update(x, states[2], weight, bias, **slots, out=out) is out
    assert torch.equal(out, y.float()) and torch.equal(x, kept)
    for out in (x.new_empty(3, 2, D), x.new_empty(1, D, dtype=torch.float64).expand(2, D)):
        with pytest.raises(ValueError, match=r"out must (be|have) "):
            vllm.causal_conv1d_update(x, states[2], weight, bias, **slots, out=out)
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])  # checked before the state changes


def test_a_ring_buffer(each_backend):
    """SGLang's CUDA form with cache_seqlens: y takes the place of x, and padding of each kind stays."""
    weight, bias, normal = draw(D)
    whole, rings = normal(7, D), normal(6, D, 4)
    rings[0] = whole[[4, 5, 2, 3]].T  # time t is at t modulo 4
    x, before = torch.cat([whole[6:], normal(4, D)]), rings.clone()
    kept, lengths, slots = x.clone(), ints(6, 6, 6, 6, -1), ints(0, -1, 5, 6, 0)
    y = sglang.causal_conv1d_update_cuda(x, rings, weight, bias, None, lengths, slots, pad_slot_id=5)
    assert y is x and torch.equal(x[1:], kept[1:]) and torch.equal(rings[1:], before[1:])
    assert torch.equal(x[0], filtered(whole, weight, bias, activation=None)[6])


@pytest.mark.parametrize("server", [vllm, sglang], ids=["vllm", "sglang"])
def test_speculation(server, each_backend):
    """As by mhc_ops: drafts of which 3 and 1 are accepted, in vLLM also in other slots than those that were read."""
    weight, bias, normal = draw(D)
    drafts, states, of_slots = normal(2, D, 3), normal(5, D, 5), {"conv_state_indices": ints(2, 1)}
    accepted = {"num_accepted_tokens" if server is vllm else "num_accept_tokens": ints(3, 1)}
    calls = [(of_slots, of_slots)]
    if server is vllm:
        table = {"conv_state_indices": ints(3, 4, 2, 1).view(2, 2)}
        columns = {"initial_state_idx": ints(0, 1), "block_idx_last_scheduled_token": ints(1, 0)}
        calls.append((table | columns, table | {"read_columns": ints(0, 1), "write_columns": ints(1, 0)}))
    for given, own in calls:
        found, kept, ours = states.clone(), states.clone(), {"num_accepted_tokens": ints(3, 1), **own}
        expected = mhc_ops.causal_conv1d_update(drafts.mT, kept, weight, bias, activation="silu", **ours)
        y = server.causal_conv1d_update(drafts.clone(), found, weight, bias, "silu", **given, **accepted)
        assert torch.equal(y.mT, expected) and torch.equal(found, kept) and not torch.equal(kept, states)


@pytest.mark.parametrize("tree", [False, True])
def test_verification(tree, each_backend):
    """As by mhc_ops: the window after each draft token. In the tree 0 has the children 1 and 2, and 2 the child 3."""
    weight, bias, normal = draw(D)
    drafts, states, windows, parents = normal(2, 4, D), normal(4, D, 3), normal(5, 4, D, 3), torch.full((2, 6), -7)
    own = {"windows": windows.clone(), "window_indices": ints(4, 0), "conv_state_indices": ints(1, 3)}
    own |= {"parents": ints(0, 0, 0, 2).expand(2, 4)} if tree else {}
    kept = states.clone()
    expected = mhc_ops.causal_conv1d_update(drafts, kept, weight, bias, activation="silu", **own)
    given = {"intermediate_conv_window": windows, "intermediate_state_indices": ints(4, 0)}
    if tree:
        given["retrieve_next_token"] = torch.tensor([[1, -1, 3, -1, -1, -1]] * 2)
        given["retrieve_next_sibling"] = torch.tensor([[-1, 2, -1, -1, -1, -1]] * 2)
        given["retrieve_parent_token"] = parents
    slots = {"conv_state_indices": ints(1, 3)}
    y = sglang.causal_conv1d_update(drafts.transpose(1, 2), states, weight, bias, "silu", **slots, **given)
    assert all(map(torch.equal, (y.mT, states, windows), (expected, kept, own["windows"])))
    assert not tree or parents.tolist() == [[0, 0, 0, 2, -7, -7]] * 2


def test_parents_of_random_trees():
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
    weight, _, normal = draw(D)
    x, states, bounds, token = normal(2, D), normal(4, D, 4), {"query_start_loc": ints(0, 2)}, ints(0, 0)[:, None]
    step, steps = (partial(server.causal_conv1d_update, x, states, weight) for server in (vllm, sglang))
    prefill = partial(sglang.causal_conv1d_fn_cuda, x.T, weight)
    for message, use in {
        "query_start_loc needs conv_state_indices": partial(step, **bounds),
        "cache_seqlens must be None": partial(steps, cache_seqlens=ints(1, 1)),
        "has_initial_state needs conv_states": partial(prefill, **bounds, has_initial_state=torch.ones(1).bool()),
        "needs retrieve_next_sibling": partial(steps, retrieve_next_token=token),
        "retrieve_next_sibling needs retrieve_next_token": partial(steps, retrieve_next_sibling=token),
        "retrieve_parent_token needs retrieve_next_token": partial(steps, retrieve_parent_token=token),
    }.items():
        with pytest.raises(ValueError, match=message):
            use()
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        prefill(scale=2)
