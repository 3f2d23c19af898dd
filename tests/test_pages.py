"""Every code block of every page runs as it is written. NOT_RUN names the exceptions, with the reason.

The word after the fence says the kind of a block:
  python   runs in a process of its own; on docs/distributed.md in two, as torchrun starts them. A block that begins
           with the name of a file, as a comment, is a quote: its lines stand in that file, in this order
  sh       runs command by command, in a folder with the files that the commands read
  {name}   is a directive of Sphinx, which tests/test_docs.py builds
  (none)   is no code: equations, drawings, what a command printed
"""

import ast
import glob
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import older_torch
import pytest
import torch
from processes import run_alone, run_as_torchrun

import mhc_ops
from mhc_ops import cli

ROOT = Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
UNDER_TORCHRUN = "docs/distributed.md"
NEEDED = {  # what blocks import, and why it is not installed
    **dict.fromkeys(("kernels", "transformers"), "pip install 'mhc-ops[adopt]'"),
    **dict.fromkeys(("vllm", "sglang"), "it needs a GPU"),
}
OUR_COMMAND = r"(mhc-ops|python -m mhc_ops) "
# Patterns of commands, and why they are not run.
NOT_RUN = {
    r"pip install|\./run\.sh|\./run_tests\.sh": "installs from a network",
    r"pytest -m gpu|--backend triton|rocprofv3": "needs a GPU",
    r"torchrun": "takes eight processes, or eight machines",
    r"vllm serve|sglang\.launch_server": "starts a server, which needs a GPU",
    OUR_COMMAND + r"(check|bench)": "measures for minutes: only its command line is read",
    r"run_channellast_test\.sh": "compiles for a minute: tests/conv/hip/test_hip_program.py runs it for fewer types",
    r"scripts/bits\.py": "computes every case: for half a minute",
}


class Block(NamedTuple):
    page: str
    line: int
    kind: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in re.finditer(r"^( *)```(.*)\n((?:.*\n)*?)\1```$", text, re.MULTILINE):
        yield Block(page, text[: found.start()].count("\n") + 1, found[2].strip(), textwrap.dedent(found[3]))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(block):
    """The commands of a block, without comments; a command over several lines becomes one."""
    lines = re.sub(r"\\\n *", "", block.text).replace("<gpu>", "h200").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def is_quote(block):
    first = block.text.partition("\n")[0]
    return first.startswith("# ") and (ROOT / first[2:]).is_file()


def of_kind(kind):
    return [block for block in BLOCKS if block.kind == kind]


def test_every_fence_is_of_a_block():
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        fences = re.findall(r"^ *(?:```|~~~)", text, re.MULTILINE)
        assert len(fences) == 2 * sum(block.page == page for block in BLOCKS), page
        assert "\n%" not in text, f"{page}: the site leaves out a line that begins with %"
    assert {block.kind for block in BLOCKS if not block.kind.startswith("{")} == {"python", "sh", ""}


@pytest.mark.parametrize("block", of_kind(""), ids=str)
def test_what_names_no_language_is_no_code(block):
    assert not re.search(r"^ *(mhc-ops|pip|python|pytest|torchrun|\./\S+|scripts/\S+) ", block.text, re.MULTILINE)
    with pytest.raises(SyntaxError):
        ast.parse(block.text)


@pytest.mark.parametrize("block", list(filter(is_quote, of_kind("python"))), ids=str)
def test_a_quote_stands_in_its_file(block):
    file, *quoted = filter(None, map(str.strip, block.text.splitlines()))
    lines = iter(map(str.strip, (ROOT / file.removeprefix("# ")).read_text(encoding="utf-8").splitlines()))
    assert [line for line in quoted if line not in lines] == []


def marked(block):
    return pytest.param(block, marks=[older_torch.MATRIX_PRODUCT] if "HyperParallel" in block.text else [])


@pytest.mark.parametrize("block", [marked(block) for block in of_kind("python") if not is_quote(block)], ids=str)
def test_python(block, tmp_path):
    for package, why in NEEDED.items():
        imports = re.search(rf"^(import|from) {package}\b", block.text, re.MULTILINE)
        if imports and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {why}")
    slot = tmp_path / "megatron" / "core" / "fusions" / "fused_mhc_kernels.py"  # no package index has this branch
    slot.parent.mkdir(parents=True)
    slot.touch()
    if block.page == UNDER_TORCHRUN:
        run_as_torchrun(2, execute, block, str(tmp_path))
    else:
        run_alone(execute, block, str(tmp_path))


def execute(block, folder):
    """Runs the block as a script in this folder. A traceback gives the lines of the page."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    exec(compile("\n" * block.line + block.text, ROOT / block.page, "exec"), {"__name__": "__main__"})


def execute_module(words, folder):
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


@pytest.mark.parametrize("block", of_kind("sh"), ids=str)
def test_shell(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_what_commands_read()
    for command in commands_of(block):
        excluded = any(re.search(pattern, command) for pattern in NOT_RUN)
        ours = re.search(f"{OUR_COMMAND}(.*)", command)
        if ours:
            words = [word for text in shlex.split(ours[2]) for word in sorted(glob.glob(text)) or [text]]
            if excluded:
                cli._parser().parse_args(words)
            else:
                assert cli.main(words) == 0, command
        elif not excluded:
            python, option, *words = shlex.split(command)
            assert (python, option) == ("python", "-m")
            run_alone(execute_module, words, str(tmp_path))


def write_what_commands_read():
    Path("docs/images").mkdir(parents=True)
    shutil.copytree(ROOT / "benchmarks" / "results", "benchmarks/results")
    shutil.copy("benchmarks/results/h200_training_step.json", "bench.json")
    for name in ("before.json", "after.json"):
        shutil.copy("benchmarks/results/h200.json", name)
    Path("train.py").write_text("import sys, causal_conv1d; assert sys.argv[1:] == ['--its', 'arguments']")
    Path("its").mkdir()
    shutil.copy("train.py", "its/module.py")
    if importlib.util.find_spec("safetensors"):
        from safetensors.torch import save_file

        n, D = 4, 8
        connection = mhc_ops.HyperConnection(torch.nn.Linear(D, D, bias=False), n, D, layer_norm=True)
        save_file({f"stack.0.{name}": tensor for name, tensor in connection.state_dict().items()}, "fresh.safetensors")
        maps = {f"layers.0.hc_attn.{name}": getattr(connection, name).detach() for name in ("phi", "alpha", "bias")}
        theirs = mhc_ops.convert.from_ours(maps | {"layers.0.attn_norm.weight": torch.ones(D)}, "deepseek")
        plain = {"blocks.0.attn.weight": torch.randn(D, D), "blocks.0.norm1.weight": torch.ones(D)}
        for file, folder, state in (("model", "DeepSeek-V4", theirs), ("plain", "plain", plain)):
            save_file(state, f"{file}.safetensors")
            Path(folder).mkdir()
            save_file(state, f"{folder}/model.safetensors")
            index = {"weight_map": dict.fromkeys(state, "model.safetensors")}
            Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_front_page_stays_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 110
