"""Few tokens in one launch: the bits of many tokens, and the tickets that tell programs which others have arrived."""

import gc
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import cross_compile
from mhc_kernels import bf16, fp16, fp32
from mhc_launches import launch_all
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
# T, n, D, gamma: one group of tokens and several, whole and not; widths that blocks divide and do not
SMALL = [
    *((subject, 37, 4, 257, False) for subject in SUBJECTS),
    *((subject, 1, 4, 96, True) for subject in (BOUNDARY_NORMED, PRE, HEAD)),
    *((subject, 64, 4, 640, True) for subject in (BOUNDARY, PRE_NORMED)),
    *((subject, 5, 3, 160, False) for subject in (BOUNDARY_NORMED, MAPS)),
    *((subject, 7, 1, 48, True) for subject in (BOUNDARY, PRE_NORMED)),
    *((subject, 33, 2, 1000, True) for subject in (BOUNDARY_NORMED, HEAD)),
    *((subject, 2, 4, 1, True) for subject in (BOUNDARY, PRE_NORMED, MAPS)),
]
LARGE = [
    *((BOUNDARY_NORMED, T, 4, 4096) for T in (1, 3, 16, 37, 64)),
    *((BOUNDARY_NORMED, T, 4, 7168) for T in (1, 3, 16, 32)),
    *((BOUNDARY_NORMED, T, 4, 2560) for T in (2, 13)),
    (BOUNDARY_NORMED, 16, 4, 8192),
    (BOUNDARY_NORMED, 16, 3, 4096),
    (BOUNDARY_NORMED, 9, 2, 1280),
    (BOUNDARY_NORMED, 64, 1, 2048),
    *((subject, 16, 4, 5003) for subject in SUBJECTS),
    *((subject, T, 4, 4096) for subject in SUBJECTS if subject is not BOUNDARY_NORMED for T in (1, 16)),
    *((subject, 32, 4, 7168) for subject in SUBJECTS if subject is not BOUNDARY_NORMED),
]


def name_of(value):
    return value.name if isinstance(value, cases.Subject) else None


@pytest.fixture
def several(monkeypatch):
    """Calls a function while few tokens are taken as many are: by several launches."""

    def launched(function, *arguments):
        call.forget()
        with monkeypatch.context() as patch:
            patch.setattr(configs, "few", lambda *_: None)
            result = function(*arguments)
        call.forget()
        return result

    return launched


def outputs(subject, tensors):
    return subject.call(**tensors, backend="triton")


