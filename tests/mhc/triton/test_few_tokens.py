"""Few tokens in one launch: the bits of many tokens, and the tickets that tell programs which others have arrived."""

import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from config_domain import GPUS
from mhc_kernels import bf16, fp16, fp32
from mhc_launches import compiled
from stack_results import assert_equal

import mhc_ops
from mhc_ops.core import call, private
from mhc_ops.core.backend import _INTERPRETED
from mhc_ops.core.launch import launch
from mhc_ops.core.replay import Replay
from mhc_ops.mhc.triton import configs, few_tokens, tickets
from mhc_ops.testing import cases

BOUNDARY, BOUNDARY_NORMED = cases.MHC_POST_PRE, cases.MHC_POST_PRE_NORMED
PRE, PRE_NORMED, MAPS, HEAD = cases.MHC_PRE, cases.MHC_PRE_NORMED, cases.MHC_MAPS, cases.MHC_HEAD
SUBJECTS = (BOUNDARY, BOUNDARY_NORMED, PRE, PRE_NORMED, MAPS, HEAD)


def drawn(subjects_of, **options):
    """A case for each subject at each size: T, n, D."""
    listed = [(subject, size) for size, subjects in subjects_of.items() for subject in subjects]
    return [cases.Case(subject, (T,), n, D, bf16, **options) for subject, (T, n, D) in listed]


# One group of tokens and several, whole and not; widths that blocks divide and do not.
SMALL = [
    *drawn({(37, 4, 257): SUBJECTS, (5, 3, 160): (BOUNDARY_NORMED, MAPS)}, gamma=False),
    *drawn({(1, 4, 96): (BOUNDARY_NORMED, PRE, HEAD), (64, 4, 640): (BOUNDARY, PRE_NORMED)}),
    *drawn({(7, 1, 48): (BOUNDARY, PRE_NORMED), (33, 2, 1000): (BOUNDARY_NORMED, HEAD)}),
    *drawn({(2, 4, 1): (BOUNDARY, PRE_NORMED, MAPS)}),
]
OF_ONE = [(3, 4, 4096), (37, 4, 4096), (64, 4, 4096), (64, 1, 2048), (9, 2, 1280), (1, 4, 7168), (3, 4, 7168)]
OF_ONE += [(16, 4, 7168), (16, 4, 8192), (16, 3, 4096), (2, 4, 2560), (13, 4, 2560)]
LARGE = drawn(dict.fromkeys(OF_ONE, (BOUNDARY_NORMED,)))
LARGE += drawn(dict.fromkeys([(1, 4, 4096), (16, 4, 4096), (32, 4, 7168), (16, 4, 5003)], SUBJECTS))


def outputs(subject, tensors):
    return subject.call(**tensors, backend="triton")


