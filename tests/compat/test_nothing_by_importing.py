"""Importing mhc_ops, and all that stands in for other libraries, leaves those libraries alone."""

import subprocess
import sys

CODE = """
import sys
import mhc_ops
assert {"liger", "megatron", "tile_kernels", "transformers"} <= set(mhc_ops.compat.__all__)
assert mhc_ops.compat.transformers.patch  # as the README says it
libraries = {"tile_kernels", "liger_kernel", "megatron", "transformers", "causal_conv1d", "fla", "kernels"}
print([name for name in sys.modules if name.partition(".")[0] in libraries])
"""


def test_nothing_is_installed_or_loaded():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
