"""Run a function in several processes that are one gloo group, without GPUs: results = run(2, function, argument).

run_each shares one start of processes among several checks. run_as_torchrun and run_alone start processes as users do,
output_of starts another program.
"""

import faulthandler
import multiprocessing
import os
import subprocess
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch
import torch.distributed as dist

WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}  # there may be fewer of them than processes
LIMIT = 800  # seconds in which a function must end; a collective has 600, so that it says first where it waited

# Each process is a fork of one that has only imported torch, which takes seconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "mhc_ops"])


def run(world, function, *arguments):
    """The results of `function(*arguments)` on each rank. Function and arguments must be picklable.

    An error of one rank is raised here with that rank's traceback. All processes have ended when this returns."""
    with TemporaryDirectory() as folder:
        return _run(world, WITHOUT_GPUS, _in_group, world, str(Path(folder) / "store"), function, arguments)


def run_each(world, *checks):
    """Run these checks, which assert, one after the other on each rank."""
    run(world, _each, checks)


def _each(checks):
    for check in checks:
        check()


def run_as_torchrun(world, function, *arguments):
    """`run` with the variables and the store of torchrun; the function makes the group."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    of_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return _run(world, WITHOUT_GPUS | address | of_torchrun, _in_no_group, function, arguments)


def run_alone(function, *arguments):
    return _run(1, {}, function, *arguments)[0]


def output_of(*command, **environment):
    """What this program prints, which ends with 0. More threads would wait for each other beside parallel tests."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def _run(world, environment, function, *arguments):
    ends, processes = [], []
    for rank in range(world):
        here, there = PROCESSES.Pipe(duplex=False)
        of_rank = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)} if environment else {}
        given = (there, environment | of_rank, function, arguments)
        processes.append(PROCESSES.Process(target=_process, args=given, daemon=True))
        processes[-1].start()
        there.close()
        ends.append(here)
    try:
        return _results(ends)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(ends):
    results, failures, until = {}, {}, monotonic() + LIMIT
    while len(results) < len(ends):
        waiting = {end: rank for rank, end in enumerate(ends) if rank not in results}
        ready = wait(list(waiting), timeout=max(0, until - monotonic()))
        if not ready:
            failures |= dict.fromkeys(waiting.values(), "has not ended")
            break
        for end in ready:
            rank = waiting[end]
            try:
                failed, results[rank] = end.recv()
            except EOFError:
                failed, results[rank] = True, "ended without a result"
            if failed:
                failures[rank] = results[rank]
                until = min(until, monotonic() + 10)  # another rank's error, on its way, may be the cause
    if failures:
        raise RuntimeError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
    return [results[rank] for rank in range(len(ends))]


def _process(end, environment, function, arguments):
    faulthandler.enable(all_threads=True)  # what ends a process in C++ says where Python was
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        result = (False, function(*arguments))
    except BaseException:
        result = (True, traceback.format_exc())
    # Without torch's reducers: their shared memory would have to outlive this process.
    multiprocessing.reduction.ForkingPickler._extra_reducers.clear()
    end.send(result)
    end.close()


def _in_group(world, store, function, arguments):
    rank, limit = int(os.environ["RANK"]), timedelta(seconds=600)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(store, world), timeout=limit)
    return _in_no_group(function, arguments)


def _in_no_group(function, arguments):
    result = function(*arguments)
    if dist.is_initialized():
        dist.barrier()  # no rank leaves while another waits for it
    return result
