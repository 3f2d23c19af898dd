"""What a run of the example finds in its folder: damaged checkpoints, those of another model, another run, no room."""

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import PROCESSES, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import get_args_parser
from torch.distributed.tensor import Shard, distribute_tensor

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import distributed_lm as parts  # noqa: E402
import train_distributed as example  # noqa: E402

TINY = ("--D", 32, "--depth", 1, "--length", 16, "--batch", 2, "--every", 2, "--report", 2, "--device", "cpu")


def options(folder, *arguments):
    return example.parse([*map(str, (*TINY, *arguments, "--out", folder))])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def state(value):
    """Every process has a share of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = distribute_tensor(torch.full((4000,), float(value)), mesh, [Shard(0)])
    return {"model": {"weight": weight}, "step": value}


def loaded(folder):
    """Which step it goes on from, or why that is refused; what was said."""
    told = []
    parts.say = told.append
    try:
        found = parts.Checkpoints(folder).load(lambda: state(0))
    except example.Refused as refused:
        return str(refused), told
    assert (found["model"]["weight"].to_local() == found["step"]).all()
    return found["step"], told


# Damage to a checkpoint, and what is said of it.


def truncated(path):
    os.truncate(path / "__1_0.distcp", 1000)


def garbled(path):
    """One byte of the last tensor: torch itself would not notice."""
    place = (path / "__0_0.distcp").stat().st_size // 2
    with (path / "__0_0.distcp").open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 255]))


def garbled_metadata(path):
    (path / ".metadata").write_bytes(b"nothing")


def emptied(path):
    for file in path.iterdir():
        file.unlink()


def without_a_shard(path):
    (path / "__1_0.distcp").unlink()


def without_metadata(path):
    (path / ".metadata").unlink()


def garbled_sums(path):
    (path / "sums.json").write_bytes(b"\xff[")


def a_file(path):
    shutil.rmtree(path)
    path.write_text("here was a folder")


DAMAGE = {
    truncated: "__1_0.distcp: 1000 bytes, crc32 ",
    garbled: "__0_0.distcp: ",
    garbled_metadata: ".metadata: 7 bytes, crc32 ",
    emptied: "sums.json: No such file or directory",
    without_a_shard: "__1_0.distcp: No such file or directory instead of ",
    without_metadata: ".metadata: No such file or directory instead of ",
    garbled_sums: "sums.json: is garbled",
    a_file: "sums.json: Not a directory",
}


def begun(folder):
    """Checkpoints of steps 2 and 4."""
    for step in (2, 4):
        parts.Checkpoints(folder).save(state(step), step)


def after_damage(folder):
    """Of each kind to the last checkpoint; then to both."""
    begun(folder / "begun")
    found = []
    for nth, damages in enumerate([*([damage] for damage in DAMAGE), [emptied, truncated]]):
        here = folder / str(nth)
        if dist.get_rank() == 0:
            shutil.copytree(folder / "begun", here)
            for step, damage in zip((4, 2), damages):
                damage(here / f"step-{step:09d}")
        dist.barrier()
        found.append((*loaded(here), names(here)))
    # What was set aside is not in the way of the same step, nor of the next one that is damaged.
    parts.Checkpoints(folder / "0").save(state(4), 4)
    if dist.get_rank() == 0:
        truncated(folder / "0" / "step-000000004")
    dist.barrier()
    return [*found, (*loaded(folder / "0"), names(folder / "0"))], loaded(folder / str(nth))


def test_a_damaged_checkpoint_is_named_and_kept_and_the_one_before_is_taken(tmp_path):
    (found, again), (others, _) = run(2, after_damage, tmp_path)
    for (step, told, left), words in zip(found, DAMAGE.values()):
        assert step == 2
        assert len(told) == 1 and told[0].partition(" is damaged, ")[2].startswith(words), told
        assert told[0].endswith("step-000000004.damaged") and "/step-000000004 is" in told[0]
        assert left == ["step-000000002", "step-000000004.damaged"]
    refusal, told, left = found[len(DAMAGE)]
    assert refusal.endswith("/8 has damaged checkpoints only: choose another --out to start anew")
    assert len(told) == 2 and left == ["step-000000002.damaged", "step-000000004.damaged"]
    assert again == (refusal, [])
    assert found[-1][0] == 2
    assert found[-1][2] == ["step-000000002", "step-000000004.damaged", "step-000000004.damaged1"]
    assert [step for step, _, _ in others] == [step for step, _, _ in found]


# Another model, which torch's load would fill as far as the names go.
OTHERS = {
    ("--depth", 1): "model.layers.3.alpha is [3] there and missing here",
    ("--streams", 2): "model.head.bias is [4] there and [2] here",
    ("--length", 24): "model.start.positions.weight is [16, 32] there and [24, 32] here",
}


def as_others(folder):
    begun = options(folder, "--depth", 2, "--steps", 2)
    example.train(example.Run(begun))
    return [refusal(example.Run(options(folder, "--depth", 2, *other)).load) for other in OTHERS], names(folder)


def refusal(call):
    try:
        call()
    except example.Refused as refused:
        return str(refused)
    return "nothing"


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    help = "--D, --depth, --streams and --length must be those of that run"
    path = tmp_path / "checkpoints" / "step-000000002"
    expected = [f"{path} is of another model, {difference}: {help}" for difference in OTHERS.values()]
    assert run(2, as_others, tmp_path) == [(expected, ["checkpoints", "losses.csv"])] * 2
    assert names(tmp_path / "checkpoints") == ["step-000000002"]


def with_own_options(folder):
    rank = dist.get_rank()
    return [
        refusal(partial(example.mesh_of, options(folder, *own))) for own in (("--seed", rank), ("--length", 16 + rank))
    ]


def test_processes_with_other_options_are_told(tmp_path):
    words = "must be the same on all processes, got {} on process 0 and {} on process 1"
    expected = [f"--seed {words.format(0, 1)}", f"--length {words.format(16, 17)}"]
    assert run(2, with_own_options, tmp_path) == [expected] * 2


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
    checkpoints, path, told = parts.Checkpoints(folder), folder / "losses.csv", []
    checkpoints.save(state(2), 2)
    for rank in (1, 0):
        with no_room(rank):
            told.append(refusal(partial(checkpoints.save, state(4), 4)))
    curve = example.by_first(lambda: example.Curve(path, 0), path)
    with no_room(0):
        told.append(refusal(partial(example.by_first, partial(curve.add, range(500), [0.125] * 500, 7), path)))
    return told, loaded(folder), names(folder)


def test_no_room_is_one_sentence_on_all_processes(tmp_path):
    path = tmp_path / "step-000000004"
    told = [
        f"{path} could not be written: File too large (process 1)",
        f"{path} could not be written: File too large (process 0)",
        f"{tmp_path / 'losses.csv'}: File too large",
    ]
    assert run(2, without_room, tmp_path) == [(told, (2, []), ["losses.csv", "step-000000002"])] * 2


def beside_another(folder, patience):
    parts.PATIENCE, told = patience, []
    parts.say = told.append
    try:
        with parts.held(folder):
            free = [_is_free(folder / name) for name in ("lock", "writers")]
            dist.barrier()
            return "held", told, free
    except example.Refused as refused:
        return str(refused), told, []


def _is_free(path):
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.mark.parametrize("name", ["lock", "writers"])
def test_a_folder_in_use_is_refused_and_its_holder_named(name, tmp_path):
    holder = {"lock": "process 7 on node3", "writers": "processes of an earlier run"}[name]
    with (tmp_path / name).open("a") as file:
        file.write("process 7 on node3" if name == "lock" else "")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_SH)
        (first, told, _), (second, _, _) = run(2, beside_another, tmp_path, 0.2)
    assert first == second == f"{tmp_path} is in use by {holder}: end it, or choose another --out"
    assert told == [f"{tmp_path} is in use by {holder}: waiting for its end, 0.2 s at most"]
    assert run(2, beside_another, tmp_path, 60) == [("held", [], [False, False])] * 2
    assert _is_free(tmp_path / "lock") and _is_free(tmp_path / "writers")


def _agent(end):
    """As torchrun: a process with a worker."""
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
    assert here.poll(60)
    with pytest.raises(EOFError):  # the last process that could have sent something
        here.recv()


def test_losses_before_the_checkpoint_are_kept_whatever_ends_the_process(tmp_path, monkeypatch):
    path = tmp_path / "losses.csv"
    whole = "step,loss,tokens_per_second\n0,3.5,7\n1,3.25,7\n"
    path.write_text(f"{whole}2,3.0,7\n1")  # half of a line, in which somebody was killed
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
    """It looks for its own in what stands behind the script too, shortened ones included."""
    ours = [f"--{name.replace('_', '-')}" for name in vars(options(tmp_path))]
    assert "--streams" in ours and "--out" in ours
    assert get_args_parser().parse_args(["script.py", *ours]).training_script_args == ours
    theirs = [name for action in get_args_parser()._actions for name in action.option_strings]
    assert [(mine, other) for mine in ours for other in theirs if other.startswith(mine)] == []


def test_an_option_is_not_shortened(tmp_path, capsys):
    """torchrun might know it by the same letters."""
    with pytest.raises(SystemExit):
        options(tmp_path, "--st", 2)
    assert "unrecognized arguments: --st 2" in capsys.readouterr().err
