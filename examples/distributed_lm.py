"""The texts, the model and the checkpoints of train_distributed.py, shared among processes."""

import argparse
import fcntl
import json
import os
import random
import re
import shutil
import socket
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tiny_lm import HEAD_DIM, MLP, connect
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from mhc_ops import HyperHead, causal_conv1d, distributed, mhc_expand
from mhc_ops.distributed import shard_sequence
from mhc_ops.measure.report import Refused, say

WIDTH = 4  # taps of the convolution
PATIENCE = 60  # seconds that a run waits for processes of an earlier run to leave its folder
SUMS = "sums.json"  # checksums of the files of a checkpoint


# The data: windows of the text, each once in every pass, in an order that does not depend on the number of processes.


class Windows:
    """The texts of all processes. The text is cut into windows of `length` characters and the next one."""

    def __init__(self, text: Tensor, length: int, seed: int):
        self.windows = text[: (len(text) - 1) // length * length + 1].unfold(0, length + 1, length)
        self.seed, self.position = seed, 0  # the number of windows taken so far

    def take(self, count: int) -> Tensor:
        """The next [count, length + 1]."""
        places = [divmod(self.position + index, len(self.windows)) for index in range(count)]
        self.position += count
        return self.windows[torch.tensor([order(len(self.windows), self.seed, nth)[place] for nth, place in places])]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "length": self.windows.shape[1] - 1, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Another seed or length is another order, in which the position has no meaning."""
        for name in ("seed", "length"):
            if state[name] != self.state_dict()[name]:
                raise Refused(f"--{name} is {self.state_dict()[name]}, but the run to continue has {state[name]}")
        self.position = state["position"]


@lru_cache(maxsize=2)
def order(count: int, seed: int, nth_pass: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed(seed, nth_pass))).tolist()


def mixed(*numbers: int) -> int:
    """A seed made of several numbers."""
    return random.Random(str(numbers)).getrandbits(63)


# The model. Each process has a piece of every text. Only the convolution and attention use other pieces.


class Pieces:
    """The pieces of a sequence on a mesh of one dimension. here, everywhere: positions in the sequence"""

    def __init__(self, mesh: DeviceMesh, layout: str, length: int, device: torch.device):
        self.mesh, self.layout = mesh, layout
        self.here = shard_sequence(torch.arange(length, device=device), group=mesh, layout=layout, dim=0)
        self.everywhere = self.gathered(self.here, dim=0)

    def gathered(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of all processes, in the order of the processes; gradients are summed on the way back."""
        return DTensor.from_local(x, self.mesh, [Shard(dim)]).full_tensor(grad_placements=[Partial()])


class Convolution(nn.Module):
    def __init__(self, D: int, pieces: Pieces):
        super().__init__()
        self.pieces, self.out = pieces, nn.Linear(D, D)
        self.weight = nn.Parameter(torch.empty(D, WIDTH).uniform_(-(WIDTH**-0.5), WIDTH**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        pieces = {"group": self.pieces.mesh, "layout": self.pieces.layout}
        convolve = partial(distributed.causal_conv1d, **pieces) if self.pieces.mesh.size() > 1 else causal_conv1d
        return self.out(convolve(x, self.weight, activation="silu"))


class Attention(nn.Module):
    """Queries of the tokens here; keys and values of all earlier tokens, gathered from the group."""

    def __init__(self, D: int, pieces: Pieces):
        super().__init__()
        self.pieces, self.heads = pieces, D // HEAD_DIM
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.q(x), *self.pieces.gathered(self.kv(x), dim=1).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        before = self.pieces.here[:, None] >= self.pieces.everywhere
        return self.out(F.scaled_dot_product_attention(q, k, v, before).transpose(1, 2).flatten(-2))


class Start(nn.Module):
    def __init__(self, vocabulary: int, length: int, D: int, n: int, pieces: Pieces):
        super().__init__()
        self.n, self.pieces = n, pieces
        self.characters, self.positions = nn.Embedding(vocabulary, D), nn.Embedding(length, D)

    def forward(self, ids: Tensor) -> Tensor:
        return mhc_expand(self.characters(ids) + self.positions(self.pieces.here), self.n)


def model_of(vocabulary: int, options: argparse.Namespace, pieces: Pieces) -> nn.Sequential:
    n, D = options.streams, options.D
    mlps = (nn.Sequential(MLP(D), nn.Dropout(options.dropout)) for _ in range(options.depth))
    layers = [layer for mlp in mlps for layer in (Convolution(D, pieces), Attention(D, pieces), mlp)]
    parts = {"start": Start(vocabulary, options.length, D, n, pieces), "layers": connect(layers, n, D)}
    ends = {"head": HyperHead(n, D), "norm": nn.RMSNorm(D, eps=1e-6), "logits": nn.Linear(D, vocabulary)}
    return nn.Sequential(OrderedDict(**parts, **ends))


# A folder that many processes write to: one run at a time, and an error of one process is an error of all.


def by_first(action: Callable[[], Any], path: Path) -> Any:
    """Do it on the first process; return its result, or raise its refusal, on every process. path: named in errors"""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = action()
        except OSError as error:
            told[1] = f"{error.filename or path}: {error.strerror}"
        except Refused as error:
            told[1] = str(error)
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise Refused(told[1])
    return told[0]


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder. The first process holds `lock` alone. All processes share `writers`, which the
    next run waits for: some may outlive the first process and still write. The system releases the locks of a process
    when it ends, also by a kill."""
    files: list[IO[str]] = []

    def alone() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files.append(_locked(folder / "lock", fcntl.LOCK_EX))
        files[0].truncate(0)
        files[0].write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        files[0].flush()
        _locked(folder / "writers", fcntl.LOCK_EX).close()

    by_first(alone, folder)
    try:
        files.append(_locked(folder / "writers", fcntl.LOCK_SH))
        yield
    finally:
        for file in files:
            file.close()


def _locked(path: Path, kind: int) -> IO[str]:
    file, until, told = path.open("a+"), time.monotonic() + PATIENCE, False
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            holder = path.read_text() or "processes of an earlier run"
            if time.monotonic() > until:
                file.close()
                raise Refused(f"{path.parent} is in use by {holder}: end it, or choose another --out") from None
            if not told:
                say(f"{path.parent} is in use by {holder}: waiting for its end, {PATIENCE} s at most")
            told = True
            time.sleep(0.1)


def replace_text(path: Path, text: str) -> None:
    """A kill leaves the old file or the new one."""
    unfinished = path.with_suffix(".partial")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


# Checkpoints: a folder each, which gets its name when all of it is written.


class Writer(dcp.FileSystemWriter):
    def write_data(self, *arguments: Any) -> Any:
        """Report an error of the disk, not the error that torch's zip file raises after it."""
        try:
            return super().write_data(*arguments)
        except RuntimeError as error:
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


class Checkpoints:
    def __init__(self, folder: Path, keep: int = 2):
        self.folder, self.keep = folder, keep
        by_first(self._begin, folder)

    def _begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for broken in self.folder.glob("*.partial"):
            shutil.rmtree(broken) if broken.is_dir() else broken.unlink()

    def there(self) -> list[Path]:
        """All checkpoints from the oldest to the newest, as the first process sees them."""
        return by_first(
            lambda: sorted(path for path in self.folder.iterdir() if re.fullmatch(r"step-\d{9}", path.name)),
            self.folder,
        )

    def save(self, state: dict[str, Any], step: int, writer: type[Writer] = Writer) -> None:
        path = self.folder / f"step-{step:09d}"
        unfinished = path.with_suffix(".partial")
        try:
            dcp.save(state, storage_writer=writer(unfinished))  # returns when all processes have written
        except dcp.CheckpointException as error:
            by_first(partial(shutil.rmtree, unfinished, ignore_errors=True), unfinished)  # makes room on a full disk
            raise Refused(f"{path} could not be written: {_cause(error)}") from None
        names = by_first(lambda: sorted(file.name for file in unfinished.iterdir()), unfinished)
        sums = _sums(unfinished, names)

        def finish() -> None:
            replace_text(unfinished / SUMS, json.dumps(sums, indent=1))
            unfinished.rename(path)

        by_first(finish, path)
        for old in self.there()[: -self.keep]:
            by_first(lambda old=old: shutil.rmtree(old.rename(old.with_suffix(".partial"))), old)

    def load(self, into: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The newest complete checkpoint; None if there was none. Damaged ones are set aside. into: makes the state to
        fill; called only if needed, since torch makes the state of a fresh optimizer by a step"""
        for path in reversed(self.there()):
            damage = self._damage(path)
            if damage is None:
                state = into()
                _check_same_model(path, state)
                try:
                    dcp.load(state, checkpoint_id=path)
                except dcp.CheckpointException as error:
                    raise Refused(f"{path} could not be read: {_cause(error)}") from None
                return state
            aside = by_first(partial(_set_aside, path), path)
            if dist.get_rank() == 0:
                say(f"{path} is damaged, {damage}: kept as {aside.name}")
        if by_first(lambda: any(".damaged" in path.name for path in self.folder.iterdir()), self.folder):
            raise Refused(f"{self.folder} has damaged checkpoints only: choose another --out to start anew")
        return None

    def _damage(self, path: Path) -> str | None:
        """A description of the damage; None if a checkpoint is as it was written."""

        def recorded() -> tuple[dict[str, str], str | None]:
            try:
                return dict(json.loads((path / SUMS).read_text())), None
            except (OSError, ValueError, TypeError) as error:
                return {}, f"{SUMS}: {error.strerror if isinstance(error, OSError) else 'is garbled'}"

        expected, damage = by_first(recorded, path)
        found = _sums(path, sorted(expected))
        for name, value in found.items():
            if value != expected[name]:
                return f"{name}: {value} instead of {expected[name]}"
        return damage


def _sums(folder: Path, names: list[str]) -> dict[str, str]:
    """The checksums of these files, each read by one of the processes."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, {name: _sum(folder / name) for name in names[dist.get_rank() :: len(shares)]})
    return {name: value for share in shares for name, value in share.items()}


def _sum(path: Path) -> str:
    """Size and CRC-32. torch's zip files have checksums too, but torch does not compare them."""
    size = crc = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(2**20):
                size, crc = size + len(piece), zlib.crc32(piece, crc)
    except OSError as error:
        return str(error.strerror)
    return f"{size} bytes, crc32 {crc:08x}"


def _set_aside(path: Path) -> Path:
    aside = (path.with_suffix(f".damaged{nth or ''}") for nth in range(10**6))
    return path.rename(next(free for free in aside if not free.exists()))


def _check_same_model(path: Path, state: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model: torch would ignore tensors that this model does not have."""

    def stored() -> dict[str, Any]:
        values = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        return {name: list(getattr(value, "size", ())) for name, value in values.items()}

    flat, _ = flatten_state_dict(state)
    shapes = {name: list(value.shape) if isinstance(value, Tensor) else [] for name, value in flat.items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, shapes)  # stages have different tensors
    there, here = by_first(stored, path), {name: shape for rank in of_ranks for name, shape in rank.items()}
    for name in sorted({*there, *here}, key=lambda name: (not name.startswith("model."), name)):
        if there.get(name) != here.get(name):
            raise Refused(
                f"{path} is of another model, {name} is {there.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} here: --D, --depth, --streams and --length must be those of that run"
            )


def _cause(error: dcp.CheckpointException) -> str:
    """The error of the first process that failed."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"{getattr(cause, 'strerror', None) or cause} (process {rank})"
