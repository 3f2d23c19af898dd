"""A tiny model has the same logits, bit for bit, in training and in a server: in chunks of prompts, token by token, and
where drafts are verified, in every batch.

Trained, it is a HyperStack of short convolutions on packed sequences. Served, it calls what vLLM calls. Its last layer
works on each element alone, because a matrix product of torch may add in another order in another batch."""

import random

import pytest
import torch
from torch import nn

import mhc_ops
from mhc_ops.compat import vllm

N, D, W, LAYERS, WORDS = 4, 24, 4, 2, 11
DRAFTS = 3
OPTIONS = (1e-6, 1e-6, 1e-6, 2.0, 20)  # HyperConnection's defaults, in vLLM's order
LENGTHS = (6, 2, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(*shape).bfloat16()) for shape in ((D, W), (D,)))

    def forward(self, h_in, cu_seqlens):
        return mhc_ops.causal_conv1d(h_in, self.weight, self.bias, activation="silu", cu_seqlens=cu_seqlens)


class Model(nn.Module):
    def __init__(self, shifted):
        super().__init__()
        torch.manual_seed(0)
        connections = [mhc_ops.HyperConnection(Block(), N, D, layer_norm=True) for _ in range(LAYERS)]
        self.stack, self.shifted = mhc_ops.HyperStack(*connections, shifted=shifted), shifted
        self.head = mhc_ops.HyperHead(N, D)
        self.words = nn.Parameter(torch.randn(WORDS, D).bfloat16())
        self.last = nn.Parameter(torch.randn(D).bfloat16())
        for parameters in (*self.stack, self.head):
            nn.init.normal_(parameters.phi, std=0.1)
            nn.init.normal_(parameters.alpha)

    def forward(self, words, cu_seqlens):
        x = self.stack(mhc_ops.mhc_expand(self.words[words][None], N), cu_seqlens)
        return (x if self.shifted else self.head(x))[0] * self.last


class Server:
    """The same parameters, with a cache of states by slot. A step takes some tokens of some sequences."""

    def __init__(self, model, device):
        self.model, self.device = model, device
        slots = len(LENGTHS) + 2
        self.conv = [torch.randn(slots, D, W - 2 + DRAFTS, device=device).bfloat16() for _ in range(LAYERS)]
        self.accepted = dict.fromkeys(range(len(LENGTHS)), 0)  # words of the last step; 0 before the first one

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def step(self, kind, batch):
        """batch: {sequence: its words}. The logits of each."""
        numbers, lengths = list(batch), [len(words) for words in batch.values()]
        words = torch.tensor([word for words in batch.values() for word in words], device=self.device)
        x, carry, h_out = mhc_ops.mhc_expand(self.model.words[words], N), None, None
        for number, connection in enumerate(self.model.stack):
            own = connection.phi, connection.alpha, connection.bias, *OPTIONS
            h_in, carry = self.next(own, connection.layer_norm_weight, x, carry, h_out)
            h_out = self.convolve(kind, self.conv[number], connection.layer, h_in, numbers, lengths)
        x, post, comb, read = carry
        x, head = vllm.mhc_post(h_out, x, post, comb), self.model.head
        shifted = self.model.shifted
        out = mhc_ops.mhc_read(x, read) if shifted else vllm.hc_head(x, head.phi, head.alpha, head.bias, 1e-6, 1e-6)
        return dict(zip(numbers, (out * self.model.last).split(lengths)))

    def next(self, own, weight, x, carry, h_out):
        """h_in of a sublayer, and (x, post, comb, pre)"""
        norm = {"norm_weight": weight, "norm_eps": 1e-6}
        if self.model.shifted:
            x, post, comb, read = (x, None, None, None) if carry is None else carry
            ended = {"sublayer_out": h_out, "post_layer_mix": post, "comb_res_mix": comb} if carry else {}
            x, post, comb, h_in, read = vllm.mhc_pre_delayed(x, *own, pre_mix=read, **norm, **ended)
            return h_in, (x, post, comb, read)
        if carry is None:
            post, comb, h_in = vllm.mhc_pre(x, *own, **norm)
        else:
            x, post, comb, h_in = vllm.mhc_fused_post_pre(h_out, *carry[:3], *own, **norm)
        return h_in, (x, post, comb, None)

    def convolve(self, kind, state, layer, h_in, numbers, lengths):
        slots, own = self.ints([i + 1 for i in numbers]), (layer.weight, layer.bias)  # slot 0 is null
        bounds = self.ints([0, *torch.tensor(lengths).cumsum(0).tolist()])
        if kind == "prefill":
            goes_on = torch.tensor([self.accepted[i] > 0 for i in numbers], device=self.device)
            return vllm.causal_conv1d_fn(h_in.T, *own, state, bounds, slots, goes_on).T
        if kind == "decode":
            return vllm.causal_conv1d_update(h_in, state, *own, "silu", slots)
        drafts = {"query_start_loc": bounds, "max_query_len": DRAFTS}
        accepted = self.ints([self.accepted[i] for i in numbers])
        return vllm.causal_conv1d_update(h_in, state, *own, "silu", slots, accepted, **drafts)


MOST = {"prefill": 4, "decode": 1, "drafts": DRAFTS}  # words of a sequence in one step


def served(server, kind, sequences, draw):
    """The logits of each word. A step has some of the sequences. Without prompts the first one is a prefill of a word
    of each. Drafts are right words and then wrong ones, whose logits are thrown away."""
    at = dict.fromkeys(sequences, 0)
    while left := [i for i, words in sequences.items() if at[i] < len(words)]:
        first, batch, right = kind != "prefill" and not any(at.values()), {}, {}
        for i in left if first else draw.sample(left, draw.randint(1, len(left))):
            right[i] = 1 if first else draw.randint(1, min(MOST[kind], len(sequences[i]) - at[i]))
            wrong = draw.randint(0, DRAFTS - right[i]) if kind == "drafts" and not first else 0
            batch[i] = sequences[i][at[i] : at[i] + right[i]] + [draw.randrange(WORDS) for _ in range(wrong)]
        for i, logits in server.step("prefill" if first else kind, batch).items():
            yield i, logits[: right[i]]
            at[i] += right[i]
            server.accepted[i] = right[i]


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize("shifted", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_logits(shifted, kind, kernel_device):
    draw = random.Random(0)
    sequences = {i: [draw.randrange(WORDS) for _ in range(length)] for i, length in enumerate(LENGTHS)}
    with mhc_ops.use_backend("triton"):
        model = Model(shifted).to(kernel_device)
        bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device=kernel_device)
        packed = torch.tensor([word for words in sequences.values() for word in words], device=kernel_device)
        trained = model(packed, bounds)
        assert trained.requires_grad
        with torch.no_grad():
            found = {i: [] for i in sequences}
            for i, logits in served(Server(model, kernel_device), kind, sequences, draw):
                found[i].append(logits)
    for i, expected in enumerate(trained.detach().split(LENGTHS)):
        assert torch.equal(torch.cat(found[i]), expected)
