"""The callback of transformers' Trainer, in the Trainer."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mhc_ops
from mhc_ops import HyperConnection, HyperStack, mhc_expand
from mhc_ops.compat.transformers_trainer import MetricsCallback

transformers = pytest.importorskip("transformers", reason="needs transformers: 'mhc-ops[adopt]'")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

N, D, STEPS, SUBSTEPS, LOGGING = 2, 4, 6, 2, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stack = HyperStack(*(HyperConnection(nn.Linear(D, D), N, D) for _ in range(2)))
        self.seen = []

    def forward(self, x, labels=None):
        self.seen.append(x)
        return {"loss": self.stack(mhc_expand(x, N)).square().mean()}


@pytest.fixture
def made(tmp_path):
    """A Trainer of a run with gradient accumulation, with the callback"""

    def make(**options):
        own = {"gradient_accumulation_steps": SUBSTEPS, "max_steps": STEPS, "logging_steps": LOGGING}
        own |= {"max_grad_norm": 0, "lr_scheduler_type": "constant", "per_device_train_batch_size": 1}
        own |= {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
        data, model = [{"x": torch.randn(3, D), "labels": 0} for _ in range(8)], Model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        arguments = transformers.TrainingArguments(str(tmp_path), **own)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, optimizers=(sgd, None))
        trainer.add_callback(MetricsCallback(trainer, **options))
        return trainer

    return make


def logged(trainer):
    """Steps with numbers of hyper-connections, and steps with losses."""
    history = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    return [[entry["step"] for entry in history if any(word in name for name in entry)] for word in ("mhc/", "loss")]


@pytest.mark.parametrize(("every", "watched"), [(None, [2, 4, 6]), (3, [3, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_what_is_logged(every, watched, made):
    """The numbers of `metrics` in that step; losses are logged as without the callback."""
    trainer = made(every=every)
    trainer.train()
    assert logged(trainer) == [watched, [2, 4, 6]]
    alone, found = Model(), {}
    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        with mhc_ops.metrics(alone) as health:
            for x in trainer.model.seen[SUBSTEPS * step : SUBSTEPS * (step + 1)]:
                (alone(x)["loss"] / SUBSTEPS).backward()
        found[step + 1] = {f"mhc/{name}": value for name, value in health.result().items()}
        sgd.step()
        sgd.zero_grad()
    history = [entry for entry in trainer.state.log_history if "mhc/gain_forward" in entry]
    entries = {entry["step"]: {name: entry[name] for name in entry if "mhc/" in name} for entry in history}
    assert entries == {step: found[step] for step in watched} and "mhc/stack.1/dphi_norm" in entries[6]


def hooks(model):
    return [hook for part in model.modules() for hook in part._forward_hooks]


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_end", "on_prediction_step", "stop", "deleted", "again"])
def test_a_training_that_fails(event, made, monkeypatch):
    """What watched its last step ends at the next event, at `stop` or with the callback, and reads no gradients."""
    trainer = made(every=1, keep=lambda name: name == "gain_forward")
    with monkeypatch.context() as failing, pytest.raises(ZeroDivisionError):
        failing.setattr(trainer.model.stack[1].layer, "forward", lambda x: 1 / 0)
        trainer.train()
    assert hooks(trainer.model)
    if event == "again":
        trainer.train()
        kept = {name for entry in trainer.state.log_history for name in entry if "mhc/" in name}
        assert kept == {"mhc/gain_forward"} and not hooks(trainer.model)
        return
    monkeypatch.setattr(mhc_ops.Metrics, "_see_gradients", lambda health: pytest.fail("it waits for other processes"))
    if event == "deleted":
        trainer.remove_callback(MetricsCallback)
        gc.collect()
    elif event == "stop":
        trainer.pop_callback(MetricsCallback).stop()
    else:
        trainer.callback_handler.call_event(event, trainer.args, trainer.state, trainer.control)
    assert not hooks(trainer.model)


def test_a_step_without_connections(made, monkeypatch):
    """It is no reason to end a training: one warning says what to do, and the losses are logged."""
    trainer = made()
    parameters = [*trainer.model.parameters()]
    monkeypatch.setattr(trainer.model, "forward", lambda x, labels: {"loss": sum(p.sum() for p in parameters)})
    words = "MetricsCallback: nothing is logged of step 2: metrics: no connection"
    with pytest.warns(UserWarning, match=words) as given:
        trainer.train()
    assert len([each for each in given if "MetricsCallback" in str(each.message)]) == 1
    assert logged(trainer) == [[], [2, 4, 6]]


def test_what_is_refused(made):
    trainer = made()
    with pytest.raises(TypeError, match=r"^MetricsCallback: trainer must be a Trainer of transformers, got Model$"):
        MetricsCallback(trainer.model)
    with pytest.raises(ValueError, match=r"^MetricsCallback: every must be at least 1"):
        MetricsCallback(trainer, every=0)
    with pytest.raises(ValueError, match=r"^MetricsCallback: every must be given where logging_steps is 0$"):
        MetricsCallback(trainer).on_step_begin(None, SimpleNamespace(logging_steps=0), None, model=trainer.model)
