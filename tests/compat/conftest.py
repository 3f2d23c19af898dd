import functools
import sys

import pytest
from tiny_models import KINDS, Built

import mhc_ops


@pytest.fixture(params=["reference", pytest.param("triton", marks=pytest.mark.interpreted)])
def each_backend(request):
    with mhc_ops.use_backend(request.param):
        yield


@pytest.fixture
def written(tmp_path, monkeypatch):
    """written({path: text}) writes packages that can be imported until the test ends, and returns their folder."""

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    yield write
    packages = {path.name for path in tmp_path.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


@pytest.fixture
def called(monkeypatch):
    """called(module, *names) returns a list to which each call of these functions adds the name."""

    def watch(module, *names):
        made = []

        def call(name, function, *given, **named):
            made.append(name)
            return function(*given, **named)

        for name in names:
            monkeypatch.setattr(module, name, functools.partial(call, name, getattr(module, name)))
        return made

    return watch


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    return functools.cache(lambda kind: Built(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(params=KINDS)
def tiny(request, built):
    return built(request.param)


@pytest.fixture
def mapping():
    """What is registered with transformers, which every test leaves empty."""
    from transformers.monkey_patching import get_patch_mapping

    assert get_patch_mapping() == {}
    yield get_patch_mapping
    assert get_patch_mapping() == {}
