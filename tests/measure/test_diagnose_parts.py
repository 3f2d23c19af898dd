"""The parts of a diagnosis: places as words, terms by least squares, distributions, maps."""

import math

import pytest
import torch

from mhc_ops.measure import cases
from mhc_ops.measure.accuracy import Exact, judge
from mhc_ops.measure.cases import Case
from mhc_ops.measure.diagnose import explain, outputs, show

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
        ([1, 5, 6, 20, 21, 30, 41], 60, "token", "7 of 60 tokens (1, 5, 6, …)"),
        ([4, 5, 6, 7], 8, "row", "the res section"),
        ([0, 1, 4, 5, 6, 7], 8, "row", "the pre and res sections"),
        ([4, 5], 8, "row", "rows 4 to 5"),
        ([2], 3, "section", "section res"),
    ],
)
def test_indices_as_words(indices, size, axis, words):
    assert outputs.index_words(indices, size, axis, SECTIONS) == words


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


def three_terms():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 10, 8, dtype=torch.float64, generator=generator)
    return {"a of p": drawn[0], "a of q": drawn[1], "b": drawn[2]}


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"b": 0.0}, "b is left out"),
        ({"b": -1.0}, "b has the wrong sign"),
        ({"a of q": 2.5}, "a of q counts 2.5 times"),
        ({"a of q": 16.0}, "a of q counts 16 (n²) times"),
        ({"a of p": 0.0, "a of q": 0.0}, "a is left out"),
        ({"a of p": 3.0, "b": 0.0}, "a of p counts 3 times and b is left out"),
    ],
)
def test_terms(times, words):
    own = three_terms()
    exact = sum(own.values())
    result = sum(times.get(name, 1.0) * term for name, term in own.items())
    everywhere = torch.ones_like(exact, dtype=torch.bool)
    fits = explain.fits(result - exact, exact, own, everywhere)
    first = next(found for found, candidate in fits if torch.allclose(candidate, result))
    assert explain.term_words(first, outputs.everywhere(everywhere), {"n²": 16}) == words
    fitted = outputs.coefficients(result - exact, own)
    assert fitted == pytest.approx({name: times.get(name, 1.0) - 1 for name in own}, abs=1e-9)


def test_a_factor_in_a_place():
    exact = three_terms()["b"]
    box = torch.zeros_like(exact, dtype=torch.bool)
    box[:, :4] = True
    ((times, candidate),) = explain.fits(torch.where(box, 3 * exact, 0), exact, {explain.ALL: exact}, box)
    assert times == {explain.ALL: 4}
    assert torch.equal(candidate[:, 4:], exact[:, 4:])


def output(result, exact):
    """As inv_rms of so many tokens."""
    case, truth = Case(cases.MHC_FORWARD_PRE, (len(exact),), 1, 1), Exact(exact)
    row = judge(case, "reference", "inv_rms", result, truth)
    return outputs.Output(case, row, result, result, truth)


def test_distribution():
    exact = torch.ones(100, dtype=torch.float64)
    result = exact.clone()
    result[:10] += 1e-3 * 1.5
    result[10:12] = -2
    result[12] = math.nan
    result[13] = 0
    found = output(result, exact).statistics
    assert found["decades"] == {"below 1e-8": 0.86, "1e-3": 0.10, "1e0": 0.03}
    assert (found["nan"], found["zero"]) == (1, 1)
    assert found["max"] == pytest.approx(3)
    assert (found["ratio_min"], found["ratio_max"]) == (-2, pytest.approx(1.0015))
    assert found["ratio"] == "varying, sign flipped in 15%"


def test_a_constant_ratio():
    exact = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert output(2 * exact, exact).statistics["ratio"] == "constant"


def test_a_map_joins_rows_that_look_the_same():
    error = torch.zeros(64, 2, 40)
    error[:, 1] = 50
    error[40:, 0, 32:] = math.nan
    assert list(show.map_of(error, {"token": 64, "stream": 2, "channel": 40}, columns=12)) == [
        ("", "  0  │  1"),
        ("token 0–39", "·····│▒▒▒▒▒"),
        ("token 40–63", "····N│▒▒▒▒▒"),
        ("", "channels 0 to 39 of each stream, 8 per character"),
    ]


@pytest.mark.parametrize(
    "layout",
    [
        {"section": 3},
        {"row": 24},
        {"stream": 4, "channel": 70},
        {"sequence": 2, "token": 40, "stream": 3, "channel": 9},
    ],
)
def test_a_map_takes_every_layout(layout):
    error = torch.full(tuple(layout.values()), 5.0)
    *_, (_, line), (_, unit) = show.map_of(error, layout)
    assert set(line) - {"│"} == {"░"}
    assert unit.startswith(list(layout)[-1])
    assert set(show.profile(error, layout)) == set(layout)
