"""The command mhc-ops, beside the package: importing that imports torch, for seconds in which Ctrl-C may come."""

import os
import signal


def main() -> int:
    """Ctrl-C raises nothing here: code that is being imported may make another exception of it, or catch it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else the signal is ignored, as in a shell's background
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from mhc_ops import cli

    signal.signal(signal.SIGINT, before)
    return cli.main()
