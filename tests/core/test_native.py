"""native.c does what the Python code does, fails where it fails, and keeps nothing."""

import contextlib
import gc
import random
import sys
import tracemalloc
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mhc_ops.core import alike, backend, launch, native, private, replay
from mhc_ops.testing.cases import SEED
from mhc_ops.testing.unusual import Subclass

pytest.importorskip("triton")
if native.why_not():
    pytest.skip(f"native.c is not compiled here: {native.why_not()}", allow_module_level=True)

CODE = native.load()
HOOKS = {
    "none": lambda: SimpleNamespace(calls=[]),
    "set": lambda: SimpleNamespace(calls=[print]),
    "a function": lambda: print,
    "broken": type("Hook", (), {"calls": property(lambda self: 1 / 0)}),
}
REPEATS = 20
SINGLE = (True, False, None, *range(10))
KINDS = ("a function", "C function", "C function, arguments one by one")


class Runtime:
    """Its hooks are made anew each time."""

    launch_enter_hook = property(lambda self: HOOKS[self.enter]())
    launch_exit_hook = property(lambda self: HOOKS[self.exit]())

    def __init__(self, enter, exit):
        self.enter, self.exit = enter, exit


class Parts(dict):
    """Those of a descriptor, made anew each time."""

    def __init__(self, note):
        self.note = note

    def __missing__(self, address):
        self.note("parts", address)
        return [address, "part"]


