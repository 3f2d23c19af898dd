"""The options of pre are written once; what must be typed twice says the same."""

import inspect
import typing

import pytest

import mhc_ops
from mhc_ops.mhc.options import DEFAULTS, PreKeywords, PreOptions

TAKE_ALL = ["mhc_pre", "mhc_post_pre", "mhc_layer", "mhc_enter", "mhc_next", "warmup", "HyperConnection"]


@pytest.mark.parametrize("name", [*TAKE_ALL, "mhc_maps"])
def test_functions_and_modules_show_them_all(name):
    """So do the keywords. Maps alone have no norm."""
    assert typing.get_type_hints(PreKeywords) == typing.get_type_hints(PreOptions)
    parameters, expected = inspect.signature(getattr(mhc_ops, name)).parameters, DEFAULTS._asdict()
    if name == "mhc_maps":
        del expected["layer_norm_eps"]
    assert {name: parameters[name].default for name in parameters if name in PreOptions._fields} == expected
