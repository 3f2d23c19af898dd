"""Sizes and names of the files for tests of `mhc-ops convert`, and its refusals."""

from mhc_ops import cli

N, D = 4, 8
M, K = N * N + 2 * N, N * D
INDEX = "model.safetensors.index.json"


def refused(command, capsys):
    """The one line with which the command refuses."""
    try:
        code = cli.main(["convert", *map(str, command)])
    except SystemExit as exit:
        code = exit.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    (line,) = printed.err.splitlines()
    return line.removeprefix("mhc-ops convert: ")
