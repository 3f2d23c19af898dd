import os
import signal

import pytest
import torch
import torch.distributed as dist
from processes import run


def _sum() -> torch.Tensor:
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    return value


def _fail(rank: int, killed: bool) -> None:
    if dist.get_rank() == rank:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("no tokens")
    dist.barrier()


def test_every_rank_answers():
    assert run(3, _sum) == [torch.tensor([6.0])] * 3


def test_an_error_of_one_rank_is_told():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1:.*no tokens"):
        run(2, _fail, 1, False)


def test_a_rank_that_is_killed_is_told():
    with pytest.raises(RuntimeError, match="rank 0: ended without a result"):
        run(2, _fail, 0, True)
