"""Which models of transformers are patched, what of them stays, and what is refused."""

import contextlib
import copy
import pickle

import pytest
import torch
from compat_oracle import distance, says
from tiny_models import KINDS, LOGITS, assert_same_results, results
from torch import nn

from mhc_ops.compat import transformers as on_mhc_ops
from mhc_ops.compat.transformers import patch, patched, unpatch

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")
pytest.importorskip("transformers", reason="needs transformers: pip install 'mhc-ops[adopt]'")


def classes(model):
    return [type(module) for module in model.modules()]


def test_what_stays_and_what_comes_back(tiny, tmp_path):
    """Patched classes have other types and the same names, by which device maps and FSDP find layers. Checkpoints are
    the same, and an unpatched model has the same bits."""
    own, keys = classes(tiny.model), list(tiny.model.state_dict())
    with patched(tiny.model) as model:
        assert classes(model) != own
        assert [one.__name__ for one in classes(model)] == [one.__name__ for one in own]
        assert type(tiny.text_layers()[0]).__name__ in model._no_split_modules
        assert list(model.state_dict()) == keys
        model.save_pretrained(tmp_path)
    assert classes(tiny.model) == own
    logits, gradients = results(tiny.model, tiny.ids)
    assert torch.equal(logits, tiny.eager[0])
    assert all(torch.equal(gradients[name], tiny.eager[1][name]) for name in gradients)
    found, expected = (safetensors.load_file(folder / "model.safetensors") for folder in (tmp_path, tiny.folder))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert (tmp_path / "config.json").read_text() == (tiny.folder / "config.json").read_text()


def test_models_that_are_loaded_later(tiny, mapping):
    with patched():
        loaded = tiny.load()
    assert len(loaded(tiny.ids, output_hidden_states=True).hidden_states) == 4
    assert_same_results(results(loaded, tiny.ids), tiny.eager)
    unpatch(loaded)
    assert torch.equal(results(loaded, tiny.ids)[0], tiny.eager[0])


@torch.no_grad()
def test_models_that_are_not_loaded(built, mapping):
    """A constructor makes a model that is not patched, and that still records what it should."""
    tiny = built("hy_v4")
    with patched():
        constructed = type(tiny.model)(copy.deepcopy(tiny.model.config))
        assert len(constructed(tiny.ids, output_hidden_states=True).hidden_states) == 4
        from_config = type(tiny.model)._from_config(copy.deepcopy(tiny.model.config))
    ours = ["mhc_ops" in type(model.model.layers[0]).__module__ for model in (constructed, from_config)]
    assert ours == [False, True]


@torch.no_grad()
def test_copies_and_pickles(tiny):
    model = tiny.model.model
    with patched(model):
        made = [copy.deepcopy(model)]
        with contextlib.suppress(AttributeError):  # some models of transformers cannot be pickled beside `kernels`
            made.append(pickle.loads(pickle.dumps(model)))
        names = [each.__name__ for each in classes(model)]
    expected = model(tiny.ids).last_hidden_state
    for each in made:
        assert [own.__name__ for own in classes(each)] == names
        assert distance(each(tiny.ids).last_hidden_state, expected) < LOGITS
        unpatch(each)
        assert torch.equal(each(tiny.ids).last_hidden_state, expected)


def test_patching_twice(built, mapping):
    """A call asks for a state. That this state is there already is no error, nor is nothing to undo."""
    tiny = built("hy_v4")
    plain = classes(tiny.model)
    unpatch(tiny.model)
    assert patch(tiny.model) == patch(tiny.model) == ("hy_v4",)
    ours = classes(tiny.model)
    with patched(tiny.model, exact_as_eager=True):
        assert classes(tiny.model) not in (ours, plain)
    assert classes(tiny.model) == ours != plain
    tiny.model.model.layers[1].forward = tiny.model.model.layers[1].forward  # too late to patch, if it had to be
    patch(tiny.model)
    del tiny.model.model.layers[1].forward
    for _ in range(2):
        unpatch(tiny.model)
        assert classes(tiny.model) == plain
    assert patch() == patch() == tuple(KINDS)
    registered = mapping()
    with patched(exact_as_eager=True):
        assert mapping().keys() == registered.keys() and mapping() != registered
    assert mapping() == registered
    loaded = tiny.load()
    assert patch(loaded) == ("hy_v4",) and classes(loaded) == ours
    for _ in range(2):
        unpatch()


def test_what_others_registered_stays(mapping):
    from transformers.monkey_patching import register_patch_mapping, unregister_patch_mapping

    register_patch_mapping({"HYV4HyperHead": nn.Identity})
    with says(ValueError, "patch: HYV4HyperHead of transformers is replaced already, by a class of another library"):
        patch()
    unpatch()
    assert mapping() == {"HYV4HyperHead": nn.Identity}
    unregister_patch_mapping(["HYV4HyperHead"])


def test_what_is_no_model_and_without_transformers_or_these_models(monkeypatch):
    with pytest.raises(ValueError, match=r"^patch: Linear has no hyper-connections of a known kind"):
        patch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"^patch: model must be "):
        patch("tencent/Hy4-preview")
    monkeypatch.setattr(on_mhc_ops, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"^patch: the package transformers is not installed"):
        patch()
    monkeypatch.setattr(on_mhc_ops, "find_spec", lambda name: "here" if name == "transformers" else None)
    with pytest.raises(ImportError, match=r"^patch: transformers \S+ has none of deepseek_v4, glm5_next, hy_v4; 5\.8"):
        patch()


def test_what_others_changed_is_not_patched(built):
    """A forward of its own (accelerate, kernels) or another class (FSDP2) would not run ours."""
    model = copy.deepcopy(built("hy_v4").model)
    layer = model.model.layers[1]
    layer.forward = layer.forward
    with pytest.raises(ValueError, match=r"^patch: model\.layers\.1 has a forward of its own"):
        patch(model)
    del layer.forward
    for change in (patch, unpatch):
        original = type(layer)
        layer.__class__ = type("FSDPLayer", (original,), {})
        with pytest.raises(ValueError, match=r"patch: model\.layers\.1 is a FSDPLayer, not a HYV4DecoderLayer"):
            change(model)
        layer.__class__ = original
        patch(model)
