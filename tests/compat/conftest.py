import sys

import pytest

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
