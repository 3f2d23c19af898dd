"""What servers call, one sequence, one token and one tap at a time; and random calls of it."""

import random
from itertools import pairwise

import torch

NAN = float("nan")


def bounds_of(cu_seqlens, rows):
    bounds, greatest = [], 0
    for bound in cu_seqlens.tolist():
        greatest = max(greatest, min(max(bound, 0), rows))
        bounds.append(greatest)
    return list(pairwise(bounds))


def slot_at(table, row, columns, conv_state, pad_slot_id):
    """The slot in a column of a row, or None."""
    column = 0 if columns is None else columns if isinstance(columns, int) else int(columns[row])
    row_of_slots = table[row].reshape(-1).tolist()
    if not 0 <= column < len(row_of_slots):
        return None
    slot = row_of_slots[column]
    return slot if 0 <= slot < len(conv_state) and slot != pad_slot_id else None


def prefill(
    x, conv_state, weight, *, cu_seqlens, conv_state_indices, has_initial_state=None, pad_slot_id=-1, read_columns=None,
    write_columns=None, first_columns=None, tokens_before=None, block_size=None, **_,
):  # fmt: skip
    """Returns the W inputs under the taps of each token, by its row, and conv_state after it."""
    S, old, after, taps = weight.shape[1] - 1, conv_state.clone(), conv_state.clone(), {}
    for i, (begin, end) in enumerate(bounds_of(cu_seqlens, len(x))):
        slot = slot_at(conv_state_indices, i, read_columns, conv_state, pad_slot_id)
        if slot is None or begin == end:
            continue
        goes_on = has_initial_state is not None and bool(has_initial_state[i])
        inputs = [old[slot, :, s] if goes_on else torch.zeros_like(x[0]) for s in range(S)] + list(x[begin:end])
        taps |= {begin + t: torch.stack(inputs[t : t + S + 1], -1) for t in range(end - begin)}
        before = max(0, int(tokens_before[i])) if block_size else 0
        multiples = [e for e in range(1, end - begin + 1) if block_size and (before + e) % block_size == 0]
        kept = [(int(first_columns[i]) + k, e) for k, e in enumerate(multiples)]
        for columns, e in [*kept, (write_columns, end - begin)]:  # the final state last
            written = slot_at(conv_state_indices, i, columns, conv_state, pad_slot_id)
            if written is not None:
                after[written, :, :S] = torch.stack(inputs[e : e + S], -1)
    return taps, after


def step(
    x, conv_state, weight, *, conv_state_indices=None, pad_slot_id=-1, num_accepted_tokens=None, cu_seqlens=None,
    max_seqlen=None, read_columns=None, write_columns=None, windows=None, window_indices=None, parents=None, **_,
):  # fmt: skip
    """Returns the W inputs under the taps of each token, by its row, and conv_state and windows after it."""
    S, length, old, after = weight.shape[1] - 1, conv_state.shape[2], conv_state.clone(), conv_state.clone()
    rows, taps, windows = x.reshape(-1, x.shape[-1]), {}, None if windows is None else windows.clone()
    if cu_seqlens is None:
        T = len(rows) // len(x)
        sequences = [(b * T, b * T + T) for b in range(len(x))]
    else:
        sequences = [(begin, min(end, begin + max_seqlen)) for begin, end in bounds_of(cu_seqlens, len(rows))]
    slots = torch.arange(len(sequences)) if conv_state_indices is None else conv_state_indices
    for b, (begin, end) in enumerate(sequences):
        of_slots = (conv_state, pad_slot_id if conv_state_indices is not None else None)
        slot, written = (slot_at(slots, b, columns, *of_slots) for columns in (read_columns, write_columns))
        o = length - S if num_accepted_tokens is None else int(num_accepted_tokens[b]) - 1
        if slot is None or begin == end or not 0 <= o <= length - S:
            continue
        window, new = [old[slot, :, o + s] for s in range(S)], list(rows[begin:end])
        line = b if window_indices is None else int(window_indices[b])
        for t in range(len(new)):
            path = list(range(t + 1)) if parents is None else path_to(t, parents[b].tolist())
            inputs = (window + [new[p] for p in path])[-S - 1 :]
            taps[begin + t] = torch.stack(inputs, -1)
            if windows is not None and 0 <= line < len(windows):
                windows[line, t] = torch.stack(inputs[1:], -1)
        if written is None or parents is not None:
            continue
        if num_accepted_tokens is None:
            after[written] = torch.stack([*old[slot].unbind(-1), *new][-length:], -1)
        else:
            after[written, :, : S - 1 + len(new)] = torch.stack([*window[1:], *new], -1)
    return taps, after, windows


def path_to(leaf, parents):
    path = [leaf]
    while 0 <= parents[path[0]] < path[0]:
        path.insert(0, parents[path[0]])
    return path


