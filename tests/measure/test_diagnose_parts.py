"""The parts of a diagnosis: places as words, terms by least squares, and what steps can do."""

import pytest
import torch

from mhc_ops.core import steps
from mhc_ops.measure.diagnose import Output, coefficients, findings, places
from mhc_ops.testing import cases
from mhc_ops.testing.accuracy import Exact
from mhc_ops.testing.cases import Case

SECTIONS = {"pre": range(2), "post": range(2, 4), "res": range(4, 8)}


@pytest.mark.parametrize(
    ("indices", "size", "axis", "words"),
    [
        ([2], 4, "stream", "stream 2"),
        ([1, 2, 3], 4, "stream", "streams 1 to 3"),
        ([0, 3], 4, "stream", "streams 0 and 3"),
        (list(range(32, 72)), 72, "channel", "channels 32 and up"),
        (list(range(64, 72)), 72, "channel", "channels 64 and up"),
        (list(range(5, 9)), 72, "channel", "channels 5 to 8"),
        ([16, 17, 18, 32, 33, 34, 48, 49], 50, "token", "3 tokens in every 16, from token 16 on,"),
        ([16, 32, 48], 60, "token", "one token in every 16, from token 16 on,"),
        ([16, 17, 18, 32, 33, 48, 49, 50], 60, "token", "8 of 60 tokens (16, 17, 18, …)"),
        ([1, 5, 6, 20, 21, 30, 41], 60, "token", "7 of 60 tokens (1, 5, 6, …)"),
        ([4, 5, 6, 7], 8, "row", "the res section"),
        ([0, 1, 4, 5, 6, 7], 8, "row", "the pre and res sections"),
        ([4, 5], 8, "row", "rows 4 to 5"),
        ([2], 3, "section", "section res"),
        ([0, 2], 3, "section", "section pre and section res"),
    ],
)
def test_indices_as_words(indices, size, axis, words):
    assert places.words_of(indices, size, axis, SECTIONS) == words


def test_a_place_is_the_smallest_box():
    off = torch.zeros(6, 4, 40, dtype=torch.bool)
    off[:, 1:, 32:] = True
    place = places.place_of(off, {"token": 6, "stream": 4, "channel": 40}, {})
    assert (place.words, place.several, place.filled) == ("channels 32 and up of streams 1 to 3", True, 1.0)
    assert torch.equal(place.box, off)


def test_scattered_errors_have_no_place():
    off = torch.eye(20, dtype=torch.bool)
    assert places.place_of(off, {"token": 20, "channel": 20}, {}).words == ""


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
        ({"a of q": 2.5}, "a of q is counted 2.5 times"),
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


def test_three_terms_are_no_explanation():
    own = three_terms()
    exact, result = sum(own.values()), sum(factor * term for factor, term in zip((3, 0, 5), own.values()))
    assert found_in(result, exact, own).sentence == "no simple explanation"


def test_a_factor_in_a_place():
    exact = three_terms()["b"]
    result = exact.clone()
    result[..., 2:5] *= 2.5
    finding = found_in(result, exact)
    assert (finding.sentence, finding.share) == ("channels 2 to 4 are counted 2.5 times", pytest.approx(1))


def test_gradients_of_steps():
    """Of each step that reads x a term; of a sum, what arrives at it is what its terms get."""
    forward = (
        *steps.steps_of(square=lambda x: x**2, half=lambda x: x / 2, product=lambda square, w: square * w),
        steps.total("y", "product", "half"),
    )
    backward = steps.gradients(forward, wanted=["x", "w"], outputs=["y"])
    assert [step.name for step in backward if step.is_sum] == ["dy", "dsquare", "dw", "dx"]
    x, w, dy = (torch.tensor(value, dtype=torch.float64) for value in (3.0, 5.0, 7.0))
    run = steps.Computation((*forward, *backward), {"x": x, "w": w, "cotangent of y": dy})
    assert (run.right["dx"], run.right["dw"]) == (7 * (2 * 3 * 5 + 0.5), 7 * 9)
    changed = run.run({"dx via half": steps.zeros})
    assert (changed["dx"], changed["y"] is run.right["y"]) == (7 * 2 * 3 * 5, True)


def test_of_one_value_no_other_is_computed():
    """Not even where a change reaches it."""
    computed = []
    both = steps.steps_of(y=lambda x: x + 1, aside=lambda x: computed.append(x), z=lambda y: 2 * y)
    run = steps.Computation(both, {"x": torch.tensor(1.0)})
    computed.clear()
    assert (run.value("z", {"x": steps.zeros}), computed) == (2, [])
    assert run.value("z", {"x for aside": steps.zeros}) is run.right["z"]
