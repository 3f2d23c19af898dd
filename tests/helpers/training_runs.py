"""Runs of examples/train_distributed.py with tiny models: their options, their processes, and what they leave."""

import csv
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from processes import WITHOUT_GPUS
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import distributed_lm as parts  # noqa: E402, F401
import train_distributed as example  # noqa: E402

LENGTH = 16
TINY = ("--D", 32, "--depth", 1, "--length", LENGTH, "--device", "cpu")


def words(folder, arguments):
    return [*map(str, (*TINY, *arguments, "--out", folder))]


def options(folder, *arguments):
    return example.parse(words(folder, arguments))


@contextmanager
def torchrun(folder, restarts, *arguments):
    """The example on two processes, which write to `log` in the folder. They end with the block."""
    launcher = ("--standalone", "--nproc-per-node", 2, "--monitor-interval", 0.1, "--max-restarts", restarts)
    command = [*map(str, (sys.executable, "-m", "torch.distributed.run", *launcher, EXAMPLES / "train_distributed.py"))]
    environment = {**os.environ, **WITHOUT_GPUS, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    with (folder / "log").open("a") as log:
        run = subprocess.Popen([*command, *words(folder, arguments)], env=environment, stdout=log, stderr=log)
    try:
        yield run
    finally:
        run.kill()  # its workers end with it
        run.wait()


def losses(folder):
    """The loss of each step as text: the same digits are the same bits."""
    with (folder / "losses.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    assert [int(row[0]) for row in rows] == list(range(len(rows)))
    return [row[1] for row in rows]


def assert_same_run(found, expected, steps):
    """Both made these steps, with the same bits. Of the checkpoints that a run has made, it kept the last two."""
    assert losses(found) == losses(expected) and len(losses(found)) == steps
    one, other = (tree_flatten(_checkpoint(folder, steps)) for folder in (found, expected))
    assert one[1] == other[1] and len(one[0]) > 50
    for mine, theirs in zip(one[0], other[0]):
        assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
    last = f"step-{steps:09d}"
    left = sorted(path.name for path in (found / "checkpoints").iterdir())  # none is unfinished or damaged
    assert len(left) == 2 and left[1] == last and not Path(left[0]).suffix, left


def _checkpoint(folder, step):
    dcp_to_torch_save(folder / "checkpoints" / f"step-{step:09d}", folder / "last.pt")
    return torch.load(folder / "last.pt", weights_only=False)
