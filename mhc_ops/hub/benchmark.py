"""`kernels benchmark` runs these: each operator of the loaded kernel, beside its reference in plain PyTorch.

The runner accepts a difference of 1e-2, so the streams are small: one rounding of bf16 below 2 is less than that.
"""

import torch
from kernels.benchmark import Benchmark  # type: ignore[import-untyped]


class HyperConnections(Benchmark):
    seed = 0
    tokens, n, D = 8192, 4, 4096

    def setup(self) -> None:
        T, n, D = self.tokens, self.n, self.D
        M = n * n + 2 * n
        self.x = torch.randn(T, n, D, device=self.device, dtype=torch.bfloat16) / 8
        self.h_out = torch.randn(T, D, device=self.device, dtype=torch.bfloat16) / 8
        self.maps = {
            "phi": torch.randn(M, n * D, device=self.device) / (n * D) ** 0.5,
            "alpha": torch.ones(3, device=self.device),
            "bias": torch.zeros(M, device=self.device),
        }
        _, self.h_post, self.h_res = self.kernel.mhc_pre(self.x, **self.maps)

    def benchmark_pre(self) -> None:
        self.out, *_ = self.kernel.mhc_pre(self.x, **self.maps)

    def verify_pre(self) -> torch.Tensor:
        return self.kernel.mhc_pre(self.x, **self.maps, backend="reference")[0]

    def benchmark_post(self) -> None:
        self.out = self.kernel.mhc_post(self.x, self.h_out, self.h_post, self.h_res)

    def verify_post(self) -> torch.Tensor:
        return self.kernel.mhc_post(self.x, self.h_out, self.h_post, self.h_res, backend="reference")

    def benchmark_post_pre(self) -> None:
        self.out, *_ = self.kernel.mhc_post_pre(self.x, self.h_out, self.h_post, self.h_res, **self.maps)

    def verify_post_pre(self) -> torch.Tensor:
        carry = self.x, self.h_out, self.h_post, self.h_res
        return self.kernel.mhc_post_pre(*carry, **self.maps, backend="reference")[0]


class Convolution(Benchmark):
    seed = 0
    batch, length, D, width = 4, 2048, 4096, 4

    def setup(self) -> None:
        self.x = torch.randn(self.batch, self.length, self.D, device=self.device, dtype=torch.bfloat16) / 8
        self.weight = torch.randn(self.D, self.width, device=self.device, dtype=torch.bfloat16) / 2

    def benchmark_silu(self) -> None:
        self.out = self.kernel.causal_conv1d(self.x, self.weight, activation="silu")

    def verify_silu(self) -> torch.Tensor:
        return self.kernel.causal_conv1d(self.x, self.weight, activation="silu", backend="reference")
