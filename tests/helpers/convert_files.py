"""Sizes and names of the files that `mhc-ops convert` is tested with, and what it says to those that it refuses."""

from mhc_ops import cli

N, D = 4, 8
M, K = N * N + 2 * N, N * D
INDEX = "model.safetensors.index.json"


def refused(command, capsys):
    """The one line that says so."""
    try:
        code = cli.main(["convert", *map(str, command)])
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    return line.removeprefix("mhc-ops convert: ")
