"""Run a program with `causal_conv1d` installed: python -m mhc_ops.compat.causal_conv1d [-m module | script.py] [...]"""

import os
import runpy
import sys

from .by_name import install

USAGE = "usage: python -m mhc_ops.compat.causal_conv1d [-m module | script.py] [arguments]"


def main(words: list[str]) -> None:
    """Run a program with the sys.argv, sys.path and __main__ of `python script.py ...` or `python -m module ...`."""
    if words and words[0] in ("-h", "--help"):
        print(USAGE)
        return
    is_module = words[:1] == ["-m"]
    program = words[is_module:]
    if not program or (program[0].startswith("-") and not is_module):
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    install()
    sys.argv[:] = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
