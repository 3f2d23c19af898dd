"""What a run of the example may find in its folder: damaged checkpoints, another model, another run, no room."""

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import socket
from functools import partial

import pytest
import torch
import torch.distributed as dist
from processes import PROCESSES, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import get_args_parser
from torch.distributed.tensor import Shard, distribute_tensor
from training_runs import LENGTH, example, options, parts

TINY = ("--batch", 2, "--steps", 2, "--every", 2, "--report", 2)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def state(value):
    """Every process has a share of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.full((4000,), float(value)), mesh, [Shard(0)])
    return {"model": {"weight": weight}, "step": value}


def outcome(call):
    """What it returns, or why it is refused; and what was said."""
    said = []
    parts.say = said.append
    try:
        return call(), said
    except example.Refused as refused:
        return str(refused), said


def loaded(folder):
    found = parts.Checkpoints(folder).load(lambda: state(0))
    assert (found["model"]["weight"].to_local() == found["step"]).all()
    return found["step"]


def truncate(path):
    os.truncate(path / "__1_0.distcp", 1000)


def garble(path):
    """One byte of the last tensor: torch itself would not notice."""
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 255
    (path / "__0_0.distcp").write_bytes(data)


def make_a_file(path):
    shutil.rmtree(path)
    path.write_text("here was a folder")


# Damage to a checkpoint, and what is said of it.
DAMAGE = [
    (truncate, "__1_0.distcp: 1000 bytes, crc32 "),
    (garble, "__0_0.distcp: "),
    (lambda path: (path / ".metadata").unlink(), ".metadata: No such file or directory instead of "),
    (lambda path: (path / "sums.json").write_bytes(b"\xff["), "sums.json: is garbled"),
    (make_a_file, "sums.json: Not a directory"),
]


def after_damage(folder):
    """Damage of each kind to the last of two checkpoints; then to both."""
    for step in (2, 4):
        parts.Checkpoints(folder / "begun").save(state(step), step)
    found = []
    for nth, damages in enumerate([*([damage] for damage, _ in DAMAGE), [make_a_file, truncate]]):
        here = folder / str(nth)
        if dist.get_rank() == 0:
            shutil.copytree(folder / "begun", here)
            for step, damage in zip((4, 2), damages):
                damage(here / f"step-{step:09d}")
        dist.barrier()
        found.append((*outcome(partial(loaded, here)), names(here)))
    again = outcome(partial(loaded, here))
    return found, again


def test_a_damaged_checkpoint_is_named_and_kept_and_the_one_before_is_taken(tmp_path):
    (found, again), (others, _) = run(2, after_damage, tmp_path)
    for (step, told, left), (_, words) in zip(found, DAMAGE):
        assert step == 2
        assert len(told) == 1 and told[0].partition(" is damaged, ")[2].startswith(words), told
        assert told[0].endswith("step-000000004.damaged") and "/step-000000004 is" in told[0]
        assert left == ["step-000000002", "step-000000004.damaged"]
    refusal, told, left = found[-1]
    assert refusal.endswith(f"/{len(DAMAGE)} has damaged checkpoints only: choose another --out to start anew")
    assert len(told) == 2 and left == ["step-000000002.damaged", "step-000000004.damaged"]
    assert again == (refusal, [])
    assert [step for step, _, _ in others] == [step for step, _, _ in found]


# Another model: torch's load would fill the tensors whose names fit.
OTHERS = {
    ("--depth", 1): "model.layers.3.alpha is [3] there and missing here",
    ("--streams", 2): "model.head.bias is [4] there and [2] here",
    ("--length", 24): "model.start.positions.weight is [16, 32] there and [24, 32] here",
}
# Wrong for two processes
MESHES = {
    ("--dp", 3): "--dp 3 × --cp 1 × --pp 1 is 3 processes, but there are 2",
    ("--cp", 2, "--length", 15): "--length 15 cannot be cut into 4 pieces of one size for --cp 2",
    ("--batch", 1): "--batch 1 texts cannot be shared equally by --dp 2",
}


def as_others(folder):
    """What other models are told of a checkpoint; then wrong meshes, and processes whose options differ."""
    deep = partial(options, folder, *TINY, "--depth", 2)
    example.train(example.Run(deep()))
    models = [outcome(example.Run(deep(*other)).load)[0] for other in OTHERS]
    own = [("--seed", dist.get_rank()), ("--length", LENGTH + dist.get_rank())]
    meshes = [outcome(partial(example.mesh_of, deep(*each)))[0] for each in (*MESHES, *own)]
    return models, meshes, names(folder)


def test_another_model_and_other_options_are_refused(tmp_path):
    help = "--D, --depth, --streams and --length must be those of that run"
    path = tmp_path / "checkpoints" / "step-000000002"
    models = [f"{path} is of another model, {difference}: {help}" for difference in OTHERS.values()]
    words = "must be the same on all processes, got {} on process 0 and {} on process 1"
    expected = [*MESHES.values(), f"--seed {words.format(0, 1)}", f"--length {words.format(16, 17)}"]
    assert run(2, as_others, tmp_path) == [(models, expected, ["checkpoints", "losses.csv"])] * 2
    assert names(tmp_path / "checkpoints") == ["step-000000002"]


@contextlib.contextmanager
def no_room(rank):
    """Files of this process, if it is that one, cannot grow beyond 5,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def without_room(folder):
    """For the share of one process; for the losses."""
    checkpoints, path = parts.Checkpoints(folder), folder / "losses.csv"
    checkpoints.save(state(2), 2)
    with no_room(1):
        told = outcome(partial(checkpoints.save, state(4), 4))
    curve = example.by_first(lambda: example.Curve(path, 0), path)
    with no_room(0):
        told += outcome(partial(example.by_first, partial(curve.add, range(500), [0.125] * 500, 7), path))
    return told, outcome(partial(loaded, folder)), names(folder)


