"""The example on many processes: every mesh learns the same, and a lost worker changes no bit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_process import assert_bf16_close, assert_close, assert_means_close, exact_gradients
from processes import WITHOUT_GPUS, run
from stored import checkpoint, different
from torch.nn.functional import cross_entropy

from mhc_ops.testing import accuracy

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_distributed as example  # noqa: E402

STEPS, LENGTH, BATCH = 5, 16, 4
TOKENS = LENGTH * BATCH  # of a step
TINY = ("--D", 32, "--depth", 1, "--length", LENGTH, "--batch", BATCH, "--steps", STEPS, "--every", 2, "--report", 3)
TINY += ("--clip", 0.1)  # well below what the norm is


def options(folder, *arguments):
    return example.parse([*map(str, (*TINY, *arguments, "--out", folder))])


def losses(folder):
    """fp32, as they were computed."""
    lines = (folder / "losses.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in lines] == list(range(STEPS))
    return torch.tensor([float(line.split(",")[1]) for line in lines])


def _train(folder, *arguments):
    example.train(example.Run(options(folder, *arguments)))


def _gradients(training):
    """The loss and all whole gradients of the first step, which is then undone."""
    loss = training.gradients(0)
    torch.distributed.all_reduce(loss)
    gradients = {name: p.grad.full_tensor() for name, p in training.model.named_parameters()}
    training.optimizer.zero_grad()
    training.windows.position = 0
    return loss * training.options.pp / torch.distributed.get_world_size(), gradients


def _exact(folder):
    """The same of one process in fp64, with the sizes of the terms of each gradient. A norm comes after the head, so
    that nothing of dh along h is left: terms of dh cancel there."""
    chosen = options(folder / "exact")
    training, (alphabet, _) = example.Run(chosen), example.read_text()
    torch.manual_seed(chosen.seed)
    model, between = example.model_of(len(alphabet), chosen, training.pieces).double(), []
    model.head.register_forward_hook(lambda head, inputs, h: between.append(h))
    texts = training.windows.take(chosen.batch)
    logits = model(texts[:, :-1])

    def loss_of(outputs):
        return cross_entropy(outputs[0].flatten(0, 1), texts[:, 1:].flatten())

    gradients = exact_gradients(loss_of, [logits], dict(model.named_parameters()), between)
    return loss_of([logits]).detach(), {name: (exact.value, exact.terms[-1]()) for name, exact in gradients.items()}


def _refusal(folder, *arguments):
    try:
        _train(folder, *arguments)
    except example.Refused as refused:
        return str(refused)


def _world(folder, meshes):
    """All meshes of one number of processes, since starting them takes seconds."""
    results = {}
    for mesh in meshes:
        training = example.Run(options(folder / name(mesh), *mesh, "--every", STEPS))
        results[mesh] = _gradients(training)
        example.train(training)
    return results


def _four(folder):
    """All meshes of four; and a run in stages that ends between two checkpoints."""
    results = _world(folder, MESHES[4])
    training = example.Run(options(folder / "ended", "--pp", 2))
    curve = example.Curve(folder / "ended" / "losses.csv", 0) if torch.distributed.get_rank() == 0 else None
    for step in range(3):
        loss = training.step(step)
        torch.distributed.all_reduce(loss)
        if curve:
            curve.add(range(step, step + 1), [2 * loss.item() / torch.distributed.get_world_size()], speed=0)
        if step + 1 == 2:
            training.save(step + 1)
    return results, None


def _two(folder):
    """All meshes of two; the run that four began; the run that others are compared with; refusals."""
    results = _world(folder, MESHES[2])
    _train(folder / "ended")
    _train(folder / "undisturbed", *DROPOUT)
    _train(folder / "bf16", "--dtype", "bfloat16")
    return results, [_refusal(folder / "refused", *arguments) for arguments in REFUSED]


MESHES = {
    1: [()],
    2: [("--dp", 2), ("--cp", 2), ("--pp", 2)],
    4: [
        *(("--dp", 4), ("--cp", 4, "--layout", "contiguous")),
        *(("--dp", 2, "--cp", 2), ("--dp", 2, "--pp", 2), ("--cp", 2, "--pp", 2)),
    ],
}
DROPOUT = ("--dropout", 0.1)
REFUSED = {
    ("--dp", 3): "--dp 3 × --cp 1 × --pp 1 is 3 processes, but there are 2",
    ("--cp", 2, "--length", 15): "--length 15 cannot be cut into 4 pieces of one size for --cp 2",
    ("--batch", 1): "--batch 1 texts cannot be shared equally by --dp 2",
}


def name(mesh):
    return "".join(map(str, mesh)) or "one"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, results by mesh, exact results, refusals)"""
    folder, results, others = tmp_path_factory.mktemp("runs"), {}, {}
    for world, function in ((1, _one), (4, _four), (2, _two)):
        ranks, (others[world], *_) = zip(*run(world, function, folder))
        for mesh in MESHES[world]:
            gradients = [rank[mesh][1] for rank in ranks]  # those of a stage are on its processes
            results[mesh] = ranks[0][mesh][0], {key: grad for some in gradients for key, grad in some.items()}
    loss, gradients = others[1]
    exact = loss, {key: accuracy.Exact(value, [lambda size=size: size]) for key, (value, size) in gradients.items()}
    return folder, results, exact, others[2]


