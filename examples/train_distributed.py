"""Train a tiny language model with mHC on many processes, in a run that survives lost workers.

    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/train_distributed.py --cp 2 --out run
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_distributed.py --fail-at step:30

The mesh is data × context × pipeline: `--dp` groups of processes share the texts of a step, `--cp` processes have a
piece of every text each, and `--pp` processes have a stage of the layers each. FSDP2 shards the parameters, gradients
and optimizer state of a stage over all of its processes.

Every `--every` steps the run writes a checkpoint into `--out`, a folder that all machines see. When a worker is lost,
torchrun starts all workers again. They continue from the last complete checkpoint with the next texts, and the result
has the bits of an undisturbed run. A later call with the same `--out` continues too; on more or fewer processes results
are equal up to rounding. Workers end with their torchrun, and a folder belongs to one run at a time.

`--fail-at` is a drill: a worker kills itself in that step, between forward and backward, or in the checkpoint after
that step, when it has written its share. The first drill happens in the first attempt, the second after the first
restart and so on.
"""

import argparse
import csv
import os
import re
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed_lm import Checkpoints, Pieces, Windows, Writer, by_first, held, mixed, model_of, replace_text
from tiny_lm import HEAD_DIM, learning_rate, optimizer_of, read_text
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import Schedule1F1B

from mhc_ops.distributed import PipelineStage, fully_shard, pipeline_stages
from mhc_ops.measure.report import Refused, progress, say

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # by parameter name: stages have different parameters
COLUMNS = ("step", "loss", "tokens_per_second")
REACHED = 60  # seconds until torchrun's store, which is there before a worker starts, counts as gone


# Drills.