def test_no_room_is_one_sentence_on_all_processes(tmp_path):
    told = f"{tmp_path / 'step-000000004'} could not be written: File too large (process 1)"
    told = (told, [], f"{tmp_path / 'losses.csv'}: File too large", [])
    assert run(2, without_room, tmp_path) == [(told, (2, []), ["losses.csv", "step-000000002"])] * 2


def is_free(path):
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def held(folder):
    """Which of the locks are free while this run has the folder."""
    with parts.held(folder):
        free = [is_free(folder / name) for name in ("lock", "writers")]
        dist.barrier()
        return free


def beside_others(folder):
    """In folders that are in use, which are then left; and in a free one."""
    parts.PATIENCE = 0.2
    return [outcome(partial(held, folder / name)) for name in ("lock", "writers", "free")]


def test_a_folder_in_use_is_refused_and_its_holder_named(tmp_path):
    holders = {"lock": "process 7 on node3", "writers": "processes of an earlier run"}
    with contextlib.ExitStack() as files:
        for name, content in (("lock", holders["lock"]), ("writers", "")):
            (tmp_path / name).mkdir()
            file = files.enter_context((tmp_path / name / name).open("a"))
            file.write(content)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_SH)
        (*first, free), (*second, _) = run(2, beside_others, tmp_path)
    assert free == ([False, False], [])
    for (name, holder), (refused, told), (other, _) in zip(holders.items(), first, second, strict=True):
        used = f"{tmp_path / name} is in use by {holder}"
        assert refused == other == f"{used}: end it, or choose another --out"
        assert told == [f"{used}: waiting for its end, 0.2 s at most"]
        assert is_free(tmp_path / name / "lock") and is_free(tmp_path / name / "writers")


def _agent(end):
    if os.fork() == 0:
        example.end_with(os.getppid())
        end.send("started")
        signal.pause()
    signal.pause()


def test_a_worker_ends_when_its_agent_is_killed():
    here, there = PROCESSES.Pipe(duplex=False)
    agent = PROCESSES.Process(target=_agent, args=(there,))
    agent.start()
    there.close()
    assert here.recv() == "started"
    agent.kill()
    agent.join()
    assert here.poll(600)
    with pytest.raises(EOFError):  # no process is left that could send
        here.recv()


def test_a_worker_ends_that_starts_after_its_agent_was_killed(tmp_path, monkeypatch):
    """It has another parent by then. torchrun's store is gone, and the worker does not wait for it for half an hour."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    gone = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
    for name, value in {**gone, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(example, "REACHED", 1)
    with pytest.raises(dist.DistNetworkError):
        example.main(["--device", "cpu", "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_losses_before_the_checkpoint_are_kept_whatever_ends_the_process(tmp_path, monkeypatch):
    path = tmp_path / "losses.csv"
    whole = "step,loss,tokens_per_second\n0,3.5,7\n1,3.25,7\n"
    path.write_text(f"{whole}2,3.0,7\n1")  # half a line, left by a kill
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: os._exit(0) if os.getpid() != here else None)
        here = os.getpid()
        if os.fork() == 0:
            example.Curve(path, 2)
        os.wait()
    assert path.read_text() == f"{whole}2,3.0,7\n1"
    example.Curve(path, 2).add(range(2, 3), [2.5], speed=7)
    assert path.read_text() == f"{whole}2,2.5,7\n"
    assert not list(tmp_path.glob("*.partial"))


def test_torchrun_takes_no_option_for_one_of_its_own(tmp_path):
    """It looks for its own after the script too, abbreviated ones included."""
    ours = [f"--{name.replace('_', '-')}" for name in vars(options(tmp_path))]
    theirs = [name for action in get_args_parser()._actions for name in action.option_strings]
    assert [(mine, other) for mine in ours for other in theirs if other.startswith(mine)] == []
