import os
import signal

import pytest
import torch.distributed as dist
from processes import run_each


def _fail() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no tokens")
    dist.barrier()


def _die() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize(("check", "words"), [(_fail, "rank 1:.*no tokens"), (_die, "rank 0: ended without a result")])
def test_an_error_or_the_end_of_one_rank_is_told(check, words):
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        run_each(2, dist.barrier, check)
