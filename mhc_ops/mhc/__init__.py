"""mHC, manifold-constrained hyper-connections: reference.py is the meaning, ops.py the public functions."""
