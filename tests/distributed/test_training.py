"""The example on many processes: every mesh learns the same, and a lost worker changes no bit."""

import pytest
import torch
from one_process import assert_bf16_close, assert_close, assert_means_close, exact_gradients
from processes import run
from torch.nn.functional import cross_entropy
from training_runs import LENGTH, assert_same_run, example, losses, options, torchrun

from mhc_ops.testing import accuracy

STEPS, BATCH = 5, 4
TOKENS = LENGTH * BATCH  # of a step
TINY = ("--batch", BATCH, "--steps", STEPS, "--every", 2, "--report", 3, "--clip", 0.1)  # well below what the norm is
DROPOUT = ("--dropout", 0.1)
MESHES = {2: [("--dp", 2), ("--cp", 2), ("--pp", 2)], 4: [("--dp", 4), ("--cp", 4, "--layout", "contiguous")]}
MESHES[4] += [("--dp", 2, "--cp", 2), ("--dp", 2, "--pp", 2), ("--cp", 2, "--pp", 2)]


def name(mesh):
    return "".join(map(str, mesh))


def a_run(folder, *arguments):
    return example.Run(options(folder, *TINY, *arguments))


def _train(folder, *arguments):
    example.train(a_run(folder, *arguments))


def _gradients(training):
    """The loss and all whole gradients of the first step, which is then undone."""
    loss = training.gradients(0)
    torch.distributed.all_reduce(loss)
    gradients = {name: p.grad.full_tensor() for name, p in training.model.named_parameters()}
    training.optimizer.zero_grad()
    training.windows.position = 0
    return loss * training.options.pp / torch.distributed.get_world_size(), gradients


def _world(folder, meshes):
    """All meshes of one number of processes, since starting them takes seconds."""
    results = {}
    for mesh in meshes:
        training = a_run(folder / name(mesh), *mesh, "--every", STEPS)
        results[mesh] = _gradients(training)
        example.train(training)
    return results


def _one(folder):
    """The run that all others are compared with. Returns the loss and the gradients of its first step in fp64, with the
    sizes of the terms of each. A norm comes after the head, so that nothing of dh along h is left: terms of dh cancel
    there."""
    training, (alphabet, _) = a_run(folder / "one"), example.read_text()
    torch.manual_seed(training.options.seed)
    model, between = example.model_of(len(alphabet), training.options, training.pieces).double(), []
    model.head.register_forward_hook(lambda head, inputs, h: between.append(h))
    texts = training.windows.take(BATCH)
    logits = model(texts[:, :-1])

    def loss_of(outputs):
        return cross_entropy(outputs[0].flatten(0, 1), texts[:, 1:].flatten())

    gradients = exact_gradients(loss_of, [logits], dict(model.named_parameters()), between)
    _train(folder / "one")
    return loss_of([logits]).detach(), {name: (exact.value, exact.terms[-1]()) for name, exact in gradients.items()}


def _two(folder):
    """All meshes of two; the run that four began; the run that others are compared with."""
    results = _world(folder, MESHES[2])
    _train(folder / "ended")
    _train(folder / "undisturbed", *DROPOUT)
    _train(folder / "bf16", "--dtype", "bfloat16")
    return results


def _four(folder):
    """All meshes of four; and a run in stages that ends between two checkpoints."""
    results, training = _world(folder, MESHES[4]), a_run(folder / "ended", "--pp", 2)

    def until_3(step, made=training.step):
        if step == 3:
            raise InterruptedError
        return made(step)

    training.step = until_3
    with pytest.raises(InterruptedError):
        example.train(training)
    return results


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(folder, results by mesh, exact results)"""
    folder, results = tmp_path_factory.mktemp("runs"), {}
    ((loss, gradients),) = run(1, _one, folder)
    for world, function in ((4, _four), (2, _two)):
        ranks = run(world, function, folder)
        for mesh in MESHES[world]:
            gradients_of = [rank[mesh][1] for rank in ranks]  # those of a stage are on its processes
            results[mesh] = ranks[0][mesh][0], {key: grad for some in gradients_of for key, grad in some.items()}
    exact = {key: accuracy.Exact(value, [lambda size=size: size]) for key, (value, size) in gradients.items()}
    return folder, results, (loss, exact)


def curve(folder):
    found = torch.tensor([float(loss) for loss in losses(folder)])
    assert len(found) == STEPS
    return found


def test_lost_workers_change_no_bit(ran, tmp_path):
    """One is killed in a step, then the first one in a checkpoint: all start again by themselves, twice from step 2."""
    drills = ("--fail-at", "step:3", "--fail-at", "checkpoint:4:0")
    with torchrun(tmp_path, 2, *TINY, *DROPOUT, *drills) as launched:
        code = launched.wait(timeout=800)
    log = (tmp_path / "log").read_text()
    assert code == 0, log[-4000:]
    # torchrun itself names a worker that it finds dead: the killed one, or another that has noticed by then.
    for told in ("process 1 kills itself in step 3", "process 0 kills itself in checkpoint 4"):
        assert f"drill: {told}\n" in log
    assert log.count("continues from the checkpoint of step 2") == 2
    assert_same_run(tmp_path, ran[0] / "undisturbed", STEPS)


@pytest.mark.parametrize("mesh", [*MESHES[2], *MESHES[4]], ids=name)
def test_losses_and_gradients_are_those_of_one_process(mesh, ran):
    folder, results, (expected_loss, expected) = ran
    loss, gradients = results[mesh]
    assert_means_close(loss, expected_loss, TOKENS)
    assert_close(gradients, expected)
    assert_means_close(curve(folder / name(mesh)), curve(folder / "one"), TOKENS)


def test_a_run_goes_on_with_fewer_processes_in_another_mesh(ran):
    """Also: layers in bf16 learn the same."""
    folder, *_ = ran
    assert_means_close(curve(folder / "ended"), curve(folder / "one"), TOKENS)
    assert_bf16_close(curve(folder / "bf16"), curve(folder / "one"))


def test_every_window_is_taken_once_in_a_pass():
    """This holds if batches do not divide the passes too, and if a run continues with other batches."""
    text = torch.arange(10 * 7 + 4)
    first, others = example.Windows(text, 7, seed=1), example.Windows(text, 7, seed=1)
    taken = torch.cat([first.take(4) for _ in range(5)])
    passes = taken[:, 0].view(2, 10)
    assert torch.equal(passes.sort().values, torch.arange(0, 70, 7).expand(2, 10)) and not torch.equal(*passes)
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
    assert capsys.readouterr().err.startswith("torchrun starts the processes: torchrun --standalone ")
