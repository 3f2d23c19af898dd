"""What does not work before torch 2.13, as docs/distributed.md says: a mark for the tests that need it."""

import pytest
import torch

OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def _needs_2_13(what):
    return pytest.mark.skipif(OLDER, reason=f"before torch 2.13: {what}")


MATRIX_PRODUCT = _needs_2_13("no matrix product of a DTensor whose sequence is in pieces")
CAST_IN_CHECKPOINT = _needs_2_13("FSDP2 does not cast the inputs of a layer that is computed again")
FIRST_ARGUMENT = _needs_2_13("no op on DTensors whose first argument is none, as mhc_mean's backward")
SHAPES_TO_ITSELF = _needs_2_13("two stages in a row of one process tell shapes by a send, which gloo refuses")
FROZEN_X = _needs_2_13("the gradient of x is sent also to a stage where all that made x is frozen")
