"""The health of a run of transformers' Trainer, in what the run logs to.

    from mhc_ops.compat.transformers_trainer import MetricsCallback

    trainer.add_callback(MetricsCallback(trainer))

The model is one that `mhc_ops.compat.transformers` has patched, or has `HyperConnection`s.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .. import Metrics, metrics
from ..core.check import check_count


class MetricsCallback:
    """Runs one training step in so many within `mhc_ops.metrics` and hands the numbers to `trainer.log`.

    They go where the losses go (the console, TensorBoard, Weights & Biases, …) and into `trainer.state.log_history`, as
    "mhc/gain_forward" and "mhc/model.layers.0.attn_hc/h_res_entropy".

    trainer: the Trainer that the callback is added to   every: watch every so many steps; without it those at whose end
    the Trainer logs (logging_steps)   keep: which numbers are logged, by the name that `Metrics.result` has, as
    `lambda name: "gain" in name`; without it all

    All calls of a step with gradient accumulation count. Norms of gradients are those after clipping.
    """

    def __init__(self, trainer: Any, *, every: int | None = None, keep: Callable[[str], bool] | None = None):
        if not callable(getattr(trainer, "log", None)):
            raise TypeError(f"MetricsCallback: trainer must be a Trainer of transformers, got {type(trainer).__name__}")
        if every is not None:
            check_count("MetricsCallback", "every", every)
        self.trainer, self.every, self.keep = trainer, every, keep
        self.watching = ExitStack()
        self.health: Metrics | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        self.stop()
        if (state.global_step + 1) % (self.every or state.logging_steps) == 0:
            self.health = self.watching.enter_context(metrics(model))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.watching.close()  # reads the gradients

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.watching.close()
        if self.health is not None:
            numbers, self.health = self.health.result(), None
            is_next = control.should_log  # the losses, which the Trainer takes for logged when anything was
            self.trainer.log({f"mhc/{name}": numbers[name] for name in numbers if self.keep is None or self.keep(name)})
            control.should_log = is_next

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.stop()

    def __getattr__(self, name: str) -> Any:
        """Nothing is done on other events. This is not a TrainerCallback: mhc_ops does not import transformers."""
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def stop(self) -> None:
        """Forget a step that did not end."""
        self.watching.close()
        self.health = None


def _nothing(*event: Any, **others: Any) -> None:
    pass