def _one(folder):
    return _world(folder, MESHES[1]), _exact(folder)


def test_lost_workers_change_no_bit(ran, tmp_path):
    """One is killed in a step, then the first one in a checkpoint: all start again by themselves, twice from step 2."""
    undisturbed = ran[0] / "undisturbed"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    restarts = ("--max-restarts", 2, "--monitor-interval", 0.1)
    drills = ("--fail-at", "step:3", "--fail-at", "checkpoint:4:0")
    script = EXAMPLES / "train_distributed.py"
    done = _python(*torchrun, *restarts, script, *TINY, *DROPOUT, *drills, "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    # torchrun itself names a worker that it finds dead: the killed one, or another that has noticed by then.
    for told in ("process 1 kills itself in step 3", "process 0 kills itself in checkpoint 4"):
        assert f"drill: {told}\n" in done.stderr
    assert done.stderr.count("continues from the checkpoint of step 2") == 2
    assert torch.equal(losses(tmp_path), losses(undisturbed))
    expected, found = checkpoint(undisturbed, STEPS), checkpoint(tmp_path, STEPS)
    assert different(expected, found) == [] and len(expected) > 50
    # Incomplete and old checkpoints are gone.
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000000004", "step-000000005"]


def _python(*arguments):
    environment = {**os.environ, **WITHOUT_GPUS, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)


@pytest.mark.parametrize("mesh", [*MESHES[2], *MESHES[4]], ids=name)
def test_losses_and_gradients_are_those_of_one_process(mesh, ran):
    folder, results, (expected_loss, expected), _ = ran
    loss, gradients = results[mesh]
    assert_means_close(loss, expected_loss, TOKENS)
    assert_close(gradients, expected)
    assert_means_close(losses(folder / name(mesh)), losses(folder / name(())), TOKENS)


def test_a_run_goes_on_with_fewer_processes_in_another_mesh(ran):
    """Also: layers in bf16 learn the same, and wrong meshes are refused."""
    folder, _, _, refused = ran
    expected = losses(folder / name(()))
    assert_means_close(losses(folder / "ended"), expected, TOKENS)
    assert_bf16_close(losses(folder / "bf16"), expected)
    assert refused == list(REFUSED.values())


def test_every_window_is_taken_once_in_a_pass():
    """Also if batches do not divide the passes, and if a run continues with other batches."""
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

    windows = example.Windows(torch.arange(100), 7, seed=1)
    with pytest.raises(example.Refused, match="--seed is 1, but the run to continue has 2"):
        windows.load_state_dict(example.Windows(torch.arange(100), 7, seed=2).state_dict())


def test_without_torchrun_it_says_so(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert example.main([]) == 2
    assert capsys.readouterr().err.startswith(
        "torchrun starts the processes: torchrun --standalone --nproc-per-node 2 "
    )


@pytest.mark.parametrize("drill", ["step", "step:x", "backward:3", "step:3:1:1"])
def test_a_drill_that_is_none(drill, capsys):
    with pytest.raises(SystemExit):
        example.parse(["--fail-at", drill])
    assert f"must be step:NUMBER or checkpoint:NUMBER, maybe with :RANK, got {drill}" in capsys.readouterr().err


def test_more_processes_than_gpus_are_told(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert example.main(["--device", "cuda"]) == 2
    expected = "2 processes of this machine cannot share 1 GPUs: try --device cpu"
    assert capsys.readouterr().err.strip() == expected
