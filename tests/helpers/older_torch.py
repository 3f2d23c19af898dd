"""Marks for tests of what fails before torch 2.13, as docs/distributed.md lists it."""

import pytest
import torch

OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


def _needs_2_13(what):
    return pytest.mark.skipif(OLDER, reason=f"before torch 2.13: {what}")


MATRIX_PRODUCT = _needs_2_13("no matrix product of a DTensor whose sequence is in pieces")
FIRST_ARGUMENT = _needs_2_13("no op on DTensors whose first argument is not one, as in mhc_mean's backward")
SHAPES_TO_ITSELF = _needs_2_13("two consecutive stages of one process send shapes to it, which gloo refuses")
