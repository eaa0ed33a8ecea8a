"""Holds a folder that `ironloom train` wrote against transformers: it loads it with no tensor missing, left over or of another shape,
and gives the largest logit to each id that `ironloom run` goes on with.

Not run by `cargo xtask golden`: it needs the program and a model that it trained. Run it after a change to how models are
written: `python check_trained.py target/release/ironloom target/quick-start/model "Training" "The model"`.
"""

import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from models import PLAIN

# How far an id's logit may be below the largest: sums in another order.
BOUND = 1e-3
STEPS = "64"


def worst_difference(program, folder, model, tokenizer, prompt):
    sampling = ["--temperature", "0", "--max-tokens", STEPS, "--ignore-eos"]
    command = [program, "run", folder, prompt, "--raw", "--quiet", "--json", *sampling]
    ids = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["ids"]
    asked = tokenizer(prompt).input_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([asked + ids]), use_cache=False).logits[0, len(asked) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids)[:, None])[:, 0]
    return (logits.max(dim=-1).values - chosen).max().item(), len(set(ids))


def main():
    program, folder, *prompts = sys.argv[1:]
    disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **PLAIN
    )
    failed = any(report.values())
    print(f"{type(model).__name__}: {report}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for prompt in prompts:
        worst, different = worst_difference(program, folder, model.eval(), tokenizer, prompt)
        failed |= worst > BOUND
        print(f"{prompt!r}: {different} different ids, at most {worst:.1e} below the largest logit")
    sys.exit(failed)


if __name__ == "__main__":
    main()
