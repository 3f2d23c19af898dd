"""The callback of transformers' Trainer: in a loop that calls it as the Trainer does and, with accelerate, in that."""

import gc
from types import SimpleNamespace

import pytest
import torch
from compat_oracle import says
from torch import nn

import mhc_ops
from mhc_ops import HyperConnection, HyperStack, mhc_expand

callbacks = pytest.importorskip("transformers.trainer_callback", reason="needs transformers: 'mhc-ops[adopt]'")
from mhc_ops.compat.transformers_trainer import MetricsCallback  # noqa: E402

N, D, STEPS, SUBSTEPS, LOGGING = 2, 4, 6, 2, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stack = HyperStack(*(HyperConnection(nn.Linear(D, D), N, D) for _ in range(2)))

    def forward(self, x, labels=None):
        return {"loss": self.stack(mhc_expand(x, N)).square().mean()}


def batch(number):
    return torch.randn(3, D, generator=torch.Generator().manual_seed(number))


def substeps(model, step):
    for number in range(SUBSTEPS * step, SUBSTEPS * (step + 1)):
        (model(batch(number))["loss"] / SUBSTEPS).backward()


class Loop:
    """What Trainer calls in a run with gradient accumulation, in its order; losses are logged where it logs."""

    def __init__(self, **options):
        strategies = {"logging_strategy": "steps", "eval_strategy": "no", "save_strategy": "no"}
        self.model, self.args = Model(), SimpleNamespace(logging_first_step=False, **strategies)
        self.state, self.control = callbacks.TrainerState(logging_steps=LOGGING), callbacks.TrainerControl()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        flow, self.callback = callbacks.DefaultFlowCallback(), MetricsCallback(self, **options)
        self.handler = callbacks.CallbackHandler([flow, self.callback], self.model, None, self.optimizer, None)

    def log(self, logs):
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.handler.on_log(self.args, self.state, self.control, logs)

    def event(self, name):
        self.control = getattr(self.handler, name)(self.args, self.state, self.control)

    def train(self):
        for step in range(STEPS):
            self.event("on_step_begin")
            substeps(self.model, step)
            self.event("on_pre_optimizer_step")
            self.optimizer.step()
            self.event("on_optimizer_step")
            self.model.zero_grad()
            self.state.global_step += 1
            self.event("on_step_end")
            if self.control.should_log:
                self.log({"loss": 0.0})


def logged(trainer):
    """Steps with numbers of hyper-connections, and steps with losses."""
    history = trainer.state.log_history
    return [[entry["step"] for entry in history if any(word in name for name in entry)] for word in ("mhc/", "loss")]


@pytest.mark.parametrize(("every", "watched"), [(None, [2, 4, 6]), (3, [3, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_what_is_logged(every, watched):
    """The numbers of `metrics` in that step; losses are logged as without the callback."""
    trainer = Loop(every=every)
    trainer.train()
    assert logged(trainer) == [watched, [2, 4, 6]]
    alone, found = Loop(), {}
    for step in range(STEPS):
        with mhc_ops.metrics(alone.model) as health:
            substeps(alone.model, step)
        found[step + 1] = {f"mhc/{name}": value for name, value in health.result().items()}
        alone.optimizer.step()
        alone.model.zero_grad()
    entries = {entry.pop("step"): entry for entry in trainer.state.log_history if "mhc/gain_forward" in entry}
    assert entries == {step: found[step] for step in watched}
    assert "mhc/stack.1/dphi_norm" in entries[6]


def test_what_is_kept():
    """Also after a step that failed."""
    trainer = Loop(every=1, keep=lambda name: name == "gain_forward")
    trainer.event("on_step_begin")
    trainer.train()
    kept = [entry.keys() for entry in trainer.state.log_history if "loss" not in entry]
    assert kept == STEPS * [{"mhc/gain_forward", "step"}]


def hooks(model):
    return [hook for part in model.modules() for hook in part._forward_hooks]


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_end", "on_prediction_step", "stop", "deleted"])
def test_a_training_that_fails(event, monkeypatch):
    """What watched its last step ends at the next event, at `stop` or with the callback, and reads no gradients."""
    trainer = Loop(every=1)
    for within in ("on_step_begin", "on_substep_end", "on_log"):
        trainer.handler.call_event(within, trainer.args, trainer.state, trainer.control)
    assert hooks(trainer.model)
    monkeypatch.setattr(mhc_ops.Metrics, "_see_gradients", lambda health: pytest.fail("it waits for other processes"))
    if event == "deleted":
        trainer.handler.remove_callback(trainer.callback)
        del trainer.callback
        gc.collect()
    elif event == "stop":
        trainer.callback.stop()
    else:
        trainer.handler.call_event(event, trainer.args, trainer.state, trainer.control)
    assert not hooks(trainer.model)


def test_a_step_without_connections():
    """It is no reason to end a training: one warning says what to do, and the losses are logged."""
    trainer = Loop()
    trainer.model.forward = lambda x: {"loss": sum(p.sum() for p in trainer.model.parameters())}
    words = "MetricsCallback: nothing is logged of step 2: metrics: no connection"
    with pytest.warns(UserWarning, match=words) as given:
        trainer.train()
    assert len(given) == 1 and logged(trainer) == [[], [2, 4, 6]]


def test_what_is_refused():
    trainer = Loop()
    with says(TypeError, "MetricsCallback: trainer must be a Trainer of transformers, got Model"):
        MetricsCallback(trainer.model)
    with says(ValueError, "MetricsCallback: every must be at least 1, got 0"):
        MetricsCallback(trainer, every=0)
    trainer.state.logging_steps = 0
    with says(ValueError, "MetricsCallback: every must be given where logging_steps is 0"):
        trainer.event("on_step_begin")


def test_in_the_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    own = {"gradient_accumulation_steps": SUBSTEPS, "max_steps": STEPS, "logging_steps": LOGGING}
    own |= {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    data = [{"x": batch(number), "labels": batch(number)} for number in range(8)]
    trainer = Trainer(Model(), TrainingArguments(str(tmp_path), **own), train_dataset=data)
    trainer.add_callback(MetricsCallback(trainer))
    trainer.train()
    watched, losses = logged(trainer)
    assert watched == [2, 4, 6] and losses[:3] == [2, 4, 6]
