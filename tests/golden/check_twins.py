"""Holds every F32 GGUF twin against llama.cpp: its logits must be those of `expected.safetensors`.

Not run by `cargo xtask golden`: it needs llama-cpp-python (0.3.36 was used), which compiles for minutes. Run it after a
change to `gguf_twins.py`, in an environment that has it: `python check_twins.py`.
"""

import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parent / "models"
BOUND = 2e-5
# llama.cpp takes GELU from a table in half precision.
GELU_BOUND = 4e-3


def worst_difference(path):
    expected = load_file(path.parent / "expected.safetensors")
    model = Llama(str(path), n_ctx=128, n_batch=128, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0)
    worst = 0.0
    for sequence in ("short", "long"):
        ids = expected[f"{sequence}.input_ids"].tolist()
        model.reset()
        model.eval(ids)
        worst = max(worst, float(np.abs(np.array(model.scores[: len(ids)]) - expected[f"{sequence}.logits"]).max()))
    return worst


def main():
    failed = False
    for path in sorted(ROOT.glob("*/model.gguf")):
        bound = GELU_BOUND if path.parent.name.startswith("gemma") else BOUND
        worst = worst_difference(path)
        failed |= worst > bound
        print(f"{path.parent.name}: {worst:.1e}{'' if worst <= bound else f', over {bound}'}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
