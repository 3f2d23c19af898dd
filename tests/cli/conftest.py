"""Files of safetensors for `mhc-ops convert`."""

import json

import pytest
import torch
from convert_files import INDEX, D, K, M


@pytest.fixture
def safetensors():
    return pytest.importorskip("safetensors.torch", reason="safetensors is not installed: pip install safetensors")


@pytest.fixture
def checkpoint(safetensors, tmp_path):
    """Of two tensors that are none of mHC, and one connection."""
    torch.manual_seed(1)
    state = {
        "embed.weight": torch.randn(5, D).bfloat16(),
        "layers.0.hc_attn_fn": torch.randn(M, K),
        "layers.0.hc_attn_base": torch.randn(M),
        "layers.0.hc_attn_scale": torch.randn(3),
        "layers.0.norm.weight": torch.randn(D),
    }
    path = tmp_path / "in.safetensors"
    safetensors.save_file(state, path, {"format": "pt", "note": "kept"})
    return path


@pytest.fixture
def shards(checkpoint, tmp_path, safetensors):
    """The same in a folder of three files, the connection over all of them and alone in the last."""
    folder, state = tmp_path / "shards", safetensors.load_file(checkpoint)
    folder.mkdir()
    names = ["embed.weight hc_attn_fn", "hc_attn_base norm.weight", "hc_attn_scale"]
    weight_map = {}
    for i, ends in enumerate(names, 1):
        part = {key: tensor for key, tensor in state.items() if key.endswith(tuple(ends.split()))}
        safetensors.save_file(part, folder / f"model-{i}.safetensors", {"format": "pt", "note": str(i)})
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    index = {"metadata": {"total_size": 1, "note": "kept"}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index))
    return folder
