"""The example that trains on many processes: every mesh learns the same, and a lost worker changes no bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import run
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_distributed as example  # noqa: E402

STEPS = 8
TINY = ("--D", 32, "--depth", 1, "--length", 16, "--batch", 4, "--steps", STEPS, "--every", 3, "--report", 2)


def options(folder, *arguments):
    return example.parse([*map(str, (*TINY, *arguments, "--out", folder))])


def losses(folder):
    lines = (folder / "losses.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == list(range(STEPS))
    return [float(line.split(",")[1]) for line in lines]


def last_checkpoint(folder):
    """All that is in it: flat, tensors and numbers by name."""
    dcp_to_torch_save(folder / "checkpoints" / f"step-{STEPS:09d}", folder / "last.pt")
    return dict(_flat(torch.load(folder / "last.pt", weights_only=False), ""))


def _flat(value, name):
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(inner, f"{name}/{key}")
    else:
        yield name, value


def _train(folder, *arguments):
    example.train(options(folder, *arguments))


def _gradients(folder, *mesh):
    """Of the first step: the loss and all gradients, whole."""
    training = example.Run(options(folder, *mesh))
    loss = training.gradients(0)
    torch.distributed.all_reduce(loss)
    gradients = {name: p.grad.full_tensor() for name, p in training.model.named_parameters()}
    return loss / torch.distributed.get_world_size(), gradients


def _refusal(folder, *arguments):
    try:
        _train(folder, *arguments)
    except example.Refused as refused:
        return str(refused)


def _world(folder, meshes):
    """What is to be seen of one number of processes: a world of them costs seconds."""
    results = {}
    for mesh in meshes:
        results[mesh] = _gradients(folder, *mesh)
        _train(folder / name(mesh), *mesh)
    return results


def _four(folder):
    """Also a run that ends between two checkpoints."""
    results = _world(folder, MESHES[4])
    training = example.Run(options(folder / "ended"))
    curve = example.Curve(folder / "ended" / "losses.csv", 0) if torch.distributed.get_rank() == 0 else None
    for step in range(5):
        loss = training.step(step)
        torch.distributed.all_reduce(loss)
        if curve:
            curve.add(range(step, step + 1), [loss.item() / torch.distributed.get_world_size()], speed=0)
        if step + 1 == 3:
            training.save(step + 1)
    return results


def _two(folder):
    """Also what four have begun, a run that others are compared with, and what is refused."""
    results = _world(folder, MESHES[2])
    _train(folder / "ended")
    _train(folder / "undisturbed", *DROPOUT)
    _train(folder / "bf16", "--dtype", "bfloat16")
    return results, [_refusal(folder / "refused", *arguments) for arguments in REFUSED]


MESHES = {
    1: [()],
    2: [("--dp", 2), ("--cp", 2)],
    4: [("--dp", 4), ("--cp", 4, "--layout", "contiguous"), ("--dp", 2, "--cp", 2)],
}
DROPOUT = ("--dropout", 0.1)
REFUSED = {
    ("--dp", 3): "--dp 3 × --cp 1 is 3 processes, but there are 2",
    ("--cp", 2, "--length", 15): "--length 15 cannot be cut into 4 pieces of one size for --cp 2",
    ("--batch", 1): "--batch 1 texts cannot be shared equally by --dp 2",
}


def name(mesh):
    return "".join(map(str, mesh)) or "one"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, results by mesh, what was refused)"""
    folder = tmp_path_factory.mktemp("runs")
    one, four = (run(world, function, folder)[0] for world, function in ((1, _one), (4, _four)))
    two, refused = run(2, _two, folder)[0]
    return folder, {**one, **two, **four}, refused


def _one(folder):
    return _world(folder, MESHES[1])


def test_lost_workers_change_no_bit(ran, tmp_path):
    """One is killed in a step, then the first one in a checkpoint: all start again by themselves, twice from step 3."""
    undisturbed = ran[0] / "undisturbed"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    restarts = ("--max-restarts", 2, "--monitor-interval", 0.1)
    drills = ("--fail-at", "step:4", "--fail-at", "checkpoint:6:0")
    script = EXAMPLES / "train_distributed.py"
    done = _python(*torchrun, *restarts, script, *TINY, *DROPOUT, *drills, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("(exitcode: -9)") == 2
    assert done.stderr.count("goes on from the checkpoint of step 3") == 2
    assert losses(tmp_path) == losses(undisturbed)
    expected, found = last_checkpoint(undisturbed), last_checkpoint(tmp_path)
    assert expected.keys() == found.keys() and len(expected) > 50
    assert [key for key in expected if not _same(expected[key], found[key])] == []
    # Broken ones and old ones are gone.
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000000006", "step-000000008"]


def _same(expected, found):
    return torch.equal(expected, found) if isinstance(expected, torch.Tensor) else expected == found


def _python(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.parametrize("mesh", [*MESHES[2], *MESHES[4]], ids=name)
def test_losses_and_gradients_are_those_of_one_process(mesh, ran):
    folder, results, _ = ran
    (expected_loss, expected), (loss, gradients) = results[()], results[mesh]
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradients, expected)
    torch.testing.assert_close(losses(folder / name(mesh)), losses(folder / name(())))


def test_a_run_goes_on_with_fewer_processes(ran):
    folder = ran[0]
    torch.testing.assert_close(losses(folder / "ended"), losses(folder / name(())))


def test_layers_in_bf16_learn_the_same(ran):
    folder = ran[0]
    torch.testing.assert_close(losses(folder / "bf16"), losses(folder / name(())), rtol=2**-8, atol=0)


def test_every_window_is_taken_once_in_a_pass():
    """Also by batches that do not divide the passes, and by a run that goes on with other ones."""
    text = torch.arange(10 * 7 + 4)
    first, others = example.Windows(text, 7, seed=1), example.Windows(text, 7, seed=1)
    taken = torch.cat([first.take(4) for _ in range(5)])
    passes = taken[:, 0].view(2, 10)
    assert torch.equal(passes.sort().values, torch.arange(0, 70, 7).expand(2, 10))
    assert not torch.equal(*passes)
    assert torch.equal(taken - taken[:, :1], torch.arange(8).expand(20, 8))
    head = others.take(6)
    third = example.Windows(text, 7, seed=1)
    third.load_state_dict(others.state_dict())
    assert torch.equal(torch.cat([head, third.take(3), third.take(11)]), taken)


def test_wrong_meshes_are_told(ran):
    assert ran[2] == list(REFUSED.values())


def test_another_text_is_no_continuation():
    windows = example.Windows(torch.arange(100), 7, seed=1)
    with pytest.raises(example.Refused, match="--seed is 1, but the run to go on with has 2"):
        windows.load_state_dict(example.Windows(torch.arange(100), 7, seed=2).state_dict())


def test_without_torchrun_it_says_so(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert example.main([]) == 2
    assert capsys.readouterr().err.startswith("torchrun starts the processes: torchrun --nproc-per-node 2 examples")


@pytest.mark.parametrize("drill", ["step", "step:x", "backward:3", "step:3:1:1"])
def test_a_drill_that_is_none(drill, capsys):
    with pytest.raises(SystemExit):
        example.parse(["--fail-at", drill])
    assert f"must be step:NUMBER or checkpoint:NUMBER, maybe with :RANK, got {drill}" in capsys.readouterr().err