def is_taken(x):
    return few_tokens.chosen(x, x.numel() // x.shape[-1] // x.shape[-2], configs.maps(x.shape[-2])) is not None


def assert_bits_of_several_launches(case, tensors, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(configs, "few", lambda *_: None)
        expected = outputs(case.subject, tensors)
    call.forget()
    for _ in range(3 if tensors["x"].is_cuda else 2):  # the second call finds tickets set back, and is replayed
        assert_equal(outputs(case.subject, tensors), expected)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_bits_of_several_launches(case, kernel_device, monkeypatch, poisoned):
    tensors = case.inputs(kernel_device)
    assert is_taken(tensors["x"])
    assert_bits_of_several_launches(case, tensors, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_bits_on_a_gpu(case, monkeypatch, poisoned):
    tensors = case.inputs("cuda")
    if not is_taken(tensors["x"]):
        pytest.skip("this GPU takes several launches")
    assert_bits_of_several_launches(case, tensors, monkeypatch)


def test_what_others_take():
    for T, n, dtype in ((65, 4, bf16), (4, 5, bf16), (4, 4, fp16), (4, 4, fp32)):
        assert not is_taken(torch.empty(T, n, 256, dtype=dtype)), (T, n, dtype)


class Graph:
    """In place of a torch.cuda.CUDAGraph."""


class Gpu:
    """A GPU's tickets, on the CPU. capturing: whether a graph is captured, and which where torch can tell"""

    def __init__(self):
        self.capturing, self.graph, self.made, self.waited = False, None, [], []

    def zeros(self, *shape, dtype, device):
        self.made.append((shape, self.capturing))
        return torch.ones(shape, dtype=dtype).zero_()

    def captured(self, graph=None, streams=(7,), launches=3):
        """The addresses of the counts of these launches."""
        self.capturing, self.graph = True, graph
        found = [tickets.tickets(0, stream).data_ptr() for _ in range(launches) for stream in streams]
        self.capturing, self.graph = False, None
        return found


@pytest.fixture
def gpu(monkeypatch):
    found = Gpu()
    monkeypatch.setattr(private, "is_capturing", lambda: found.capturing)
    monkeypatch.setattr(private, "capturing_graph", lambda: found.graph)
    monkeypatch.setattr(tickets.torch, "zeros", found.zeros)
    monkeypatch.setattr(torch.cuda, "synchronize", found.waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: torch.Stream("cpu"))
    empty = {"_of_streams": {}, "_of_graphs": weakref.WeakKeyDictionary(), "_reserves": {}, "_returned": {}}
    for name, value in {**empty, "_short": set(), "RESERVED": 8}.items():
        monkeypatch.setattr(tickets, name, value)
    return found


def test_every_stream_has_its_tickets(gpu):
    places = [(index, stream) for index in (0, 1) for stream in (0, 7)]
    found = {place: tickets.tickets(*place).data_ptr() for place in places}
    assert len(set(found.values())) == len(places)
    assert found == {place: tickets.tickets(*place).data_ptr() for place in places}
    assert gpu.made == [((8, tickets.SET), False)] * 2, "one reserve for each GPU"


def test_what_stays_is_allocated_by_a_thread_of_its_own(monkeypatch):
    """Whose allocations belong to no pool, as those of this thread may while CUDA graphs are made."""
    threads = []
    monkeypatch.setattr(tickets, "_reserved", lambda index: threads.append(threading.get_ident()) or [index])
    assert tickets._filled(3) == [3] and threads != [threading.get_ident()]


def test_every_captured_launch_has_its_tickets_where_torch_cannot_name_the_graph(gpu):
    """Two graphs captured on one stream may run at once, and while a stream goes on."""
    of_stream = tickets.tickets(0, 7).data_ptr()
    captured = gpu.captured(launches=7)
    assert len({of_stream, *captured}) == 8
    assert len(gpu.made) == 1, "nothing is allocated in a capture"
    gpu.captured()
    assert gpu.made[1:] == [((tickets.SET,), True)] * 3, "no more are taken for good: the graph has its own"
    assert tickets.tickets(0, 7).data_ptr() == of_stream and len(gpu.made) == 4


def test_a_graph_has_tickets_for_each_of_its_streams(gpu):
    of_stream, one, other = tickets.tickets(0, 7).data_ptr(), Graph(), Graph()
    first, second = gpu.captured(one, streams=(7, 8)), gpu.captured(other)
    assert (len(set(first)), len(set(second))) == (2, 1) and len({of_stream, *first, *second}) == 4
    assert gpu.captured(one, streams=(7, 8)) == first, "its launches follow one another"


def test_a_graph_that_is_gone_gives_its_tickets_back(gpu):
    """They are used again when a whole reserve came back, and the GPU has been waited for then."""
    tickets.tickets(0, 7)
    for _ in range(80):
        tickets.tickets(0, 7)  # a run before each capture
        graph = Graph()
        assert len(set(gpu.captured(graph))) == 1 or gpu.made[-1][1]
        for counts in tickets._of_graphs.get(graph, {}).values():
            assert not counts.any()
            counts.fill_(3)  # as a replay that is interrupted leaves them
        del graph
    kept = [shape for shape, capturing in gpu.made if not capturing]
    assert kept == [(8, tickets.SET)] * 2, "two reserves for any number of captures"
    assert set(gpu.waited) == {0} and len(gpu.waited) < 10


class Pretended:
    """In place of a Triton kernel and of what is compiled of it: sees what it is started with."""

    __name__, arg_names = "pretended", ["tickets_ptr", "x_ptr"]

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        return self.start

    def start(self, *given, stream=None):
        self.seen.append([value.data_ptr() if isinstance(value, torch.Tensor) else value for value in given])
        return self


def test_a_replayed_call_finds_its_tickets():
    kernel = Pretended()
    wrapped = tickets.Ticketed(kernel)

    def pretend(tensors):
        launch(wrapped, (1,), x_ptr=tensors[0])
        return [torch.empty(1)]

    replayed = Replay(pretend)
    given = [torch.zeros(64) for _ in range(3)]
    for x in given:
        replayed([x])
    assert all(plan is not None for plan in replayed.plans.values())
    assert kernel.seen == [[tickets.tickets(-1, None).data_ptr(), x.data_ptr()] for x in given]


COMPILED = {  # T, n, D, with the norm
    "sm_90": [
        *((T, 4, 4096, True) for T in (1, 16, 64)), *((T, 4, 7168, True) for T in (1, 16, 32)), (32, 4, 7168, False),
        (16, 4, 257, True), (1, 1, 4096, True), (16, 2, 1280, True), (16, 3, 4096, True),
    ],
    "sm_80": [(16, 4, 4096, True), (32, 4, 7168, True), (16, 4, 257, True)],
    "sm_100": [(16, 4, 4096, True)],
    "sm_120": [(1, 4, 4096, True), (16, 4, 7168, True), (64, 4, 4096, False)],
}  # fmt: skip
EVERY = [(target, *sizes) for target, there in COMPILED.items() for sizes in there]


@pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(("target", "T", "n", "D", "normed"), EVERY)
def test_no_spills(target, T, n, D, normed, monkeypatch):
    """A boundary is one launch. phi is on its way before anything waits; the product is one of the projection's."""
    launched = {"T": T, "n": n, "D": D, "dtype": bf16, "normed": normed, "ops": {"mhc_post_pre_fwd"}}
    (kernel,) = compiled(target, monkeypatch, launched)
    assert kernel.name == "mhc_few_fwd_kernel"
    assert kernel.cooperative == configs.few(n, D, T, GPUS[target]).together
    if (target, T, n, D) == ("sm_90", 16, 4, 4096):
        before = kernel.assembly[: kernel.assembly.index("cp.async.wait_group")]
        assert before.count("cp.async.cg.shared.global [") >= 4 * 3, "four streams of 24 maps, 8 rows at a time"
        assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in kernel.assembly and kernel.cooperative


def captured(tensors, launches):
    """A graph of these launches, and the outputs of the last."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            results = outputs(BOUNDARY_NORMED, tensors)
    return graph, results


@pytest.mark.gpu
def test_graphs_and_streams_at_once():
    """Two graphs, captured on the same stream, are replayed on two others while two further ones launch the same."""
    drawn = [cases.Case(BOUNDARY_NORMED, (16,), 4, 4096, bf16, seed=seed).inputs("cuda") for seed in (1, 2)]
    expected = [outputs(BOUNDARY_NORMED, tensors) for tensors in drawn]
    reserve = tickets._reserves[torch.cuda.current_device()]
    left = len(reserve)
    graphs = [captured(tensors, 5) for tensors in drawn]
    sets = 2 * 5 if private._capturing_graph is None else 2
    assert len(reserve) == left - sets, "each graph has its own tickets, of those that were there"
    streams = [(torch.cuda.Stream(), torch.cuda.Stream()) for _ in drawn]
    for _ in range(50):
        for _, results in graphs:
            for result in results:
                result.fill_(torch.nan)
        torch.cuda.synchronize()
        launched = ([], [])
        for (of_graph, _), (graph, _) in zip(streams, graphs):
            with torch.cuda.stream(of_graph):
                graph.replay()
        for _ in range(5):
            for (_, own), tensors, found in zip(streams, drawn, launched):
                with torch.cuda.stream(own):
                    found.append(outputs(BOUNDARY_NORMED, tensors))
        torch.cuda.synchronize()
        for (_, results), found, outputs_there in zip(graphs, launched, expected):
            for some in (results, *found):
                assert_equal(some, outputs_there)


FIRST_IN_A_GRAPH = """
import torch
from torch import nn
from mhc_ops import HyperConnection, HyperStack
stack = HyperStack(*(HyperConnection(nn.Identity(), 4, 256, device="cuda") for _ in range(3)))
x = torch.randn(16, 4, 256, dtype=torch.bfloat16, device="cuda")
with torch.no_grad():
    compiled = torch.compile(stack, mode="reduce-overhead")
    found = [compiled(x).clone() for _ in range(4)]
    assert all(torch.equal(y, stack(x)) for y in found)
"""


@pytest.mark.gpu
def test_the_first_tickets_in_graphs_of_torch_compile():
    """In a process that has none yet."""
    subprocess.run([sys.executable, "-c", FIRST_IN_A_GRAPH], check=True, cwd=Path(mhc_ops.__file__).parents[1])
