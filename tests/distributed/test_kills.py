"""Workers and torchrun itself are killed at random moments: the run ends with the bits of an undisturbed one.

MHC_OPS_KILLS=50 MHC_OPS_SEED=3 pytest -s tests/distributed/test_kills.py makes 50 kills in a run of 200 steps.
"""

import os
import random
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from training_runs import assert_same_run, torchrun

from mhc_ops.testing import cases

KILLS = int(os.environ.get("MHC_OPS_KILLS", "2"))
STEPS = 4 * KILLS
PATIENCE = 600  # seconds without a new step
OPTIONS = (KILLS, "--batch", 4, "--steps", STEPS, "--every", 3, "--report", 1, "--dropout", 0.1)


def workers_of(run):
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, fields = status.read_text().rsplit(") ", 1)
        except OSError:  # it has just ended
            continue
        state, parent = fields.split()[:2]
        if int(parent) == run.pid and state != "Z":
            found.append(int(status.parent.name))
    return sorted(found)


def steps_made(folder):
    path = folder / "losses.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def after_a_kill_of_torchrun(run, folder, started):
    """The torchrun that is started at once after it. The worker that the folder's lock names is stopped before, so that
    it outlives its torchrun until the next run has found it there."""
    holder = int(re.match(r"process (\d+) on ", (folder / "lock").read_text())[1])  # it may have ended
    stopped = holder in workers_of(run)
    if stopped:
        os.kill(holder, signal.SIGSTOP)
    try:
        run.kill()
        run.wait()
        run = started.enter_context(torchrun(folder, *OPTIONS))
        words, until = f"{folder} is in use by process {holder} on ", time.monotonic() + PATIENCE
        while stopped and words not in (folder / "log").read_text():
            assert run.poll() is None and time.monotonic() < until, f"the next run did not say: {words}"
            time.sleep(0.01)
    finally:
        if stopped:
            os.kill(holder, signal.SIGCONT)
    return run


def killed(folder, moments):
    """Run to the end. moments: (step, whom) in order. Returns whom it killed."""
    folder.mkdir()
    done, moments, seen, last = [], list(moments), None, time.monotonic()
    with ExitStack() as started:
        run = started.enter_context(torchrun(folder, *OPTIONS))
        while run.poll() is None:
            made, workers = steps_made(folder), workers_of(run)
            if (made, workers) != seen:
                seen, last = (made, workers), time.monotonic()
            assert time.monotonic() - last < PATIENCE, (folder / "log").read_text()[-4000:]
            if moments and made >= moments[0][0] and len(workers) == 2:
                _, whom = moments.pop(0)
                if whom == "agent":
                    run = after_a_kill_of_torchrun(run, folder, started)
                else:
                    os.kill(workers[whom], signal.SIGKILL)
                    while workers[whom] in workers_of(run):
                        time.sleep(0.01)
                done.append(whom)
            time.sleep(0.01)
    assert run.returncode == 0, (folder / "log").read_text()[-4000:]
    return done


@pytest.mark.thorough
def test_kills_at_drawn_moments_change_no_bit(tmp_path):
    drawn = random.Random(f"kills {cases.SEED}")
    whom = ["agent", drawn.randrange(2)] * KILLS
    whom = drawn.sample(whom[: max(KILLS, 2)], KILLS)
    moments = sorted(drawn.randrange(1, STEPS - 1) for _ in whom)
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    done = killed(disturbed, zip(moments, whom))
    agents = done.count("agent")
    print(f"seed {cases.SEED}: {len(done)} of {KILLS} kills, {agents} of torchrun, {len(done) - agents} of workers")
    assert done == whom, (disturbed / "log").read_text()[-4000:]
    assert killed(undisturbed, []) == []
    assert_same_run(disturbed, undisturbed, STEPS)
