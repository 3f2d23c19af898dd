"""A server that takes random steps: arrivals, chunks of prompts, drafts accepted or rejected, preemption, prefix hits.
What it computes for a sequence must be what the sequence alone gives, bit for bit.

A state at the end of a block of BLOCK tokens that a document begins with is kept. Other sequences may read its slot,
which is then never written again.
"""

import random
from dataclasses import dataclass, field
from itertools import accumulate

import torch

import mhc_ops

BLOCK, MOST_DRAFTS, SLOTS, LONGEST = 8, 4, 64, 60
COLUMNS = 5  # where a chunk reads, and where it writes up to four blocks
NAN = float("nan")


@dataclass(eq=False)
class Sequence:
    document: int
    shared: int  # how many of its first inputs are those of the document
    inputs: torch.Tensor
    computed: int = 0  # inputs that the state has seen
    accepted: int = 1  # its window begins at place accepted − 1
    slot: int = 0  # of its state; 0 is the null slot
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def waits(self):
        return self.computed < len(self.inputs)


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
        if self.random.random() < 0.5:
            self.cache = self.cache.contiguous()
        self.documents = [self.normal(LONGEST, self.D) for _ in range(3)]
        self.free, self.kept = set(range(1, SLOTS)), {}  # (document, position) → slot
        self.running: list[Sequence] = []
        self.compared = 0  # tokens

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def integers(self, values):
        return torch.tensor(values, dtype=self.index, device=self.device)

    def bounds(self, counts):
        return self.integers([0, *accumulate(counts)])

    def some(self, sequences):
        return self.random.sample(sequences, self.random.randint(1, len(sequences)))

    def run(self, steps):
        for _ in range(steps):
            if len(self.running) < 6 and self.random.random() < 0.4:
                self.arrive()
            if self.running and self.random.random() < 0.03:  # preemption
                self.begin(self.random.choice(self.running))
            waiting = [s for s in self.running if s.waits]
            decoding = [s for s in self.running if not s.waits]
            if waiting and (not decoding or self.random.random() < 0.5):
                self.prefill(self.some(waiting))
            elif decoding:
                self.decode(self.some(decoding))
            for s in [s for s in self.running if not s.waits and len(s.inputs) > LONGEST]:
                self.finish(s)
        while self.running:
            s = self.running[0]
            self.prefill([s]) if s.waits else self.finish(s)

    def arrive(self):
        document = self.random.randrange(len(self.documents))
        shared, own = self.random.choice([0, 9, 16, 30]), self.random.randint(1, 12)
        s = Sequence(document, shared, torch.cat([self.documents[document][:shared], self.normal(own, self.D)]))
        self.running.append(s)
        self.begin(s)

    def begin(self, s):
        """From zeros or from the longest prefix whose state is kept."""
        self.move(s, 0)
        s.computed, known = 0, [p for d, p in self.kept if d == s.document and p <= s.shared]
        if known and self.random.random() < 0.8:
            s.computed = max(known)
            s.slot = self.kept[s.document, s.computed]

    def move(self, s, slot):
        """The state of the sequence is in another slot."""
        if slot != s.slot:
            self.give_back(s.slot)
        s.slot, s.accepted = slot, 1

    def give_back(self, slot):
        if slot and slot not in self.kept.values():
            self.free.add(slot)
            self.cache[slot] = NAN

    def seen(self, s, y):
        """y of the next inputs. What was seen before preemption is seen again."""
        for t, row in enumerate(y, s.computed):
            assert t not in s.outputs or torch.equal(s.outputs[t], row)
            s.outputs[t] = row.clone()
        s.computed += len(y)

    def prefill(self, sequences):
        """Each block that a chunk reaches into has a slot of its own."""
        begins = [s.computed for s in sequences]
        chunks = [self.random.randint(1, min(20, len(s.inputs) - s.computed)) for s in sequences]
        own = [[self.free.pop() for _ in range(a // BLOCK, (a + n - 1) // BLOCK + 1)] for a, n in zip(begins, chunks)]
        table = [([s.slot or new[0]] + new + [0] * COLUMNS)[:COLUMNS] for s, new in zip(sequences, own)]
        columns = {"read_columns": [0] * len(own), "first_columns": [1] * len(own), "tokens_before": begins}
        columns |= {"write_columns": [len(new) for new in own], "conv_state_indices": table}
        call = {name: self.integers(values) for name, values in columns.items()}
        call["has_initial_state"] = torch.tensor([begin > 0 for begin in begins], device=self.device)
        call |= {"cu_seqlens": self.bounds(chunks), "block_size": BLOCK, "pad_slot_id": 0}
        x = torch.cat([s.inputs[a : a + n] for s, a, n in zip(sequences, begins, chunks)])
        y = mhc_ops.causal_conv1d_prefill(x, self.cache, **call, **self.filters)
        for s, begin, new, rows in zip(sequences, begins, own, y.split(chunks)):
            self.seen(s, rows)
            self.move(s, new[-1])
            self.assert_state(s, s.computed, s.slot)
            for block, slot in enumerate(new, begin // BLOCK + 1):
                if block * BLOCK <= s.computed:
                    self.assert_state(s, block * BLOCK, slot)
                if block * BLOCK <= min(s.shared, s.computed):
                    self.kept.setdefault((s.document, block * BLOCK), slot)
                if slot != s.slot:
                    self.give_back(slot)

    def decode(self, sequences):
        packed, T = self.random.random() < 0.5, self.random.randint(1, MOST_DRAFTS)
        counts = [self.random.randint(1, T) if packed else T for _ in sequences]
        drafts = [self.normal(n, self.D) for n in counts]
        call = {"x": torch.cat(drafts) if packed else torch.stack(drafts), "conv_state": self.cache, "pad_slot_id": 0}
        call |= {"cu_seqlens": self.bounds(counts), "max_seqlen": T} if packed else {}
        call["num_accepted_tokens"] = self.integers([s.accepted for s in sequences])
        stay = [s.slot not in self.kept.values() and self.random.random() < 0.8 for s in sequences]
        write = [s.slot if stays else self.free.pop() for s, stays in zip(sequences, stay)]
        call["conv_state_indices"] = self.integers([[s.slot, slot] for s, slot in zip(sequences, write)])
        call["write_columns"] = self.integers([1] * len(write))
        y = mhc_ops.causal_conv1d_update(**call, **self.filters)
        for s, rows, tokens, slot in zip(sequences, y.split(counts) if packed else y, drafts, write):
            accepted = self.random.randint(1, len(tokens))
            s.inputs = torch.cat([s.inputs, tokens[:accepted]])
            self.seen(s, rows[:accepted])
            self.move(s, slot)
            s.accepted = accepted
            self.assert_state(s, s.computed, s.slot, accepted - 1)

    def assert_state(self, s, position, slot, place=0):
        before = torch.zeros(self.W - 1, self.D, dtype=self.dtype, device=self.device)
        inputs = torch.cat([before, s.inputs[:position]])[-(self.W - 1) :]
        assert torch.equal(self.cache[slot, :, place : place + self.W - 1], inputs.mT)

    def finish(self, s):
        alone = mhc_ops.causal_conv1d(s.inputs[None], **self.filters)[0]
        assert torch.equal(torch.stack([s.outputs[t] for t in sorted(s.outputs)]), alone[min(s.outputs) :])
        self.compared += len(s.outputs)
        self.move(s, 0)
        self.running.remove(s)
