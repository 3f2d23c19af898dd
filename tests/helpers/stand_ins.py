"""Libraries that are not there: peers of mhc_ops/measure that compute what the reference does, or something else."""

import mhc_ops
from mhc_ops.measure import peers
from mhc_ops.testing import cases


class StandIn(peers.Peer):
    def load(self):
        """There is nothing to import."""


def stand_in(name, prepare):
    """prepare(subject, our tensors) returns peers.Prepared, or None."""
    return StandIn(name, name, name, "as the reference", 1e-5, lambda ops, subject, ours: prepare(subject, ours))


def a_peer(name, in_model=lambda h_in: h_in, alone=1.0):
    """Has mhc_layer alone. in_model: what becomes of h_in before a layer reads it; alone: a factor of x_next if a
    layer's output is given in place of the layer."""

    def call(x, h_out, **maps):
        if callable(h_out):
            return (mhc_ops.mhc_layer(x, lambda h_in: h_out(in_model(h_in)), **maps, backend="reference"),)
        x_next, h_in = cases.MHC_LAYER.call(x=x, h_out=h_out, **maps, backend="reference")
        return alone * x_next, h_in

    def prepare(subject, ours):
        return peers.Prepared(ours, call, ("x", "h_out")) if subject == "mhc_layer" else None

    return stand_in(name, prepare)
