#!/usr/bin/env python3
"""Causal attention in PyTorch, forward, bf16: TFLOP/s of the flash kernel and of cuDNN's.

    python3 torch_attention.py [--json] [--widths 64,128] [--batch 16] [--heads 16] [--positions 4096]

Benchmarks `attention-forward-WIDTH`; one report for each kernel. Counted are the two products of the half of the scores that a causal mask
leaves: 4 * batch * heads * positions^2 * width / 2. Queries, keys and values are larger than any cache. A few seconds.
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


def teraflops(kernel, batch, heads, positions, width):
    """Of each run of `CALLS` calls."""
    shape = (batch, heads, positions, width)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=measure.device()) for _ in range(3))
    work = CALLS * 4 * batch * heads * positions**2 * width / 2

    def run():
        for _ in range(CALLS):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(kernel):
        return [work / time / 1e12 for time in measure.seconds(run)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--widths", default="64,128", help="widths of a head, with commas between")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--positions", type=int, default=4096)
    arguments = parser.parse_args()
    try:
        widths = [int(width) for width in arguments.widths.split(",")]
    except ValueError:
        parser.error(f"--widths is a list of numbers such as 64,128, not {arguments.widths}")
    measure.needs_cuda()
    torch.manual_seed(0)
    size = (arguments.batch, arguments.heads, arguments.positions)
    for width in widths:
        for name, kernel in KERNELS.items():
            bench = f"attention-forward-{width}"
            values, _, notes = measure.best_of({name: lambda: teraflops(kernel, *size, width)})
            if values is not None:
                measure.report(arguments.json, f"PyTorch {name} attention", bench, values, "TFLOP/s", notes)


if __name__ == "__main__":
    main()
