"""The parts of a diagnosis: places as words, and terms by least squares."""

import pytest
import torch

from mhc_ops.core import steps
from mhc_ops.measure.diagnose import Output, coefficients, findings
from mhc_ops.testing import cases
from mhc_ops.testing.accuracy import Exact
from mhc_ops.testing.cases import Case


def three_terms():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 10, 4, 8, dtype=torch.float64, generator=generator)
    return {"a of p": drawn[0], "a of q": drawn[1], "b": drawn[2]}


def x_next(result, exact, terms=None):
    """Of 10 tokens, of which nothing is known but these terms."""
    return Output(Case(cases.MHC_POST, (10,), 4, 8), "x_next", result, result, Exact(exact), terms=terms or {})


def found_in(*given):
    (finding,) = findings([x_next(*given)], steps.Computation((), {}), [])
    return finding


def test_wrong_elements_go_by_the_type():
    """1 + 2^-7 is one rounding to bf16, and an error in fp32."""
    exact = torch.ones(10, 4, 8, dtype=torch.float64)
    result = exact.clone()
    result[1, 2, 3] += 2**-8
    result[1, 2, 4] += 2**-6
    off = {dtype: x_next(result.to(dtype), exact).off.nonzero().tolist() for dtype in (torch.bfloat16, torch.float32)}
    assert off == {torch.bfloat16: [[1, 2, 4]], torch.float32: [[1, 2, 3], [1, 2, 4]]}


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"b": 0.0}, "b is left out"),
        ({"b": -1.0}, "b is of the wrong sign"),
        ({"a of q": 16.0}, "a of q is counted 16 (n²) times"),
        ({"a of p": 0.0, "a of q": 0.0}, "a is left out"),
        ({"a of p": 3.0, "b": 0.0}, "a of p is counted 3 times and b is left out"),
    ],
)
def test_terms(times, words):
    own = three_terms()
    exact = sum(own.values())
    result = sum(times.get(name, 1.0) * term for name, term in own.items())
    finding = found_in(result, exact, own)
    assert (finding.sentence, finding.share) == (words, pytest.approx(1))
    fitted = coefficients(result - exact, own)
    assert fitted == pytest.approx({name: times.get(name, 1.0) - 1 for name in own}, abs=1e-9)
