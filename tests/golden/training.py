"""What training must reproduce: gradients of operations, runs of tiny models, an adapter. Writes `training/`.

`training_operations.py` has the operations and their cases, `training_runs.py` the runs and the adapter; `README.md` lists
every file. Run `python training.py` for all, or `python training.py operations llama-packed adapter` for some.
"""

import json
import os
import sys
from pathlib import Path

# One thread and plain sums: the same bits whatever machine runs this.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from safetensors.torch import save_file
from transformers.utils.logging import disable_progress_bar

from models import seeded
from training_operations import operation_files
from training_runs import RUNS, make_adapter, make_rotated_adapter, make_run

ROOT = Path(__file__).resolve().parent / "training"


def make_operations():
    folder = ROOT / "operations"
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors, report in operation_files(seeded):
        path = folder / f"{name}.safetensors"
        save_file(dict(sorted(tensors.items())), path, metadata={"cases": json.dumps(report, sort_keys=True)})
        worst = max(max(case["float32_error"].values()) for case in report.values())
        print(f"{name}: {len(report)} cases, {path.stat().st_size} bytes, float32 within {worst:.1e}")


def main():
    wanted = sys.argv[1:] or ["operations", *RUNS, "adapter"]
    disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in wanted:
        if name == "operations":
            make_operations()
        elif name == "adapter":
            make_adapter(ROOT)
            make_rotated_adapter(ROOT)
        else:
            make_run(name, ROOT)


if __name__ == "__main__":
    main()