class Draw:
    """Random calls. Every tensor that is read or written lies in the midst of NaN."""

    def __init__(self, seed):
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = self.random.choice([torch.bfloat16, torch.float16, torch.float32])
        self.index = self.random.choice([torch.int32, torch.int64])
        self.W, self.D = self.random.randint(2, 8), self.random.choice([1, 20, 33])
        self.pad_slot_id = self.random.choice([-1, 0, 2])

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def integers(self, values):
        return torch.tensor(values, dtype=self.index)

    def filters(self):
        bias = {"bias": torch.randn(self.D, generator=self.generator)} if self.random.random() < 0.7 else {}
        weight = torch.randn(self.D, self.W, generator=self.generator)
        return {"weight": weight, **bias, "activation": self.random.choice([None, "silu"])}

    def among_nan(self, *shape):
        """Values of this shape with other strides."""
        order = self.random.sample(range(len(shape)), len(shape))
        step = self.random.choice([1, 2])
        whole = torch.full([shape[dim] * step + 2 for dim in order], NAN, dtype=self.dtype)
        view = whole[tuple(slice(1, 1 + shape[dim] * step, step) for dim in order)]
        view = view.permute([order.index(dim) for dim in range(len(shape))])
        view.copy_(self.normal(*shape))
        return view

    def table(self, N, columns, slots):
        """[N, columns] slots, no two alike, some of them not there; a view of a wider table."""
        found = torch.randperm(slots, generator=self.generator)[: N * columns].tolist()
        for place in range(len(found)):
            if self.random.random() < 0.15:
                found[place] = self.random.choice([self.pad_slot_id, -1, -7, slots, slots + 5])
        wide = torch.full((N, columns + 3), slots + 9, dtype=self.index)
        wide[:, 1 : columns + 1] = torch.tensor(found, dtype=self.index).view(N, columns)
        return wide[:, 1 : columns + 1]

    def lengths(self, N, most):
        return [self.random.choice([0, 1, 2, self.random.randint(0, most)]) for _ in range(N)]

    def bounds(self, lengths):
        """cu_seqlens with padding before the first sequence and after the last, and how many rows there are."""
        bounds = [self.random.choice([0, 0, 2])]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        rows = bounds[-1] + self.random.choice([0, 3, 20])
        if self.random.random() < 0.2:
            bounds[self.random.randrange(len(bounds))] = self.random.choice([-3, rows + 4, 1])
        return self.integers(bounds), rows

    def prefill(self):
        N = self.random.randint(0, 4)
        cu_seqlens, rows = self.bounds(self.lengths(N, self.random.choice([6, 45])))
        columns = self.random.choice([0, 0, 1, 3, 8])
        slots = N * max(1, columns) + 3
        table = self.table(N, max(1, columns), slots)
        call = {"x": self.among_nan(rows, self.D), **self.filters(), "pad_slot_id": self.pad_slot_id}
        call |= {"conv_state": self.among_nan(slots, self.D, self.W - 1 + self.random.choice([0, 0, 4]))}
        call |= {"cu_seqlens": cu_seqlens, "conv_state_indices": table if columns else table[:, 0]}
        if self.random.random() < 0.8:
            call["has_initial_state"] = torch.rand(N, generator=self.generator) < 0.7
        if columns and self.random.random() < 0.8:
            size = self.random.choice([1, 2, 3, 8, 17])
            before = [self.random.choice([0, 1, 5, 16, 34]) for _ in range(N)]
            call |= {"block_size": size, "tokens_before": self.integers(before)}
            call |= {"first_columns": self.integers([b // size for b in before])}
            call |= {"read_columns": self.integers([max(0, (b - 1) // size) for b in before])}
            bounds = bounds_of(cu_seqlens, rows)
            last = [(b + end - begin - 1) // size for b, (begin, end) in zip(before, bounds)]
            last = [self.random.choice([column, column, -1]) for column in last]
            call |= {"write_columns": self.integers(last)}
        return call

    def step(self):
        B, T = self.random.randint(1, 4), self.random.choice([1, 2, 3, 6])
        accepts, packed = self.random.random() < 0.5, self.random.random() < 0.4
        tree = not accepts and not packed and self.random.random() < 0.4
        columns = self.random.choice([0, 1, 2])
        slots = B * max(1, columns) + 3 if columns or self.random.random() < 0.8 else B
        call = {**self.filters(), "pad_slot_id": self.pad_slot_id}
        if packed:
            cu_seqlens, rows = self.bounds(self.lengths(B, T + 1))
            call |= {"x": self.among_nan(rows, self.D), "cu_seqlens": cu_seqlens, "max_seqlen": T}
        else:
            call |= {"x": self.among_nan(*((B, self.D) if T == 1 and not tree else (B, T, self.D)))}
        length = self.W - 2 + T if accepts else self.W - 1
        length = max(length, self.W - 1) + self.random.choice([0, 0, 3])
        call["conv_state"] = self.among_nan(slots, self.D, length)
        if slots > B:
            table = self.table(B, max(1, columns), slots)
            call["conv_state_indices"] = table if columns else table[:, 0]
        if columns:
            call["read_columns"] = self.integers([self.random.randint(-1, columns) for _ in range(B)])
            if not tree:
                call["write_columns"] = self.integers([self.random.randint(-1, columns) for _ in range(B)])
        if accepts:
            call["num_accepted_tokens"] = self.integers([self.random.randint(0, T + 1) for _ in range(B)])
        if tree:
            call["parents"] = self.integers([[self.random.randint(-1, max(0, t)) for t in range(T)] for _ in range(B)])
        if self.random.random() < 0.4 or tree:
            indexed = self.random.random() < 0.5
            call["windows"] = self.among_nan(B + 2 * indexed, T + self.random.choice([0, 2]), self.D, self.W - 1)
            if indexed:
                lines = torch.randperm(B + 2, generator=self.generator)[:B].tolist()
                lines[-1] = self.random.choice([lines[-1], -1, B + 2])
                call["window_indices"] = self.integers(lines)
        return call
