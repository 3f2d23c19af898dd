"""What a launcher takes and fills, as records that it hands to its steps. Names are those of the contracts."""

from typing import NamedTuple

import torch
from torch import Tensor

from .options import PreOptions


class Post(NamedTuple):
    """What post takes and fills."""

    x: Tensor
    h_out: Tensor
    h_post: Tensor
    h_res: Tensor | None
    transposed: bool
    x_next: Tensor


class Pre(NamedTuple):
    """What pre takes and fills.

    A head has neither h_post nor h_res, and maps alone no h_in. read: what h_in is read with, where that is not h_pre
    h_pre: None where the caller does not want it
    """

    x: Tensor
    phi: Tensor
    alpha: Tensor
    bias: Tensor
    gamma: Tensor | None
    options: PreOptions
    inv_rms: Tensor
    h_mix: Tensor
    h_in: Tensor | None
    h_post: Tensor | None = None
    h_res: Tensor | None = None
    h_pre: Tensor | None = None
    layer_norm_weight: Tensor | None = None
    read: Tensor | None = None


class PreBackward(NamedTuple):
    """What the backward of pre takes and fills.

    dx_next reaches dx through h_res, dx_added as it is. dh_pre: given where h_in was read with `read`, or where there
    is no h_in; else it follows from dh_in
    """

    x: Tensor
    phi: Tensor
    alpha: Tensor
    bias: Tensor
    gamma: Tensor | None
    options: PreOptions
    inv_rms: Tensor
    h_mix: Tensor
    dh_in: Tensor | None
    dh_post: Tensor | None
    dh_res: Tensor | None
    dx_next: Tensor | None
    dx: Tensor
    dphi: Tensor
    dalpha: Tensor
    dbias: Tensor
    dgamma: Tensor
    layer_norm_weight: Tensor | None = None
    dlayer_norm_weight: Tensor | None = None
    read: Tensor | None = None
    dread: Tensor | None = None
    dh_pre: Tensor | None = None
    dx_added: Tensor | None = None

    def filled_by_pass_a(self) -> Tensor:
        """<dh_in, x> of each token, [T, n]: dread where h_in was read with `read`, else scratch for dh_pre."""
        if self.read is None:
            shape = self.inv_rms.numel(), self.x.shape[-2]
            return torch.empty(shape, dtype=torch.float32, device=self.x.device)
        assert self.dread is not None
        return self.dread

    def zero_without_tokens(self) -> bool:
        """Whether there are no tokens: then the gradients of parameters are zero, and nothing is launched."""
        if self.inv_rms.numel():
            return False
        for gradient in (self.dphi, self.dalpha, self.dbias, self.dgamma, self.dlayer_norm_weight):
            if gradient is not None:
                gradient.zero_()
        return True


class PassB(NamedTuple):
    """What pass B of the sublayer after a boundary takes and fills: dx_next is dlink_next, dx is dlink."""

    dh_in: Tensor
    dx_next: Tensor
    dh_mix: Tensor
    parts: Tensor
    layer_norm_weight: Tensor | None
    table: Tensor
    dx: Tensor
