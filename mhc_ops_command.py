"""The command mhc-ops. It stands beside the package, whose import takes seconds, so that Ctrl-C works during it."""

import os
import signal


def main() -> int:
    """Ctrl-C ends the process here instead of raising: imported code may catch an exception."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else the signal is ignored, as in a shell's background
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from mhc_ops import cli

    signal.signal(signal.SIGINT, before)
    return cli.main()