class World:
    """A random plan whose functions note what they are called with; the one numbered `fails` raises."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.notes, self.fails = [], None
        misaligned = torch.ones(9)[draw.randint(0, 4) :]
        kinds = (None, torch.ones(0), torch.ones(3), torch.ones(3)[2:], torch.ones(8), misaligned)
        self.tensors = [torch.ones(4), *draw.choices(kinds[draw.choice((0, 4)) :], k=draw.randint(0, 4))]
        self.current = draw.choice(("1000", "2000", "2000", "no number"))
        self.memory = [torch.zeros(draw.randint(0, 9)) for _ in range(draw.randint(1, 5))]  # the last: the workspace
        layouts = tuple(((i,), (1,), torch.float32) for i in range(len(self.memory) - 1))
        offsets = tuple(512 * i for i in range(draw.choice((0, 0, 3))))
        numbers = tuple(draw.choice((1, draw.random(), None, 2**40)) for _ in range(draw.randint(0, 3)))
        given, values = len(self.tensors), len(self.tensors) + len(layouts) + len(offsets) + len(numbers)
        places = range(-1, given + len(layouts))
        self.plan = replay.Plan(
            given=given,
            device=draw.choice((None, 1000, 2000)),
            empty=self.empty,
            layouts=layouts,
            workspace=((len(layouts),), (1,), torch.uint8),
            offsets=offsets,
            numbers=numbers,
            launches=tuple(self.launch(draw, values) for _ in range(draw.randint(0, 4))),
            results=draw.choice((None, tuple(draw.choices(places, k=draw.randint(0, 3))))),
            current_device=lambda: int(self.current),
            raw_stream=lambda index: self.note("raw_stream", index) or int("4711"),
        )

    def note(self, *what):
        if len(self.notes) == self.fails:
            raise KeyError(what[0])
        self.notes.append(what)

    def empty(self, shape, stride, dtype):
        self.note("empty", shape, stride, dtype)
        return self.memory[shape[0]]

    def launch(self, draw, values):
        places = tuple(draw.choices(range(values), k=draw.randint(0, 6)))
        kind = draw.choice(KINDS)
        if kind == "a function":
            return (lambda *given: self.note(kind, *given)), places
        described = sorted(draw.sample(range(len(places)), k=draw.randint(0, min(2, len(places)))))
        return launch.Quick(
            launch=lambda *given: [self.note(kind, *map(flat, given))],
            grid=(3, 2, 1),
            fixed=(7, None, b"signature"),
            spread=kind == KINDS[2],
            slowly=lambda *given: self.note("slowly", *given),
            runtime=Runtime(draw.choice(list(HOOKS)), draw.choice(("none", "none", "set"))),
            described=tuple((place, Parts(self.note)) for place in described),
        ), places

    @contextlib.contextmanager
    def device(self, index):
        self.note("device", index)
        before, self.current = self.current, str(index)
        try:
            yield
        finally:
            self.current = before

    def ran(self, in_c, plans=None):
        """What happened, and the results or the error. plans: those of an earlier run, as in a later call."""
        self.notes = []
        try:
            results = self.called(in_c, {} if plans is None else plans)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            return self.notes, repr(error)
        return self.notes, [None if result is None else id(result) for result in results]

    def called(self, in_c, plans):
        first_call = partial(self.first_call, in_c, plans)
        if in_c:
            return CODE.replay(plans, print, first_call, self.tensors)
        python = replay.Replay(print)
        python.plans, python.first_call = plans, first_call
        return python(self.tensors)

    def first_call(self, in_c, plans, tensors, addresses, key):
        self.note("first call", tuple(addresses), key)
        plans[key] = self.plan
        return self.called(in_c, plans)


def flat(value):
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("number", range(40))
def test_c_does_what_python_does(number, monkeypatch):
    """With every error at every place where one may come."""
    world = World(SEED + number)
    monkeypatch.setattr(torch.cuda, "device", world.device)
    notes, found = world.ran(in_c=False)
    assert (notes, found) == world.ran(in_c=True)
    for world.fails in range(len(notes)):
        expected = world.ran(in_c=False)
        assert world.ran(in_c=True) == expected
        assert expected[1] == repr(KeyError(notes[world.fails][0]))


def test_nothing_is_kept(monkeypatch):
    """Neither by a call nor by one that fails."""
    for number in range(40):
        world, plans = World(SEED + number), {}
        monkeypatch.setattr(torch.cuda, "device", world.device)
        starts = (start for start, _ in world.plan.launches)
        held = [world.tensors, *world.tensors, *world.memory, world.plan, *world.plan.numbers, *starts]
        steps = range(len(world.ran(True, plans)[0]))
        for world.fails in [*steps, None]:
            assert_nothing_stays(lambda world=world, plans=plans: (world.ran(True, plans), world.ran(True)), held)


def assert_nothing_stays(function, held):
    """No object has more references, and no memory stays allocated. Others too have references to the singletons."""
    held = [each for each in held if id(each) not in map(id, SINGLE)]
    function()
    before, grown = [sys.getrefcount(each) for each in held], []
    tracemalloc.start()
    for _ in range(6):  # another thread may allocate in one of them; the first time something stays for good
        size, singles = tracemalloc.get_traced_memory()[0], [sys.getrefcount(each) for each in SINGLE]
        for _ in range(REPEATS):
            function()
        gc.collect()
        more = [abs(sys.getrefcount(each) - count) for each, count in zip(SINGLE, singles)]
        grown.append(max((tracemalloc.get_traced_memory()[0] - size) / 16, *more))
        if grown[-1] < REPEATS / 2:
            break
    tracemalloc.stop()
    assert min(grown) < REPEATS / 2, "less than one for each call"
    assert [sys.getrefcount(each) for each in held] == before


@pytest.fixture(autouse=True)
def few_objects_to_collect():
    gc.freeze()
    yield
    gc.unfreeze()


class Guards:
    """Take what begins with this tensor; fail for one of no elements."""

    def __init__(self, first):
        self.first = first

    def check(self, *tensors):
        return tensors[0].numel() // tensors[-1].numel() > 0 and tensors[0] is self.first


def drawn_tensor(draw):
    one = draw.choice((torch.ones(4), torch.ones(2, 3).mT, torch.ones(0), torch.ones(3, device="meta")))
    one = draw.choice((one, one, one, torch.nn.Parameter(one)))
    return draw.choice((one,) * 8 + (torch.ones(3).to_sparse(), torch.ones(3).as_subclass(Subclass)))


def same(one, other):
    """Recursively: of the same types, and the same tensors or numbers."""
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor) and one is not other:  # a copy
        return torch.equal(one, other) and one.stride() == other.stride()
    return type(one) is type(other) and (one is other or one == other)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except (AttributeError, IndexError, TypeError, ZeroDivisionError) as error:
        return repr(error)


def assert_alike(function, *given):
    """In C as in Python; what is found."""
    expected, in_c = outcome(getattr(alike, function), *given), getattr(CODE, function)
    assert same(expected, outcome(in_c, *given))
    leaves = [*given, *tree_leaves(given)]
    pairs = [pair for each in leaves if isinstance(each, alike.Alike) for pair in each]
    if not any(isinstance(leaf, Subclass) for leaf in leaves):  # which runs code of torch in Python
        assert_nothing_stays(
            lambda: outcome(in_c, *given), [*leaves, *pairs, *(part for pair in pairs for part in pair)]
        )
    return expected


@pytest.mark.parametrize("number", range(100))
def test_calls_are_found_alike(number):
    draw = random.Random(SEED + number)
    values = [*(drawn_tensor(draw) for _ in range(3)), 1, True, 1.0, "word", None, draw.choice((None, [1]))]
    arguments = dict(zip("abcdef", draw.sample(values, draw.randint(0, 6))))
    are_tensors = tuple(isinstance(value, (torch.Tensor, type(None))) for value in arguments.values())
    of_op = print, tuple(arguments.values()), are_tensors
    for function, rest in ("find_call", (print, "chosen", arguments, alike.KINDS)), ("find_op", of_op):
        if isinstance(found := assert_alike(function, {}, *rest), tuple):
            _, tensors, key = found
            kept = [(Guards(first), str(i)) for i, first in enumerate([None, *tensors, *tensors[:1]])]
            for calls in ({key: kept}, {key: kept[:1]}, {key[:-1]: kept}):
                assert_alike(function, {key: alike.Alike(kept) for key, kept in calls.items()}, *rest)


@pytest.mark.parametrize("find", [alike.find_call, CODE.find_call])
def test_what_cannot_be_hashed_is_refused(find):
    odd = type("Odd", (type,), {"__hash__": None})("odd", (), {})()
    for chosen, arguments in ([], {}), (None, {"x": odd}):
        with pytest.raises(TypeError, match="unhashable"):
            find({}, print, chosen, arguments, alike.KINDS)


@pytest.mark.parametrize("number", range(100))
def test_backwards_are_found_alike(number):
    draw = random.Random(SEED + number)
    odd = draw.choice((3, SimpleNamespace(layout=torch.strided)))
    kept = tuple(draw.choice([drawn_tensor(draw)] * 9 + [odd]) for _ in range(draw.randint(1, 4)))
    cotangent = (None, torch.ones(3, 2).mT, torch.ones(3, 4)) * 3 + (odd,)
    cotangents = tuple(draw.choices(cotangent, k=draw.randint(0, 3)))
    for firsts in ((), (None,), (None, kept[0])):
        of = alike.Alike((Guards(first), str(first is None)) for first in firsts)
        assert_alike("find_like", of, kept, cotangents, torch.strided)


def test_what_is_no_plan_is_refused():
    run, x = CODE.replay, torch.ones(4)
    for plans, *arguments in ({}, print), ([], print, [x]), ({}, print, 3), ({None: 3}, print, [x]):
        with pytest.raises(TypeError):
            run(plans, print, *arguments)
    for plan in World(SEED).plan._replace(given=7), (1,):
        with pytest.raises(TypeError, match="no plan for these tensors"):
            run({None: plan}, print, print, [x])
    with pytest.raises(AttributeError, match="data_ptr"):
        run({}, print, print, [3])
    assert_nothing_stays(lambda: outcome(run, {}, print, print, [x, 3]), [x])
    for address, error in ("no number", TypeError), (-1, OverflowError):
        with pytest.raises(error):
            run({(15,): None}, print, print, [SimpleNamespace(data_ptr=lambda address=address: address)])
    assert run({None: None}, len, print, [x, x]) == 2, "a call that cannot be replayed"


KINDS_OF = {"replay": "d...", "find_call": "d..dt", "find_op": "d.tt", "find_like": "ltt."}


@pytest.mark.parametrize("function, kinds", KINDS_OF.items())
def test_wrong_arguments_are_refused(function, kinds):
    """Too few, too many, and one of another type. d, l and t: a dict, a list, a tuple."""
    right = [{"d": {}, "l": [], "t": (), ".": ()}[kind] for kind in kinds]
    changed = [[*right[:i], 3, *right[i + 1 :]] for i, kind in enumerate(kinds) if kind != "."]
    for wrong in ([], right[:-1], [*right, ()], *changed):
        with pytest.raises(TypeError, match="takes "):
            getattr(CODE, function)(*wrong)
    with pytest.raises(TypeError, match="takes "):
        CODE.find_op({}, print, (1,), ())


def test_fields_are_read_by_their_places():
    assert len(replay.Plan._fields) == CODE.OF_PLAN
    assert len(launch.Quick._fields) == CODE.OF_QUICK


WITHOUT = {
    "a compiler": (lambda patch: patch.setenv("CC", "no-such-compiler"), "no-such-compiler"),
    "the function": (lambda patch: patch.delattr("triton.runtime.build.compile_module_from_src"), "cannot import"),
    "kept calls": (lambda patch: patch.setattr(private, "keeps_calls", False), "no call is replayed"),
    "compiled kernels": (lambda patch: patch.setattr(backend, "_INTERPRETED", True), "no call is replayed"),
}


@pytest.mark.parametrize("missing", WITHOUT)
def test_without_it_python_replays(missing, monkeypatch, tmp_path):
    """What would not be used is not compiled."""
    take, why = WITHOUT[missing]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    native.compiled.cache_clear()
    take(monkeypatch)
    try:
        assert native.load() is None and why in native.why_not()
        assert isinstance(replay.replayed(print), replay.Replay)
        assert not list(tmp_path.rglob("*.so"))
    finally:
        monkeypatch.undo()
        native.compiled.cache_clear()
        native.load()
