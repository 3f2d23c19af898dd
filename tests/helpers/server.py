"""A server that takes random steps: arrivals, chunks of prompts, drafts accepted or rejected, preemption, prefix hits,
null slots. What it computes for a sequence must be what the sequence alone gives, bit for bit.

A sequence has a row of slots, one for each block of BLOCK tokens, as in a server with a prefix cache. A slot that holds
the state at the end of a block may be read by other sequences, and is then never written again.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import torch

import mhc_ops

BLOCK, MOST_DRAFTS, SLOTS, LONGEST = 8, 4, 96, 60
NULLS = (0, -1, -9, SLOTS, SLOTS + 3)  # 0 is the null slot


@dataclass(eq=False)
class Sequence:
    document: int
    shared: int  # how many of its first inputs are those of the document
    inputs: torch.Tensor
    computed: int = 0  # inputs that the state has seen
    accepted: int = 1  # its window begins at place accepted − 1
    slots: dict[int, int] = field(default_factory=dict)  # by column
    column: int = 0  # where the state is
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def slot(self):
        return self.slots[self.column]


class Server:
    def __init__(self, seed, backend, device="cpu"):
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.backend, self.device = backend, device
        self.W, self.D = self.random.randint(2, 8), self.random.choice([5, 32])
        self.dtype = self.random.choice([torch.bfloat16, torch.float32])
        self.index = self.random.choice([torch.int32, torch.int64])
        self.filters = {"weight": self.normal(self.D, self.W).float(), "bias": self.normal(self.D).float()}
        self.filters["activation"] = "silu"
        length = max(self.W - 1, self.W - 2 + MOST_DRAFTS)
        shape = (SLOTS, self.D, length) if self.random.random() < 0.5 else (SLOTS, length, self.D)
        cache = torch.full(shape, float("nan"), dtype=self.dtype, device=device)
        self.cache = cache if shape[1] == self.D else cache.transpose(1, 2)
        self.documents = [self.normal(LONGEST, self.D) for _ in range(3)]
        self.free, self.cached = set(range(1, SLOTS)), {}  # (document, position) → slot
        self.running: list[Sequence] = []
        self.done = Counter()

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def integers(self, values):
        return torch.tensor(values, dtype=self.index, device=self.device)

    def run(self, steps):
        for _ in range(steps):
            if len(self.running) < 6 and self.random.random() < 0.4:
                self.arrive()
            if self.running and self.random.random() < 0.03:
                self.preempt(self.random.choice(self.running))
            waiting = [s for s in self.running if s.computed < len(s.inputs)]
            decoding = [s for s in self.running if s.computed == len(s.inputs)]
            if waiting and (not decoding or self.random.random() < 0.5):
                self.prefill(self.random.sample(waiting, self.random.randint(1, len(waiting))))
            elif decoding:
                self.decode(self.random.sample(decoding, self.random.randint(1, len(decoding))))
            for s in [s for s in self.running if s.computed == len(s.inputs) > LONGEST]:
                self.finish(s)
        while self.running:
            s = self.running[0]
            self.prefill([s]) if s.computed < len(s.inputs) else self.finish(s)
        return self.done

    def arrive(self):
        document = self.random.randrange(len(self.documents))
        shared, own = self.random.choice([0, 9, 16, 30]), self.random.randint(1, 12)
        s = Sequence(document, shared, torch.cat([self.documents[document][:shared], self.normal(own, self.D)]))
        self.running.append(s)
        self.done["arrivals"] += 1
        self.begin(s)

    def begin(self, s):
        """From zeros or from the longest prefix whose state is kept."""
        known = [p for d, p in self.cached if d == s.document and p <= s.shared]
        s.computed, s.accepted, s.slots, s.column = 0, 1, {}, 0
        if known and self.random.random() < 0.8:
            s.computed = max(known)
            s.column = (s.computed - 1) // BLOCK
            s.slots = {s.column: self.cached[s.document, s.computed]}
            self.done["prefix hits"] += 1

    def give_back(self, s):
        kept = set(self.cached.values())
        for slot in set(s.slots.values()) - kept:
            self.release(slot)

    def release(self, slot):
        self.free.add(slot)
        self.cache[slot] = float("nan")

    def preempt(self, s):
        self.give_back(s)
        self.begin(s)
        self.done["preemptions"] += 1

    def own_slot(self, s, column):
        """A slot of the sequence alone in this column."""
        if s.slots.get(column) not in (None, *self.cached.values()):
            return s.slots[column]
        if not self.free:  # of the prefixes that no sequence reads, all are forgotten
            used = {slot for other in self.running for slot in other.slots.values()}
            for key in [key for key, slot in self.cached.items() if slot not in used]:
                self.release(self.cached.pop(key))
        s.slots[column] = self.free.pop()
        return s.slots[column]

    def checked(self, function, written, **call):
        """Runs a call that may write to these slots only."""
        whole = {2: torch.int16, 4: torch.int32}[self.cache.element_size()]  # tells NaN apart
        before = self.cache.clone().view(whole)
        y = function(**call, **self.filters, pad_slot_id=0, backend=self.backend)
        changed = (before != self.cache.view(whole)).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= set(written), (changed, written)
        self.done[function.__name__] += 1
        return y

    def seen(self, s, first, y):
        """y of the inputs from `first` on. What was seen before preemption is seen again."""
        for t, row in enumerate(y, first):
            assert t not in s.outputs or torch.equal(s.outputs[t], row)
            s.outputs[t] = row.clone()
        s.computed = first + len(y)

    def prefill(self, sequences):
        chunks = [self.random.randint(1, min(20, len(s.inputs) - s.computed)) for s in sequences]
        rows = [s.inputs[s.computed : s.computed + n] for s, n in zip(sequences, chunks)]
        kept = set(self.cached.values())
        blocks = self.random.random() < 0.7 or any(s.slots.get(s.column) in kept for s in sequences)
        table, read, first, last, written = [], [], [], [], []
        for s, n in zip(sequences, chunks):
            starts, read_from = s.computed // BLOCK, s.slots.get(s.column)
            ends = (s.computed + n - 1) // BLOCK if blocks else s.column
            columns = range(starts, ends + 1) if blocks else [s.column]
            own = {column: self.own_slot(s, column) for column in columns}
            row = {column: self.random.choice(NULLS) for column in range(LONGEST)} | s.slots
            if read_from is None:
                s.column = ends
            row[s.column] = read_from or own[s.column]
            if read_from is not None and blocks and s.column in own and own[s.column] != read_from:
                row[LONGEST] = read_from  # a prefix that ends within this block: another column has it
            table.append([row.get(column, 0) for column in range(LONGEST + 1)])
            read.append(LONGEST if row.get(LONGEST) else s.column)
            table[-1][s.column] = own.get(s.column, table[-1][s.column])
            first.append(starts)
            last.append(ends)
            written += own.values()
        self.with_nulls(rows, chunks, table, read, first, last)
        table = self.integers(table)
        goes_on = torch.tensor([s.computed > 0 for s in sequences] + [True] * (len(chunks) - len(sequences)))
        call = {"conv_state_indices": table}
        if blocks:
            before = [s.computed for s in sequences] + [3] * (len(chunks) - len(sequences))
            call |= {"read_columns": read, "write_columns": last, "first_columns": first, "tokens_before": before}
            call = {name: v if name == "conv_state_indices" else self.integers(v) for name, v in call.items()}
            call["block_size"] = BLOCK
        else:
            columns = self.integers(read)
            call["conv_state_indices"] = table.gather(1, columns.long()[:, None])[:, 0]
        padding = self.random.choice([0, 3])
        x = torch.cat([*rows, torch.full((padding, self.D), float("nan"), dtype=self.dtype, device=self.device)])
        bounds = self.integers([sum(chunks[:i]) for i in range(len(chunks) + 1)])
        y = self.checked(
            mhc_ops.causal_conv1d_prefill, written, x=x, conv_state=self.cache, cu_seqlens=bounds,
            has_initial_state=goes_on.to(self.device), **call,
        )  # fmt: skip
        assert not y[sum(chunks[: len(sequences)]) :].any()
        for s, n, own_y, column in zip(sequences, chunks, y.split([*chunks, padding]), last):
            begin = s.computed
            self.seen(s, begin, own_y)
            s.column, s.accepted = column, 1
            for p in range((begin // BLOCK + 1) * BLOCK, begin + n + 1, BLOCK) if blocks else ():
                slot = s.slots[(p - 1) // BLOCK]
                self.assert_state(s, p, slot, 0)
                if p <= s.shared:
                    self.cached.setdefault((s.document, p), slot)
            self.assert_state(s, s.computed, s.slot, 0)

    def with_nulls(self, rows, chunks, table, *columns):
        """Sequences whose slot is none, with inputs that are NaN."""
        for _ in range(self.random.choice([0, 0, 1, 2])):
            n = self.random.randint(0, 5)
            rows.append(torch.full((n, self.D), float("nan"), dtype=self.dtype, device=self.device))
            chunks.append(n)
            table.append([self.random.choice(NULLS) for _ in range(LONGEST + 1)])
            for column in columns:
                column.append(0)

    def decode(self, sequences):
        form = self.random.choice(["plain", "drafts", "drafts", "windows", "tree"])
        if form != "drafts":
            sequences = [s for s in sequences if s.accepted == 1]
        if not sequences:
            return
        packed = form in ("plain", "drafts") and self.random.random() < 0.5
        T = self.random.randint(1, MOST_DRAFTS)
        counts = [self.random.randint(1, T) if packed else T for _ in sequences]
        read, kept, left = [s.slot for s in sequences], set(self.cached.values()), []
        for s in sequences:  # a state that others may read moves to another column
            if s.slot in kept or self.random.random() < 0.2:
                left += [(s, s.column)] * (s.slot not in kept)
                s.column = next(c for c in range(s.column, 2 * LONGEST) if s.slots.get(c) not in (*kept, s.slot))
                self.own_slot(s, s.column)
        nulls = self.random.choice([0, 0, 2])
        counts += [self.random.randint(0, T) if packed else T for _ in range(nulls)]
        written = [s.slot for s in sequences]
        read += [self.random.choice(NULLS) for _ in range(nulls)]
        write = written + [self.random.choice(NULLS) for _ in range(nulls)]
        x = [self.normal(n, self.D) for n in counts]
        for row in x[len(sequences) :]:
            row.fill_(float("nan"))
        drafts = [row.clone() for row in x]
        call = {"x": torch.cat(x) if packed else torch.stack(x)}
        if packed:
            bounds = self.integers([sum(counts[:i]) for i in range(len(counts) + 1)])
            call |= {"cu_seqlens": bounds, "max_seqlen": T}
        if form == "tree":
            call["conv_state_indices"] = self.integers(read)
        elif read == write and self.random.random() < 0.7:
            call["conv_state_indices"] = self.integers(write)
        else:
            table = torch.stack([self.integers(read), self.integers(write)], 1)
            call |= {"conv_state_indices": table, "write_columns": torch.ones_like(table[:, 0])}
        call["conv_state"] = self.cache if form == "drafts" else self.cache[..., : self.W - 1]
        if form == "drafts":
            call["num_accepted_tokens"] = self.integers([s.accepted for s in sequences] + [1] * nulls)
        paths = [list(range(self.random.randint(1, n))) for n in counts[: len(sequences)]]
        if form == "plain":
            paths = [list(range(n)) for n in counts[: len(sequences)]]
        if form in ("windows", "tree"):
            call["windows"] = torch.full(
                (len(counts), T, self.D, self.W - 1), float("nan"), dtype=self.dtype, device=self.device
            )
        if form == "tree":
            parents = [[self.random.randint(-1 if not t else 0, max(0, t - 1)) for t in range(T)] for _ in counts]
            call["parents"] = self.integers(parents)
            paths = [path_to(parents[b], self.random.randrange(T)) for b in range(len(sequences))]
        in_place = form != "tree" and self.random.random() < 0.5
        call["out"] = call["x"] if in_place else None
        y = self.checked(mhc_ops.causal_conv1d_update, () if form == "tree" else written, **call)
        y = y.split(counts) if packed else y.unbind()
        assert all(rows.isnan().all() if in_place else not rows.any() for rows in y[len(sequences) :])
        for s, column in left:
            self.release(s.slots.pop(column))
        for b, (s, path) in enumerate(zip(sequences, paths)):
            s.inputs = torch.cat([s.inputs, drafts[b][path]])
            self.seen(s, s.computed, y[b][path])
            s.accepted = len(path) if form == "drafts" else 1
            if form in ("windows", "tree"):
                self.cache[s.slot, :, : self.W - 1] = call["windows"][b, path[-1]]
            self.assert_state(s, s.computed, s.slot, s.accepted - 1)
            self.done["accepted"] += len(path)
            self.done["rejected"] += counts[b] - len(path)

    def assert_state(self, s, position, slot, place):
        before = torch.zeros(self.W - 1, self.D, dtype=self.dtype, device=self.device)
        inputs = torch.cat([before, s.inputs[:position]])[-(self.W - 1) :]
        assert torch.equal(self.cache[slot, :, place : place + self.W - 1], inputs.mT)

    def finish(self, s):
        alone = mhc_ops.causal_conv1d(s.inputs[None], **self.filters, backend=self.backend)[0]
        assert max(s.outputs) == len(s.inputs) - 1
        for t, row in s.outputs.items():
            assert torch.equal(row, alone[t]), t
        self.done["tokens compared"] += len(s.outputs)
        self.done["finished"] += 1
        self.give_back(s)
        self.running.remove(s)


def path_to(parents, leaf):
    path = [leaf]
    while 0 <= parents[path[0]] < path[0]:
        path.insert(0, parents[path[0]])
    return path
