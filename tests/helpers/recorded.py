"""Record what torch's dispatcher is asked for: `with Recorded() as recorded: …`, then `recorded.calls`."""

from torch.utils._python_dispatch import TorchDispatchMode


class Recorded(TorchDispatchMode):
    """Each function and its arguments, in order. namespaces: of these alone"""

    def __init__(self, *namespaces):
        super().__init__()
        self.namespaces, self.calls = namespaces, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.namespaces or func.namespace in self.namespaces:
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))