def is_taken(x):
    return few_tokens.chosen(x, x.numel() // x.shape[-1] // x.shape[-2], configs.maps(x.shape[-2])) is not None


def assert_bits_of_several_launches(subject, T, n, D, gamma, device, several):
    tensors = cases.Case(subject, (T,), n, D, bf16, gamma=gamma).inputs(device)
    assert is_taken(tensors["x"])
    expected = several(outputs, subject, tensors)
    for _ in range(3 if device == "cuda" else 2):  # the second call finds tickets set back, and is replayed
        assert_equal(outputs(subject, tensors), expected)


@pytest.mark.parametrize(("subject", "T", "n", "D", "gamma"), SMALL, ids=name_of)
def test_bits_of_several_launches(subject, T, n, D, gamma, kernel_device, several, poisoned):
    assert_bits_of_several_launches(subject, T, n, D, gamma, kernel_device, several)


@pytest.mark.gpu
@pytest.mark.parametrize(("subject", "T", "n", "D"), LARGE, ids=name_of)
def test_bits_on_a_gpu(subject, T, n, D, several, poisoned):
    if not is_taken(torch.empty(T, n, D, dtype=bf16, device="cuda")):
        pytest.skip("this GPU takes several launches")
    assert_bits_of_several_launches(subject, T, n, D, True, "cuda", several)


def test_tickets_are_set_back(kernel_device):
    outputs(BOUNDARY, cases.Case(BOUNDARY, (37,), 4, 257, bf16).inputs(kernel_device))
    if kernel_device == "cuda":
        torch.cuda.synchronize()
    assert tickets._of_streams and not any(counts.any() for counts in tickets._of_streams.values())


@pytest.mark.interpreted
def test_without_tickets_nothing_is_finished(monkeypatch, poisoned):
    """With a count that is not zero no program is last: it is the tickets that tell it."""
    tensors = cases.Case(PRE, (1,), 4, 640, bf16).inputs("cpu")
    monkeypatch.setitem(tickets._of_streams, (-1, None), torch.full((tickets.SET,), 1000, dtype=torch.int32))
    assert outputs(PRE, tensors)[0].isnan().all()


@pytest.mark.parametrize(
    ("T", "n", "D", "dtype"), [(65, 4, 256, bf16), (4, 5, 256, bf16), (4, 4, 256, fp16), (4, 4, 256, fp32)]
)
def test_what_others_take(T, n, D, dtype):
    assert not is_taken(torch.empty(T, n, D, dtype=dtype))


# Without a GPU: tickets and replay


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
    monkeypatch.setattr(tickets, "RESERVED", 8)
    monkeypatch.setattr(tickets.torch, "zeros", found.zeros)
    monkeypatch.setattr(torch.cuda, "synchronize", found.waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: torch.Stream("cpu"))
    for name, empty in {"_of_streams": {}, "_of_graphs": weakref.WeakKeyDictionary(), "_reserves": {}}.items():
        monkeypatch.setattr(tickets, name, empty)
    monkeypatch.setattr(tickets, "_returned", {})
    monkeypatch.setattr(tickets, "_short", set())
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
    monkeypatch.setattr(private, "is_capturing", lambda: False)
    monkeypatch.setattr(tickets, "_reserved", lambda index: threads.append(threading.get_ident()) or [index])
    assert tickets._filled(3) == [3]
    assert threads != [threading.get_ident()]


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
    assert (len(set(first)), len(set(second))) == (2, 1)
    assert len({of_stream, *first, *second}) == 4
    assert gpu.captured(one, streams=(7, 8)) == first, "its launches follow one another"


def test_a_graph_that_is_gone_gives_its_tickets_back(gpu):
    """They are used again when a whole reserve came back, and the GPU has been waited for then."""
    tickets.tickets(0, 7)
    for _ in range(80):
        tickets.tickets(0, 7)  # a run before each capture
        graph = Graph()
        assert len(set(gpu.captured(graph))) == 1 or gpu.made[-1][1]
        del graph
        gc.collect()
    kept = [shape for shape, capturing in gpu.made if not capturing]
    assert kept == [(8, tickets.SET)] * 2, "two reserves for any number of captures"
    assert gpu.waited and len(gpu.waited) < 10


def test_tickets_that_are_given_back_are_zero(gpu, monkeypatch):
    monkeypatch.setattr(tickets, "RESERVED", 1)
    graph, counts = Graph(), torch.full((tickets.SET,), 3)  # of a replay that was interrupted
    tickets._of_graphs[graph] = {(0, 7): counts}
    weakref.finalize(graph, tickets._give_back, tickets._of_graphs[graph])
    del graph
    gc.collect()
    assert tickets._filled(0) == [counts] and not counts.any() and gpu.waited == [0]


class Pretended:
    """In place of a Triton kernel and of what is compiled of it: sees what it is started with."""

    __name__, arg_names = "pretended", ["tickets_ptr", "x_ptr", "scale"]

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        def start(counts, x, scale, stream=None):
            self.seen.append([v.data_ptr() if isinstance(v, torch.Tensor) else v for v in (counts, x)])
            return self

        return start


def test_a_replayed_call_finds_its_tickets():
    kernel = Pretended()
    wrapped = tickets.Ticketed(kernel)

    def pretend(tensors):
        launch(wrapped, (1,), x_ptr=tensors[0], scale=2)
        return [torch.empty(1)]

    replayed = Replay(pretend)
    given = [torch.zeros(64) for _ in range(3)]
    for x in given:
        replayed([x])
    assert all(plan is not None for plan in replayed.plans.values())
    assert kernel.seen == [[tickets.tickets(-1, None).data_ptr(), x.data_ptr()] for x in given]


# Without a GPU: what is compiled

COMPILED = {
    "sm_90": [
        *((T, 4, 4096, True) for T in (1, 16, 64)),
        *((T, 4, 7168, True) for T in (1, 16, 32)),
        (32, 4, 7168, False),
        (16, 4, 257, True),
        (1, 1, 4096, True),
        (16, 2, 1280, True),
        (16, 3, 4096, True),
    ],
    "sm_80": [(16, 4, 4096, True), (32, 4, 7168, True), (16, 4, 257, True)],
    "sm_100": [(16, 4, 4096, True)],
    "sm_120": [(1, 4, 4096, True), (16, 4, 7168, True), (64, 4, 4096, False)],
}
compiled_only = pytest.mark.skipif(_INTERPRETED, reason="the interpreter compiles nothing")


def compiled_for(target, monkeypatch, T, n, D, normed):
    """What a boundary launches."""
    with cross_compile.compiling_for(target, monkeypatch) as kernels:
        launch_all(T, n, D, bf16, normed=normed, ops={"mhc_post_pre_fwd"})
    return kernels


@compiled_only
@pytest.mark.parametrize(
    ("target", "case"),
    [
        pytest.param(name, case, id="-".join(map(str, (name, *case))))
        for name, found in COMPILED.items()
        for case in found
    ],
)
def test_no_spills(target, case, monkeypatch):
    kernels = compiled_for(target, monkeypatch, *case)
    assert [kernel.name for kernel in kernels] == ["mhc_few_fwd_kernel"], "one launch"
    cross_compile.check(target, kernels)


@compiled_only
def test_those_who_wait_for_one_another_run_at_once(monkeypatch):
    """A launch that is not cooperative would hang where other kernels hold a part of the GPU."""
    for target, T, D, waits in (("sm_90", 16, 4096, True), ("sm_80", 32, 7168, False)):
        (kernel,) = compiled_for(target, monkeypatch, T, 4, D, True)
        assert kernel.cooperative == waits == ("ld.global.gpu.acquire" in kernel.assembly)


@compiled_only
def test_machine_code(monkeypatch):
    """phi is on its way before anything waits; the product is one of the projection's; stores come before the ticket,
    with a barrier for all threads between them; no floats are added in memory."""
    (kernel,) = compiled_for("sm_90", monkeypatch, 16, 4, 4096, True)
    ptx = kernel.assembly
    first_wait = ptx.index("cp.async.wait_group")
    assert ptx[:first_wait].count("cp.async.cg.shared.global [") >= 4 * 3, "four streams of 24 maps, 8 rows at a time"
    assert "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16" in ptx
    atomics = re.findall(r"\b(?:atom|red|ld\.global\.gpu)\.\S+", ptx)
    ticket, waiting, second = (
        "atom.global.gpu.acq_rel.add.u32",
        "ld.global.gpu.acquire.b32",
        "atom.global.gpu.relaxed.add.u32",
    )
    assert atomics == [ticket, waiting, second], "drawn after the stores, looked at, drawn after the wait"
    before, after = ptx.split(ticket)
    assert "st.global" not in before[before.rindex("bar.sync") :]
    _, after = after.split(waiting)
    assert "bar.sync" in after[: after.index("ld.global")]


# On a GPU


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