class Drill(NamedTuple):
    """A worker that kills itself: `step:30`, `checkpoint:80`; the last process, or the one named, as in `step:30:0`."""

    where: str
    step: int
    rank: int

    @classmethod
    def parse(cls, text: str) -> "Drill":
        found = re.fullmatch(r"(step|checkpoint):(\d+)(?::(\d+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"must be step:NUMBER or checkpoint:NUMBER, maybe with :RANK, got {text}")
        where, step, rank = found.groups(default="-1")
        return cls(where, int(step), int(rank))

    def __call__(self, where: str, step: int) -> None:
        if (where, step, dist.get_rank()) == (self.where, self.step, self.rank % dist.get_world_size()):
            say(f"drill: process {self.rank % dist.get_world_size()} kills itself in {where} {step}")
            os.kill(os.getpid(), signal.SIGKILL)


def drill(options: argparse.Namespace) -> Drill:
    """The drill of this attempt, which torchrun counts; without one, a drill that never happens."""
    return dict(enumerate(options.fail_at)).get(options.attempt, Drill("never", 0, 0))


# Training.


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that differ between processes: on several machines they are typed several times."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(options))
    for rank, others in enumerate(everyone):
        for name, value in everyone[0].items():
            if others[name] != value:
                told = f"{value} on process 0 and {others[name]} on process {rank}"
                raise Refused(f"--{name.replace('_', '-')} must be the same on all processes, got {told}")


def mesh_of(options: argparse.Namespace) -> DeviceMesh:
    check_options(options)
    world, cp, pp = dist.get_world_size(), options.cp, options.pp
    dp = options.dp or max(1, world // (cp * pp))
    if dp * cp * pp != world:
        raise Refused(f"--dp {dp} × --cp {cp} × --pp {pp} is {dp * cp * pp} processes, but there are {world}")
    if options.batch % (dp * options.microbatches):
        shares = f"by --dp {dp}" + f" in {options.microbatches} microbatches" * (pp > 1)
        raise Refused(f"--batch {options.batch} texts cannot be shared equally {shares}")
    pieces = 2 * cp if options.layout == "zigzag" else cp
    if options.length % pieces:
        raise Refused(f"--length {options.length} cannot be cut into {pieces} pieces of one size for --cp {cp}")
    return init_device_mesh(options.device, (dp, cp, pp), mesh_dim_names=("data", "context", "pipeline"))


class Run:
    """Everything that a checkpoint holds, and how to make a step."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.drill, self.now = options, drill(options), -1  # now: the current step
        self.mesh = mesh_of(options)
        self.device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
        self.pieces = Pieces(self.mesh["context"], options.layout, options.length, self.device)
        alphabet, text = read_text()
        self.windows = Windows(text, options.length, options.seed)
        torch.manual_seed(options.seed)  # every process draws the whole model and keeps its share
        self.model = self.sharded(model_of(len(alphabet), options, self.pieces).to(self.device))
        self.optimizer = optimizer_of(self.model, options.lr)
        self.checkpoints = Checkpoints(options.out / "checkpoints")
        self.schedule = self.scheduled() if options.pp > 1 else None

    def sharded(self, model: nn.Sequential) -> nn.Module:
        """A gradient is the mean over the processes, which have equally many tokens."""
        pp = self.options.pp
        cuts = [len(model.layers) * stage // pp for stage in range(1, pp)]
        part = pipeline_stages(model, cuts, send="carry")[self.mesh.get_local_rank("pipeline")] if pp > 1 else model
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, self.options.dtype), reduce_dtype=torch.float32)
        shards = self.mesh["data", "context"]._flatten("shards")
        return fully_shard(part, mesh=shards, mp_policy=policy, reshard_after_forward=False if pp > 1 else None)

    def scheduled(self) -> Schedule1F1B:
        group = self.mesh["pipeline"].get_group()
        stage = PipelineStage(self.model, dist.get_rank(group), self.options.pp, self.device, group=group)
        schedule = Schedule1F1B(stage, self.options.microbatches, loss_fn=self.loss)
        # In the first step torch infers shapes, for which dropout draws random numbers. Do it now, so that a step has
        # the same random numbers whether or not it is the first after a restart.
        texts = self.options.batch // self.mesh["data"].size(), len(self.pieces.here)
        ids = torch.zeros(texts, dtype=torch.int64, device=self.device)
        self.piped(schedule, ids, ids)
        self.model.zero_grad()
        return schedule

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": model, "optimizer": optimizer, "windows": self.windows.state_dict()}

    def save(self, step: int) -> None:
        run = self

        class Drilled(Writer):
            def write_data(self, *arguments: Any) -> Any:
                written = super().write_data(*arguments)
                run.drill("checkpoint", step)
                return written

        self.checkpoints.save({**self.state(), "step": step}, step, Drilled)

    def load(self) -> int:
        """The number of steps that are done."""
        state = self.checkpoints.load(lambda: {**self.state(), "step": 0})
        if state is None:
            return 0
        loaded = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **loaded, options=FLAT)
        self.windows.load_state_dict(state["windows"])
        return state["step"]

    def loss(self, logits: Tensor, following: Tensor) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
        self.drill("step", self.now)
        return loss

    def gradients(self, step: int) -> Tensor:
        """Compute the gradients of the mean loss. Returns the loss of the tokens here, 0 before the last stage."""
        options, self.now = self.options, step
        torch.manual_seed(mixed(options.seed, step, dist.get_rank()))  # for dropout; a checkpoint has no random state
        texts = self.windows.take(options.batch).chunk(self.mesh.size(0))[self.mesh.get_local_rank("data")]
        ids, following = (texts.to(self.device)[:, self.pieces.here + ahead] for ahead in (0, 1))
        if self.schedule:
            return self.piped(self.schedule, ids, following)
        loss = self.loss(self.model(ids), following)
        loss.backward()
        return loss.detach()

    def piped(self, schedule: Schedule1F1B, ids: Tensor, following: Tensor) -> Tensor:
        stage, losses = self.mesh.get_local_rank("pipeline"), []
        inputs = (ids,) if stage == 0 else ()
        targets = {"target": following, "losses": losses} if stage == self.options.pp - 1 else {}
        schedule.step(*inputs, **targets)
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=self.device)

    def step(self, step: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * learning_rate(step, self.options.steps)
        loss = self.gradients(step)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def clip(self) -> None:
        """Clip the gradients of all stages together."""
        parameters = list(self.model.parameters())
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters]).full_tensor().square()
        dist.all_reduce(norm, group=self.mesh.get_group("pipeline"))
        nn.utils.clip_grads_with_norm_(parameters, self.options.clip, norm.sqrt())


class Curve:
    """losses.csv, one line per step, written by the first process; str() is the state of the run."""

    def __init__(self, path: Path, first: int):
        self.path, self.last = path, f"step {first}"
        rows = [line.split(",") for line in path.read_text().splitlines()[1:]] if path.exists() else []
        whole = (row for row in rows if len(row) == len(COLUMNS) and row[0].isdigit())  # a kill may leave half a line
        kept = [row for row in whole if int(row[0]) < first]
        replace_text(path, "".join(",".join(row) + "\n" for row in (COLUMNS, *kept)))

    def add(self, steps: range, losses: list[float], speed: float) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows((step, loss, round(speed)) for step, loss in zip(steps, losses, strict=True))
        self.last = f"step {steps.stop}  loss {losses[-1]:.4f}  {speed:,.0f} tokens/s"

    def __str__(self) -> str:
        return self.last


def train(run: Run) -> None:
    options, first, leads = run.options, run.load(), dist.get_rank() == 0
    path = options.out / "losses.csv"
    curve = by_first(lambda: Curve(path, first), path)
    if leads and first:
        say(f"continues from the checkpoint of step {first}")
    cuts = {*range(0, options.steps, options.report), *range(0, options.steps, options.every), options.steps}
    spans = [range(*ends) for ends in pairwise([first, *sorted(cut for cut in cuts if cut > first)])]
    for _, span in zip(progress([curve] * len(spans), "train") if leads else spans, spans):
        clock = time.perf_counter()
        losses = torch.stack([run.step(step) for step in span])
        dist.all_reduce(losses)
        means = (losses * options.pp / dist.get_world_size()).tolist()  # pieces have one size; waits for the device
        tokens = len(span) * options.batch * options.length
        by_first(partial(curve.add, span, means, tokens / (time.perf_counter() - clock)), path)
        if span.stop % options.every == 0 or span.stop == options.steps:
            run.save(span.stop)
    if leads:
        print(f"{curve}: {path}, {run.checkpoints.folder}")


def parse(arguments: list[str]) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    # No abbreviations: torchrun sees the options first and could take one for its own.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--dp", type=int, default=0, help="data parallel: processes that share the texts (all left)")
    parser.add_argument("--cp", type=int, default=1, help="context parallel: processes that share a text (%(default)s)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel: stages of the layers (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=0, help="of a step in a pipeline (as many as --pp)")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="zigzag", help="of a text (%(default)s)")
    parser.add_argument("--streams", type=int, default=4, help="residual streams (%(default)s)")
    parser.add_argument("--D", type=int, default=128, help=f"channels, a multiple of {HEAD_DIM} (%(default)s)")
    parser.add_argument("--depth", type=int, default=2, help="convolutions, attentions and MLPs (%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="characters of a text (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="texts of a step, of all processes (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=6e-3, help="the largest learning rate (%(default)s)")
    parser.add_argument("--clip", type=float, default=1.0, help="the largest norm of all gradients (%(default)s)")
    parser.add_argument("--dropout", type=float, default=0.0, help="after each MLP (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the texts (%(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--report", type=int, default=10, help="steps between lines of progress (%(default)s)")
    parser.add_argument("--fail-at", type=Drill.parse, action="append", default=[], metavar="WHERE:STEP[:RANK]")
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu", help="(%(default)s)")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, default=dtypes[gpu], help="of the layers (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("train_distributed"), help="folder (%(default)s)")
    options = parser.parse_args(arguments)
    if options.D % HEAD_DIM:
        parser.error(f"--D must be a multiple of {HEAD_DIM}, got {options.D}")
    for name in ("cp", "pp", "streams", "D", "depth", "length", "batch", "steps", "every", "report"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.pp > 3 * options.depth:
        parser.error(f"--pp {options.pp}: there are only {3 * options.depth} layers")
    options.microbatches = options.microbatches or options.pp
    options.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return options


def end_with(agent: int) -> None:
    """End when torchrun has ended: if it is killed it cannot end its workers, and a restart would have them twice."""

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    # torch warns against in-place changes of what a sharded module returns; nothing here makes any.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    if "RANK" not in os.environ:
        say("torchrun starts the processes: torchrun --standalone --nproc-per-node 2 examples/train_distributed.py")
        return 2
    if options.device == "cuda":
        here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if here > gpus:
            say(f"{here} processes of this machine cannot share {gpus} GPUs: try --device cpu")
            return 2
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    end_with(os.getppid())  # a torchrun that ended before this line is not seen here, but its store is not reached
    store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=REACHED)))
    store.set_timeout(dist.distributed_c10d.default_pg_timeout)
    # torchrun's default rendezvous uses one store for all attempts, which keeps addresses of lost workers.
    store = dist.PrefixStore(f"attempt {options.attempt}", store)
    backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    refused = None
    try:
        with held(options.out):
            train(Run(options))
    except Refused as error:
        refused = error
        if dist.get_rank() == 0:
            say(refused)
    dist.destroy_process_group()  # not after other errors: ranks could wait for each other
    return 2 if refused else 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # Skips Python's shutdown, in which a torch thread waiting for the interpreter lock sometimes aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
