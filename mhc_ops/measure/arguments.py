"""Words of a command line as values; argparse turns an error into one line and exit code 2."""

import math

import torch

from .report import Refused

MOST_ELEMENTS = 2**40


def device(text: str) -> torch.device:
    """A device that computes; meta does not."""
    try:
        torch.ones(1, device=text).item()
    except Exception as error:  # builds of torch raise different errors for a device that they do not know
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise Refused(f"{text}: {reason}") from error
    return torch.device(text)


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def seconds(text: str) -> float:
    if not float(text) > 0:
        raise Refused(f"{text} is not a time")
    return float(text)


def shape(text: str) -> tuple[int, ...]:
    """2x128x4x256"""
    sizes = tuple(int(size) for size in text.split("x"))
    if min(sizes) < 1:
        raise Refused(f"{text}: sizes must be at least 1")
    if math.prod(sizes) > MOST_ELEMENTS:
        raise Refused(f"{text}: no device holds so many elements")
    return sizes
