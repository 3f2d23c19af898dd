"""What servers call, one sequence at a time in fp64, and packages of small files in the place of a server."""

import torch

BF16 = 2**-8  # one rounding


def window(inputs, W):
    """The last W − 1 inputs of a sequence, [D, W − 1]."""
    return torch.cat([inputs.new_zeros(W - 1, inputs.shape[1]), inputs])[len(inputs) :].T


def assert_rounded(found, expected):
    """Each element is one rounding of the exact value, relative to the largest in its row."""
    found, expected = found.double(), expected.double()
    assert found.shape == expected.shape
    if found.numel():
        assert ((found - expected).abs() <= BF16 * expected.abs().amax(-1, keepdim=True) + 1e-6).all()


def draw(D):
    """weight and bias, and a function that draws inputs"""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    return normal(D, 4), normal(D), normal


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def package(files):
    """{path: text}, with an empty __init__.py in each folder that has none"""
    folders = {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}
    return {f"{folder}/__init__.py": "" for folder in folders} | files


def refusing(*names):
    return "".join(f"def {name}(*given, **named): raise AssertionError('its own {name}')\n" for name in names)
