"""A server of random steps: prompts in chunks, drafts accepted or rejected. Each sequence has the bits it has alone."""

import random
from itertools import accumulate

import torch

import mhc_ops

MOST_DRAFTS, SLOTS, LONGEST = 4, 16, 50
NAN = float("nan")


class Sequence:
    def __init__(self, prompt):
        self.inputs, self.outputs = prompt, prompt[:0]
        self.slot, self.accepted = 0, 1  # of its state, 0 is the null slot; its window begins at place accepted − 1


class Server:
    def __init__(self, seed, backend, device="cpu"):
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.device, self.W, self.D = device, self.random.randint(2, 8), self.random.choice([5, 32])
        self.dtype = self.random.choice([torch.bfloat16, torch.float32])
        self.index = self.random.choice([torch.int32, torch.int64])
        self.filters = {"weight": self.normal(self.D, self.W).float(), "bias": self.normal(self.D).float()}
        self.filters |= {"activation": "silu", "backend": backend}
        length = max(self.W - 1, self.W - 2 + MOST_DRAFTS)
        self.cache = torch.full((SLOTS, length, self.D), NAN, dtype=self.dtype, device=device).transpose(1, 2)
        self.free = set(range(1, SLOTS))
        self.running = [self.arrive() for _ in range(5)]
        self.compared = 0  # tokens

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def integers(self, values):
        return torch.tensor(values, dtype=self.index, device=self.device)

    def arrive(self):
        return Sequence(self.normal(self.random.randint(1, 40), self.D))

    def run(self, steps):
        for _ in range(steps):
            waiting = [s for s in self.running if len(s.outputs) < len(s.inputs)]
            kinds = [(self.prefill, waiting), (self.decode, [s for s in self.running if s not in waiting])]
            step, sequences = self.random.choice([kind for kind in kinds if kind[1]])
            step(self.random.sample(sequences, self.random.randint(1, len(sequences))))
            assert self.cache[list(self.free)].isnan().all()
            for s in [s for s in self.running if len(s.outputs) > LONGEST]:
                self.finish(s)
        for s in list(self.running):
            self.finish(s)

    def places(self, sequences, counts):
        """What both kinds of calls are given: each sequence goes on in its slot or in another one."""
        write = [s.slot if s.slot and self.random.random() < 0.7 else self.free.pop() for s in sequences]
        slots = [[s.slot or slot, slot] for s, slot in zip(sequences, write)]
        columns = {"conv_state_indices": slots, "read_columns": [0] * len(write), "write_columns": [1] * len(write)}
        columns["cu_seqlens"] = [0, *accumulate(counts)]
        return write, {name: self.integers(values) for name, values in columns.items()} | {"pad_slot_id": 0}

    def seen(self, s, rows, slot, accepted=1):
        """y of the next inputs, and where the state is now."""
        s.outputs = torch.cat([s.outputs, rows])
        self.move(s, slot)
        s.accepted = accepted
        before = s.inputs.new_zeros(self.W - 1, self.D)
        inputs = torch.cat([before, s.inputs[: len(s.outputs)]])[-(self.W - 1) :]
        assert torch.equal(self.cache[slot, :, accepted - 1 : accepted + self.W - 2], inputs.mT)

    def move(self, s, slot):
        if s.slot and s.slot != slot:
            self.free.add(s.slot)
            self.cache[s.slot] = NAN
        s.slot = slot

    def prefill(self, sequences):
        counts = [self.random.randint(1, min(20, len(s.inputs) - len(s.outputs))) for s in sequences]
        write, call = self.places(sequences, counts)
        call["has_initial_state"] = torch.tensor([s.slot > 0 for s in sequences], device=self.device)
        x = torch.cat([s.inputs[len(s.outputs) :][:n] for s, n in zip(sequences, counts)])
        y = mhc_ops.causal_conv1d_prefill(x, self.cache, **call, **self.filters)
        for s, rows, slot in zip(sequences, y.split(counts), write):
            self.seen(s, rows, slot)

    def decode(self, sequences):
        packed, T = self.random.random() < 0.5, self.random.randint(1, MOST_DRAFTS)
        counts = [self.random.randint(1, T) if packed else T for _ in sequences]
        drafts = [self.normal(n, self.D) for n in counts]
        write, call = self.places(sequences, counts)
        bounds = call.pop("cu_seqlens")
        call |= {"cu_seqlens": bounds, "max_seqlen": T} if packed else {}
        call["num_accepted_tokens"] = self.integers([s.accepted for s in sequences])
        x = torch.cat(drafts) if packed else torch.stack(drafts)
        y = mhc_ops.causal_conv1d_update(x, self.cache, **call, **self.filters)
        for s, rows, tokens, slot in zip(sequences, y.split(counts) if packed else y, drafts, write):
            accepted = self.random.randint(1, len(tokens))
            s.inputs = torch.cat([s.inputs, tokens[:accepted]])
            self.seen(s, rows[:accepted], slot, accepted)

    def finish(self, s):
        alone = mhc_ops.causal_conv1d(s.inputs[None], **self.filters)[0]
        assert torch.equal(s.outputs, alone[: len(s.outputs)])
        self.compared += len(s.outputs)
        self.move(s, 0)
        self.running[self.running.index(s)] = self.arrive()
