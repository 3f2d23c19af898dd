"""The health of a run of transformers' Trainer, in what the run logs to.

    from mhc_ops.compat.transformers_trainer import MetricsCallback

    trainer.add_callback(MetricsCallback(trainer))

The model is one that `mhc_ops.compat.transformers` has patched, or has `HyperConnection`s.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .. import Metrics, metrics
from ..core.check import check_count
from ..mhc.metrics import NotCollected


class MetricsCallback:
    """Runs one training step in so many within `mhc_ops.metrics` and hands the numbers to `trainer.log`.

    They go where the losses go (the console, TensorBoard, Weights & Biases, …) and into `trainer.state.log_history`, as
    "mhc/gain_forward" and "mhc/model.layers.0.attn_hc/h_res_entropy".

    trainer: the Trainer that the callback is added to   every: watch every so many steps; without it those at whose end
    the Trainer logs (logging_steps)   keep: which numbers are logged, by the name that `Metrics.result` has, as
    `lambda name: "gain" in name`; without it all

    All calls of a step with gradient accumulation count. Norms of gradients are those after clipping. Where nothing of
    a step is collected, the training goes on: nothing is logged, and the first time there is a warning.

    A training that fails in a watched step leaves the hooks, and what torch.compile has compiled runs eagerly, until
    the Trainer trains or evaluates again or is deleted. `stop()` ends that at once.
    """

    def __init__(self, trainer: Any, *, every: int | None = None, keep: Callable[[str], bool] | None = None):
        if not callable(getattr(trainer, "log", None)):
            raise TypeError(f"MetricsCallback: trainer must be a Trainer of transformers, got {type(trainer).__name__}")
        if every is not None:
            check_count("MetricsCallback", "every", every)
        self.trainer, self.every, self.keep = trainer, every, keep
        self.watching = ExitStack()
        self.health: Metrics | None = None
        self.has_warned = False

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        self.stop()
        every = self.every or state.logging_steps
        if not every:
            raise ValueError("MetricsCallback: every must be given where logging_steps is 0")
        if (state.global_step + 1) % every == 0:
            self.health = self.watching.enter_context(metrics(model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.watching.close()  # reads the gradients

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.watching.close()
        health, self.health = self.health, None
        if health is not None:
            try:
                numbers = health.result()
            except NotCollected as reason:
                if not self.has_warned:
                    warnings.warn(
                        f"MetricsCallback: nothing is logged of step {state.global_step}: {reason}", stacklevel=2
                    )
                self.has_warned = True
                return
            is_next = control.should_log  # the losses, which the Trainer takes for logged when anything was
            self.trainer.log({f"mhc/{name}": numbers[name] for name in numbers if self.keep is None or self.keep(name)})
            control.should_log = is_next

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.stop()

    # The first events after a training that failed: a Trainer has none for the failure.
    on_train_begin = on_epoch_begin = on_prediction_step = on_evaluate = on_predict = on_train_end

    def __getattr__(self, name: str) -> Any:
        """Nothing is done on other events. This is not a TrainerCallback: mhc_ops does not import transformers."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def stop(self) -> None:
        """Forget a step that did not end. Its gradients are not read: that may wait for other processes."""
        reason = GeneratorExit()
        self.watching.__exit__(type(reason), reason, None)
        self.health = None


def _nothing(*event: Any, **others: Any) -> None:
    pass
