"""A training step (forward and backward) of a DeepSeek-V4-shaped model of transformers, eager against patched.

    python benchmarks/transformers_step.py --json transformers_step.json
    python benchmarks/transformers_step.py --device cpu --hidden 64 --batch 1 --seq 32 --layers 2 --experts 2 --steps 1

Four models with the same weights: transformers' own, patched, patched with exact_as_eager, and `plain`, in which every
sublayer is x + sublayer(norm(x)) on one stream. What the hyper-connections take is the time of all kernels of a step
less that of plain: so the norms in front of the sublayers, which patched fuses, are in none of them.
"""

import argparse
import gc
import json
import platform
import re
import statistics
import time
from pathlib import Path

import torch
import transformers
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek

import mhc_ops
from mhc_ops.compat.transformers import patch

VARIANTS = ("plain", "eager", "patched", "exact_as_eager")


class PlainLayer(deepseek.DeepseekV4DecoderLayer):
    """Without hyper-connections: hidden_states [B, S, 1, D]."""

    def forward(self, hidden_states, input_ids=None, **kwargs):
        x = hidden_states.squeeze(2)
        x = x + self.self_attn(self.input_layernorm(x), **kwargs)[0]
        x = x + self.mlp(self.post_attention_layernorm(x), input_ids=input_ids)
        return x.unsqueeze(2)


class PlainHead(deepseek.DeepseekV4HyperHead):
    def forward(self, x):
        return x.squeeze(2)


def config_of(arguments, streams):
    attention = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
    return transformers.DeepseekV4Config(
        vocab_size=8192,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        hc_mult=streams,
        num_attention_heads=16,
        head_dim=128,
        q_lora_rank=max(arguments.hidden // 4, 16),
        moe_intermediate_size=arguments.hidden // 2,
        n_routed_experts=arguments.experts,
        num_experts_per_tok=2,
        o_groups=4,
        o_lora_rank=max(arguments.hidden // 8, 16),
        index_n_heads=16,
        index_head_dim=64,
        index_topk=256,
        layer_types=[attention[i % 3] for i in range(arguments.layers)],
        mlp_layer_types=["moe"] * arguments.layers,
        use_cache=False,
    )


def build(variant, arguments, weights):
    """Builds the model of a variant, with the given weights where it has them, else with random ones."""
    streams = 1 if variant == "plain" else 4
    dtype = getattr(torch, arguments.dtype)
    with torch.device(arguments.device):
        model = transformers.AutoModelForCausalLM.from_config(config_of(arguments, streams), dtype=dtype)
    strict = re.compile(rf"(^|\.)({'|'.join(model._keep_in_fp32_modules_strict)})(\.|$)")
    for name, parameter in model.named_parameters():
        if strict.search(name):
            parameter.data = parameter.data.float()  # as from_pretrained does
    if weights is not None:
        own = model.state_dict()
        fitting = {name: weights[name] for name in own if own[name].shape == weights[name].shape}
        model.load_state_dict(fitting, strict=False)
    model.train()
    if variant == "plain":
        for module in model.modules():
            if type(module) in (deepseek.DeepseekV4DecoderLayer, deepseek.DeepseekV4HyperHead):
                module.__class__ = PlainLayer if isinstance(module, deepseek.DeepseekV4DecoderLayer) else PlainHead
    elif variant != "eager":
        patch(model, exact_as_eager=variant == "exact_as_eager")
    return model


def measure(model, ids, steps):
    on_gpu = ids.is_cuda
    finish = torch.cuda.synchronize if on_gpu else lambda: None

    def step():
        model.zero_grad(set_to_none=True)
        loss = model(ids, labels=ids).loss
        loss.backward()
        return loss.detach()

    for _ in range(1 + 2 * on_gpu):
        loss = step()
    found = {"loss": loss.item()}
    times = []
    for _ in range(steps):
        finish()
        start = time.perf_counter()
        step()
        finish()
        times.append(1e3 * (time.perf_counter() - start))
    found |= {"ms": statistics.median(times), "ms_of_each": times}
    if on_gpu:
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated()
        found |= {"peak_gib": peak / 2**30, "peak_above_weights_gib": (peak - before) / 2**30}
    return found | kernels(step, finish, on_gpu, steps=min(steps, 3))


def kernels(step, finish, on_gpu, steps):
    """How long all kernels of a step take together, and how many there are; on a CPU, the operators of torch."""
    with profile(activities=[ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            step()
        finish()
    if on_gpu:
        ran = [each for each in profiled.events() if each.device_type == DeviceType.CUDA]
        micros = sum(each.time_range.elapsed_us() for each in ran)
    else:
        ran = profiled.events()
        micros = sum(each.self_cpu_time_total for each in ran)
    return {"kernels_ms": micros / 1e3 / steps, "kernels": len(ran) / steps}


def run(arguments):
    torch.manual_seed(0)
    weights = {name: each.cpu() for name, each in build("eager", arguments, None).state_dict().items()}
    ids = torch.randint(2, 8192, (arguments.batch, arguments.seq), device=arguments.device)
    found = {}
    for variant in VARIANTS:
        model = build(variant, arguments, weights)
        found[variant] = measure(model, ids, arguments.steps)
        print(variant, json.dumps({name: value for name, value in found[variant].items() if name != "ms_of_each"}))
        del model
        gc.collect()
        if ids.is_cuda:
            torch.cuda.empty_cache()
    alone = {name: found[name]["kernels_ms"] - found["plain"]["kernels_ms"] for name in VARIANTS[1:]}
    return {
        "what": __doc__,
        "device": torch.cuda.get_device_name() if ids.is_cuda else platform.processor() or platform.machine(),
        "versions": {each.__name__: each.__version__ for each in (torch, transformers, mhc_ops)},
        "arguments": {name: str(value) for name, value in vars(arguments).items() if name != "json"},
        "variants": found,
        "hyper_connections_ms": alone,
        "times_faster_in_hyper_connections": alone["eager"] / alone["patched"],
        "times_faster_step": found["eager"]["ms"] / found["patched"]["ms"],
    }


def parsed(line):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    for name, default in {"hidden": 4096, "layers": 4, "experts": 8, "batch": 4, "seq": 2048, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(line)


def main(line=None):
    arguments = parsed(line)
    found = run(arguments)
    print(json.dumps({name: found[name] for name in found if name.startswith(("hyper", "times"))}, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
