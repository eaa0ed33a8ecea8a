#!/usr/bin/env python3
"""Causal attention in PyTorch, bf16, forward and backward: TFLOP/s of the flash kernel and of cuDNN's.

    python3 torch_attention.py [--json] [--widths 64,128] [--backward-widths 64,128] [--batch 16] [--heads 16] [--positions 4096]

Benchmarks `attention-forward-WIDTH` and `attention-backward-WIDTH`, those whose widths are named; one report for each kernel. Counted are the two products of the half of the scores that a causal mask
leaves: 4 * batch * heads * positions^2 * width / 2; backward, five products: 2.5 times that. Queries, keys and values are larger than any cache. A few seconds.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_measure as measure

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
CALLS = 20


def teraflops(kernel, batch, heads, positions, width, backward):
    """Of each run of `CALLS` calls."""
    shape = (batch, heads, positions, width)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=measure.device()) for _ in range(3))
    work = CALLS * 4 * batch * heads * positions**2 * width / 2

    def forward():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(kernel), torch.set_grad_enabled(backward):
        if backward:
            inputs, work = [x.requires_grad_() for x in (q, k, v)], 2.5 * work
            out, gradient = forward(), torch.randn(shape, dtype=torch.bfloat16, device=measure.device())

        def run():
            for _ in range(CALLS):
                torch.autograd.grad(out, inputs, gradient, retain_graph=True) if backward else forward()

        return [work / time / 1e12 for time in measure.seconds(run)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--widths", help="widths of a head, with commas between; 64,128 where no others are named")
    parser.add_argument("--backward-widths", help="the same for the way back")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--positions", type=int, default=4096)
    arguments = parser.parse_args()

    def widths(named):
        try:
            return [int(width) for width in named.split(",")] if named else []
        except ValueError:
            parser.error(f"widths are numbers such as 64,128, not {named}")

    forward, backward = widths(arguments.widths), widths(arguments.backward_widths)
    if not forward and not backward:
        forward = backward = [64, 128]
    measure.needs_cuda()
    torch.manual_seed(0)
    size = (arguments.batch, arguments.heads, arguments.positions)
    for direction, width in [("forward", width) for width in forward] + [("backward", width) for width in backward]:
        for name, kernel in KERNELS.items():
            bench = f"attention-{direction}-{width}"
            values, _, notes = measure.best_of({name: lambda: teraflops(kernel, *size, width, direction == "backward")})
            if values is not None:
                measure.report(arguments.json, f"PyTorch {name} attention", bench, values, "TFLOP/s", notes)


if __name__ == "__main__":
    main()
