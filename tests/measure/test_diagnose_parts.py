"""The parts of a diagnosis: places as words, distributions, errors by block; and the gradients of named steps."""

import math

import pytest
import torch

from mhc_ops.core import steps
from mhc_ops.measure import cases
from mhc_ops.measure.accuracy import NORM_TOLERANCE, Exact, judge
from mhc_ops.measure.cases import Case
from mhc_ops.measure.diagnose import outputs

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
        ([1, 5, 6, 20, 21, 30, 41], 60, "token", "7 of 60 tokens (1, 5, 6, …)"),
        ([4, 5, 6, 7], 8, "row", "the res section"),
        ([0, 1, 4, 5, 6, 7], 8, "row", "the pre and res sections"),
        ([4, 5], 8, "row", "rows 4 to 5"),
    ],
)
def test_indices_as_words(indices, size, axis, words):
    assert outputs.words_of(indices, size, axis, SECTIONS) == words


def test_a_place_is_the_smallest_box():
    off = torch.zeros(6, 4, 40, dtype=torch.bool)
    off[:, 1:, 32:] = True
    place = outputs.place_of(off, {"token": 6, "stream": 4, "channel": 40}, {})
    assert (place.words, place.several, place.filled) == ("channels 32 and up of streams 1 to 3", True, 1.0)
    assert torch.equal(place.box, off)


def test_scattered_errors_have_no_place():
    off = torch.eye(20, dtype=torch.bool)
    assert outputs.place_of(off, {"token": 20, "channel": 20}, {}).words == ""


def test_wrong_elements_go_by_the_type():
    exact = torch.ones(4, 8, dtype=torch.float64)
    result = exact.clone()
    result[1, 2] += 1e-3  # a rounding to bf16, an error in fp32
    assert not outputs.wrong_elements(result, exact, torch.bfloat16).any()
    assert outputs.wrong_elements(result, exact, torch.float32).nonzero().tolist() == [[1, 2]]
    result[1, 3] += 1e-2
    assert outputs.wrong_elements(result, exact, torch.bfloat16).nonzero().tolist() == [[1, 3]]


def output(result, exact):
    """As inv_rms of so many tokens."""
    case, truth = Case(cases.MHC_FORWARD_PRE, (len(exact),), 1, 1), Exact(exact)
    row = judge(case, "reference", "inv_rms", result, truth)
    return outputs.Output(case, row, result, result, truth, {})


def test_distribution():
    exact = torch.ones(100, dtype=torch.float64)
    result = exact.clone()
    result[:10] += 1e-3 * 1.5
    result[10:12] = -2
    result[12] = math.nan
    result[13] = 0
    found = output(result, exact).statistics()
    assert found["decades"] == {"1e-9": 0.86, "1e-3": 0.10, "1e0": 0.03}
    assert (found["nan"], found["zero"]) == (1, 1)
    assert found["error"]["min"] == pytest.approx(-3)
    assert (found["ratio"]["min"], found["ratio"]["max"]) == (-2, pytest.approx(1.0015))


def test_errors_by_block():
    exact = torch.ones(80, dtype=torch.float64)
    result = exact.clone()
    result[40] += 50 * NORM_TOLERANCE[torch.float64]
    result[79] = math.nan
    found = output(result, exact).details()
    blocks = found["largest error by block, of what is allowed"]["token"]
    assert list(blocks) == [str(first) for first in range(0, 80, 4)]
    assert (blocks["0"], blocks["40"], blocks["76"]) == (0, pytest.approx(50, rel=0.1), math.inf)
    assert found["map"] == {"token": "··········▒········N"}


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
