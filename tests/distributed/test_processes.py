import os
import signal

import pytest
import torch
import torch.distributed as dist
from processes import run, run_each


def _sum() -> torch.Tensor:
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    return value


def _fail() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no tokens")
    dist.barrier()


def _die() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_every_rank_answers():
    assert run(3, _sum) == [torch.tensor([6.0])] * 3


@pytest.mark.parametrize(("check", "words"), [(_fail, "rank 1:.*no tokens"), (_die, "rank 0: ended without a result")])
def test_an_error_or_the_end_of_one_rank_is_told(check, words):
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        run_each(2, _sum, check)
