"""The options of pre are written once; what must be typed twice says the same."""

import inspect
import typing

import pytest
import torch

import mhc_ops
from mhc_ops.mhc.contracts import mhc_pre_bwd, mhc_pre_fwd
from mhc_ops.mhc.options import DEFAULTS, PreKeywords, PreOptions

TAKE_ALL = (
    mhc_ops.mhc_pre,
    mhc_ops.mhc_post_pre,
    mhc_ops.mhc_layer,
    mhc_ops.mhc_enter,
    mhc_ops.mhc_next,
    mhc_ops.warmup,
    mhc_ops.HyperConnection.__init__,
)


def test_keywords_are_the_options():
    assert typing.get_type_hints(PreKeywords) == typing.get_type_hints(PreOptions)


@pytest.mark.parametrize("function", TAKE_ALL, ids=lambda function: function.__qualname__)
def test_functions_and_modules_show_them_all(function):
    parameters = inspect.signature(function).parameters
    assert {name: parameters[name].default for name in PreOptions._fields} == DEFAULTS._asdict()


def test_maps_alone_have_no_norm():
    parameters = inspect.signature(mhc_ops.mhc_maps).parameters
    own = {name: default for name, default in DEFAULTS._asdict().items() if name != "layer_norm_eps"}
    assert {name: parameters[name].default for name in parameters if name in PreOptions._fields} == own
    tensors = torch.zeros(2, 1, 4), torch.zeros(3, 4), torch.zeros(3), torch.zeros(3)
    with pytest.raises(TypeError, match=r"^mhc_maps\(\) got an unexpected keyword argument 'layer_norm_eps'$"):
        mhc_ops.mhc_maps(*tensors, layer_norm_eps=1e-6)


@pytest.mark.parametrize("op", [mhc_pre_fwd, mhc_pre_bwd], ids=lambda op: op.name)
def test_the_schema_has_them_all(op):
    schema = op.traced._opoverload._schema
    kinds = {float: "float", int: "int", bool: "bool", str: "str"}
    found = {argument.name: str(argument.type) for argument in schema.arguments}
    assert {name: found[name] for name in PreOptions._fields} == {
        name: kinds[kind] for name, kind in PreOptions.__annotations__.items()
    }
