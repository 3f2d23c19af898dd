"""Workers and torchrun itself are killed at random moments: the run ends with the bits of an undisturbed one.

MHC_OPS_KILLS=50 MHC_OPS_SEED=3 pytest -s tests/distributed/test_kills.py makes 50 kills in a run of 200 steps.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import WITHOUT_GPUS
from stored import checkpoint, different

from mhc_ops.testing import cases

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLS = int(os.environ.get("MHC_OPS_KILLS", "2"))
STEPS = 4 * KILLS
PATIENCE = 600  # seconds without a new step
OPTIONS = ("--D", 32, "--depth", 1, "--length", 16, "--batch", 4, "--steps", STEPS, "--every", 3, "--report", 1)
OPTIONS += ("--dropout", 0.1, "--device", "cpu")


class Torchrun(subprocess.Popen):
    """The example on two processes. Its workers end with it."""

    def __init__(self, folder):
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--monitor-interval", 0.1)
        script = ("--max-restarts", KILLS, EXAMPLES / "train_distributed.py", *OPTIONS, "--out", folder)
        environment = {**os.environ, **WITHOUT_GPUS, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
        log = (folder / "log").open("a")
        super().__init__([sys.executable, *map(str, (*torchrun, *script))], env=environment, stdout=log, stderr=log)

    def workers(self):
        found = []
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                _, fields = status.read_text().rsplit(") ", 1)
            except OSError:  # it has just ended
                continue
            state, parent = fields.split()[:2]
            if int(parent) == self.pid and state != "Z":
                found.append(int(status.parent.name))
        return sorted(found)


def steps_made(folder):
    path = folder / "losses.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def holder_of(folder):
    """The process that the folder's lock names, which may have ended."""
    return int(re.match(r"process (\d+) on ", (folder / "lock").read_text())[1])


def kill_agent(run, folder):
    """Kill torchrun and start another at once. The worker that holds the folder is stopped before, so that it outlives
    its torchrun until the next run has found it there."""
    holder = holder_of(folder)
    stopped = holder in run.workers()
    if stopped:
        os.kill(holder, signal.SIGSTOP)
    run.kill()
    run.wait()
    run = Torchrun(folder)
    if stopped:
        words, until = f"{folder} is in use by process {holder} on ", time.monotonic() + PATIENCE
        while words not in (folder / "log").read_text():
            assert run.poll() is None and time.monotonic() < until, f"the next run did not say: {words}"
            time.sleep(0.01)
        os.kill(holder, signal.SIGCONT)
    return run


def killed(folder, moments):
    """Run to the end. moments: (step, whom) in order. Returns whom it killed."""
    folder.mkdir()
    run, done, moments, seen, last = Torchrun(folder), [], list(moments), None, time.monotonic()
    while run.poll() is None:
        made, workers = steps_made(folder), run.workers()
        if (made, workers) != seen:
            seen, last = (made, workers), time.monotonic()
        assert time.monotonic() - last < PATIENCE, (folder / "log").read_text()[-4000:]
        if moments and made >= moments[0][0] and len(workers) == 2:
            _, whom = moments.pop(0)
            if whom == "agent":
                run = kill_agent(run, folder)
            else:
                os.kill(workers[whom], signal.SIGKILL)
                while workers[whom] in run.workers():
                    time.sleep(0.01)
            done.append(whom)
        time.sleep(0.01)
    assert run.returncode == 0, (folder / "log").read_text()[-4000:]
    return done


def losses(folder):
    """The losses as text: the same digits are the same bits."""
    return [line.rsplit(",", 1)[0] for line in (folder / "losses.csv").read_text().splitlines()]


@pytest.mark.thorough
def test_kills_at_drawn_moments_change_no_bit(tmp_path):
    drawn = random.Random(f"kills {cases.SEED}")
    whom = ["agent", drawn.randrange(2)] * KILLS
    whom = drawn.sample(whom[: max(KILLS, 2)], KILLS)
    moments = sorted(drawn.randrange(1, STEPS - 1) for _ in whom)
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    done = killed(disturbed, zip(moments, whom))
    assert killed(undisturbed, []) == []
    agents = done.count("agent")
    print(f"seed {cases.SEED}: {len(done)} of {KILLS} kills, {agents} of torchrun, {len(done) - agents} of workers")
    assert done == whom, (disturbed / "log").read_text()[-4000:]
    assert losses(disturbed) == losses(undisturbed) and len(losses(disturbed)) == STEPS + 1
    expected, found = checkpoint(undisturbed, STEPS), checkpoint(disturbed, STEPS)
    assert different(expected, found) == [] and len(expected) > 50
    left = sorted(path.suffix for path in (disturbed / "checkpoints").iterdir())
    assert left == ["", ""]  # no checkpoint is unfinished or damaged
