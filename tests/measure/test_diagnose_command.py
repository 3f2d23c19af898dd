"""mhc-ops diagnose: what it prints and writes, and how it exits."""

import json
import sys
import xml.dom.minidom

import pytest
import torch

from mhc_ops import cli
from mhc_ops.measure.diagnose import command
from mhc_ops.mhc import reference
from mhc_ops.testing import cases
from mhc_ops.testing.conv_cases import ConvCase

fp64 = torch.float64
SMALL = ["--device", "cpu", "--shape", "12x4x24"]


@pytest.fixture
def only_the_first_stream(monkeypatch):
    """mhc_post leaves the other streams zero, but not in fp64, where it is the truth."""
    right = reference.mhc_post

    def wrong(x, *arguments):
        x_next = right(x, *arguments)
        return x_next if x.dtype == torch.float64 else x_next * (torch.arange(x.shape[-2]) < 1)[:, None]

    monkeypatch.setattr(reference, "mhc_post", wrong)


def test_silence(capsys):
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("mhc_post, reference: nothing found in 8 cases; the largest error is ")
    assert "diagnose 1/8: mhc_post 12x4x24 float32" in printed.err


def test_something_is_off(only_the_first_stream, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mhc_post 12x4x24 float32, reference: 5 of 5 outputs are off"
    assert lines[1].startswith("  1. x_next: streams 1 to 3 are zero: masked, or never added to")
    assert lines[2].startswith(
        "  2. dx, dh_res, dh_out, dh_post: streams 1 to 3 of dx_next are read as zero for dh_res"
    )
    drawn = next(line for line in lines if line.startswith("  tokens 0 and up "))
    cells = drawn.split()[-1].split("│")
    assert set(cells[0]) == {"·"}
    assert set("".join(cells[1:])) == {"█"}
    assert lines[-1] == "0 of 8 cases right, 1 off, 7 not run"
    assert "\033" not in "".join(lines)


def test_colours_on_a_terminal_only(only_the_first_stream, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 1
    assert "\033[1;31m  1. x_next" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("factors", "words"), [((2, 2, 2, 2), "constant: mean 2,"), ((2, -1, 2, -1), "varying, signs flipped: mean 0.")]
)
def test_a_constant_ratio_is_told_from_a_varying_one(factors, words, capsys, monkeypatch):
    right = reference.mhc_post

    def wrong(x, *arguments):
        x_next = right(x, *arguments)
        return x_next if x.dtype == torch.float64 else x_next * torch.tensor(factors)[:, None]

    monkeypatch.setattr(reference, "mhc_post", wrong)
    assert cli.main(["diagnose", "mhc_post", *SMALL, "--dtype", "fp32"]) == 1
    ratio = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  result / truth"))
    assert f" {words}" in ratio


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_nothing_but_the_table_and_the_legend_is_wider_than_the_terminal(
    columns, only_the_first_stream, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", columns)
    cli.main(["diagnose", "mhc_post", "--device", "cpu", "--shape", "12x4x264"])
    _, _, *details = capsys.readouterr().out.split("\n\n")
    lines = [line for part in details[:-2] for line in part.splitlines()]
    assert any("│" in line for line in lines)
    assert max(map(len, lines)) <= int(columns)


def test_json(only_the_first_stream, tmp_path):
    file = tmp_path / "found.json"
    assert cli.main(["diagnose", "mhc_post", *SMALL, "--dtype", "fp32", "--seed", "3", "--json", str(file)]) == 1
    content = json.loads(file.read_text())
    assert (content["op"], content["backend"], content["passed"]) == ("mhc_post", "reference", False)
    assert content["findings"][0]["outputs"] == ["x_next"]
    assert content["findings"][0]["sentence"].startswith("streams 1 to 3 are zero")
    assert {row["output"]: row["verdict"] for row in content["outputs"]}["dx"] == "FAIL"
    detail = content["details"][0]
    assert detail["axes"] == {"token": 12, "stream": 4, "channel": 24}
    by_stream = detail["largest error by block, of what is allowed"]["stream"]
    assert by_stream["0"] < 1 < by_stream["3"]
    assert content["versions"]["torch"] == torch.__version__


def test_json_has_no_nan(monkeypatch, tmp_path):
    right = reference.mhc_post
    monkeypatch.setattr(
        reference, "mhc_post", lambda x, *more: right(x, *more) * (1 if x.dtype == torch.float64 else torch.nan)
    )
    file = tmp_path / "found.json"
    assert cli.main(["diagnose", "mhc_post", *SMALL, "--json", str(file)]) == 1
    content = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert content["findings"][0]["sentence"] == "everything is NaN"
    assert content["outputs"][0]["relative_error"] is None


@pytest.mark.parametrize("code", [0, 1])
def test_html_is_one_page(code, request, tmp_path):
    if code:
        request.getfixturevalue("only_the_first_stream")
    file = tmp_path / "found.html"
    assert cli.main(["diagnose", "mhc_post", *SMALL, "--html", str(file)]) == code
    page = file.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>\n")
    document = xml.dom.minidom.parseString(page.split("\n", 1)[1])  # well-formed, each tag closed
    assert len(document.getElementsByTagName("tr")) >= 5
    for outside in ("http", "src=", "href", "@import", "url(", "<script", "<link"):
        assert outside not in page
    assert ("streams 1 to 3 are zero" in page) is bool(code)
    assert ("nothing found" in page) is not bool(code)
    assert ("<dt>tokens 0 and up</dt>" in page) is bool(code)


def test_unknown_op(capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["diagnose", "mhc_psot"])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert all(subject.name in printed for subject in cases.SUBJECTS)
    assert "short_conv" in printed


def test_every_op_has_cases():
    assert command.OPS == (
        "mhc_forward_pre",
        "mhc_pre",
        "mhc_post",
        "mhc_layer",
        "mhc_post_pre",
        "mhc_head",
        "sinkhorn",
        "mhc_maps",
        "mhc_read",
        "mhc_next",
        "mhc_shifted_pre",
        "mhc_mean",
        "causal_conv1d",
        "causal_conv1d_update",
        "short_conv",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mhc_post", "--backend", "hip"], "backend 'hip' cannot run here: there are no hip kernels for mhc"),
        (["short_conv", "--backend", "hip", "--device", "cpu"], "hip cannot run short_conv"),
        (["mhc_post", "--shape", "7"], "--shape of mhc_post must be Tx…xNxD, got 7"),
        (["sinkhorn", "--shape", "7x4x3"], "--shape of sinkhorn must be TxNxN, got 7x4x3"),
        (["causal_conv1d", "--shape", "7x4"], "--shape of causal_conv1d must be BxLxD, got 7x4"),
        (["mhc_post", "--width", "3"], "mhc_post has no --width"),
        (["mhc_post", "--inputs", "nowhere.pt"], "--inputs nowhere.pt: "),
        (["mhc_post", "--inputs", "nowhere.pt", "--dtype", "fp32"], "--dtype and --inputs exclude each other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_run(arguments, message, capsys):
    assert cli.main(["diagnose", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["2xx3", "a", "0x4x8", "-1x4", "99999999999999999999x4x4"])
def test_a_shape_that_is_none(shape, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["diagnose", "mhc_post", f"--shape={shape}"])
    assert exit.value.code == 2
    assert "argument --shape" in capsys.readouterr().err


@pytest.mark.parametrize(
    "case",
    [
        *(cases.Case(subject, (12,), 2, 24, torch.float32) for subject in cases.ALL),
        cases.Case(cases.MHC_PRE, (), 4, 300, torch.bfloat16, gamma=False, sigma=8),
        ConvCase(2, 13, 20),
        ConvCase(1, 13, 20, dilation=2, places="cu_seqlens states"),
        ConvCase(2, 13, 20, places="seq_idx", residual=True, bias=False),
        ConvCase(3, 1, 20, update=True, places="slots"),
        ConvCase(2, 13, 20, n=2),
    ],
    ids=str,
)
def test_own_inputs(case, tmp_path, capsys):
    file = tmp_path / "inputs.pt"
    torch.save({name: tensor for name, tensor in case.inputs().items() if name != "link"}, file)
    op = case.subject.name.split()[0]
    assert cli.main(["diagnose", op, "--device", "cpu", "--inputs", str(file)]) == 0
    assert f"{op}, reference: nothing found" in capsys.readouterr().out


def test_own_inputs_that_are_off(only_the_first_stream, tmp_path, capsys):
    file = tmp_path / "inputs.pt"
    torch.save(cases.Case(cases.MHC_POST, (12,), 4, 24, torch.float32).inputs(), file)
    assert cli.main(["diagnose", "mhc_post", "--device", "cpu", "--inputs", str(file)]) == 1
    assert "x_next: streams 1 to 3 are zero" in capsys.readouterr().out


def test_own_inputs_that_are_not_finite(tmp_path, capsys):
    file, found = tmp_path / "inputs.pt", [tmp_path / "found.json", tmp_path / "found.html"]
    tensors = cases.Case(cases.MHC_LAYER, (12,), 4, 24, torch.float32).inputs()
    tensors["x"][3, 1, 7] = torch.nan
    torch.save(tensors, file)
    command = ["diagnose", "mhc_layer", "--device", "cpu", "--inputs", str(file)]
    assert cli.main([*command, "--json", str(found[0]), "--html", str(found[1])]) == 1
    assert "cannot be judged: the truth is not finite" in capsys.readouterr().out
    assert json.loads(found[0].read_text(), parse_constant=pytest.fail)["passed"] is False


def test_without_jinja_a_page_is_refused(monkeypatch, capsys, tmp_path):
    """Before the work begins."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr(command, "diagnose", pytest.fail)
    assert cli.main(["diagnose", "mhc_post", *SMALL, "--html", str(tmp_path / "found.html")]) == 2
    assert "pip install mhc-ops[bench]" in capsys.readouterr().err


def test_without_jinja_what_is_off_is_not_shown(monkeypatch, capsys, only_the_first_stream):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1] == (
        "mhc-ops diagnose: showing what was found needs jinja2, which is not installed: pip install mhc-ops[bench]"
    )


def test_without_jinja_a_right_op_is_diagnosed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 0
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": torch.ones(3, 2, 4)}, "h_out, h_post missing. mhc_post takes x, h_out, h_post, h_res?"),
        ({"X": torch.ones(1)}, "x, h_out, h_post missing; X unknown."),
        ({**cases.Case(cases.MHC_POST, (3,), 2, 4).inputs(), "gamma": torch.ones(2, 4)}, "gamma unknown."),
        ([torch.ones(1)], "must hold a dict of tensors by argument name"),
        ({"x": 3}, "must hold a dict of tensors by argument name"),
        (
            {
                "x": torch.ones(3, 2, 4),
                "h_out": torch.ones(5),
                "h_post": torch.ones(3, 2),
                "h_res": torch.ones(3, 2, 2),
            },
            "mhc_post: h_out must be [3, 4], got [5]",
        ),
    ],
)
def test_own_inputs_that_are_wrong(content, message, tmp_path, capsys):
    file = tmp_path / "inputs.pt"
    torch.save(content, file)
    assert cli.main(["diagnose", "mhc_post", "--device", "cpu", "--inputs", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_own_inputs_that_no_form_takes(tmp_path, capsys):
    """Without a residual map there is no form with a norm."""
    file, tensors = tmp_path / "inputs.pt", cases.Case(cases.MHC_NEXT_NORMED, (12,), 2, 24, torch.float32).inputs()
    torch.save({name: tensor for name, tensor in tensors.items() if name not in ("h_res", "link")}, file)
    assert cli.main(["diagnose", "mhc_next", "--device", "cpu", "--inputs", str(file)]) == 2
    assert "no form of mhc_next takes x, h_out" in capsys.readouterr().err


def test_the_norm_of_own_inputs_is_examined(monkeypatch, tmp_path, capsys):
    """A file with layer_norm_weight is a case of the op with a norm; its shape is the op's to judge."""
    right = reference.layer_norm
    monkeypatch.setattr(reference, "layer_norm", lambda h_in, *more: right(h_in, *more) * (1 + (h_in.dtype != fp64)))
    file, tensors = tmp_path / "inputs.pt", cases.Case(cases.MHC_NEXT_NORMED, (12,), 2, 24, torch.float32).inputs()
    tensors.pop("link")
    torch.save(tensors, file)
    command = ["diagnose", "mhc_next", "--device", "cpu", "--inputs", str(file)]
    assert cli.main(command) == 1
    assert "h_in: everything is counted 2 times" in capsys.readouterr().out
    torch.save({**tensors, "layer_norm_weight": torch.ones(7)}, file)
    assert cli.main(command) == 2
    assert "layer_norm_weight must be [24], got [7]" in capsys.readouterr().err


@pytest.mark.interpreted
@pytest.mark.parametrize("op", ["mhc_post", "mhc_read"])
def test_the_kernels_in_the_interpreter(op, capsys):
    arguments = ["--device", "cpu", "--backend", "triton", "--shape", "5x2x8", "--dtype", "fp32"]
    assert cli.main(["diagnose", op, *arguments]) == 0
    assert f"{op}, triton: nothing found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.ones(3, 2, 4).to_sparse()}, "x not dense."),
        ({"x": torch.ones(3, 2, 4, device="meta")}, "x not dense."),
    ],
)
def test_own_inputs_without_data(changed, message, tmp_path, capsys):
    file = tmp_path / "inputs.pt"
    torch.save({**cases.Case(cases.MHC_POST, (3,), 2, 4, torch.float32).inputs(), **changed}, file)
    assert cli.main(["diagnose", "mhc_post", "--device", "cpu", "--inputs", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_an_initial_state_without_dimensions(tmp_path, capsys):
    file = tmp_path / "inputs.pt"
    torch.save({**ConvCase(2, 13, 20).inputs(), "initial_state": torch.tensor(1.0)}, file)
    assert cli.main(["diagnose", "causal_conv1d", "--device", "cpu", "--inputs", str(file)]) == 2
    assert (
        "causal_conv1d cannot have these shapes: x [2, 13, 20], weight [20, 4], bias [20], initial_state []"
        in capsys.readouterr().err
    )


def test_more_than_memory_holds(monkeypatch, capsys):
    """The message is of torch's allocator on a CPU; nobody should have to try it."""

    def full(*arguments):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: ..."
        )

    monkeypatch.setattr(command, "diagnose", full)
    assert cli.main(["diagnose", "mhc_post", "--device", "cpu"]) == 2
    assert "can't allocate memory" in capsys.readouterr().err


@pytest.mark.parametrize("columns", ["1", "20"])
def test_a_narrow_terminal(columns, only_the_first_stream, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["diagnose", "mhc_post", *SMALL]) == 1
    assert "streams 1 to 3" in " ".join(capsys.readouterr().out.split())
