"""Small real tokenizers for tests."""

from __future__ import annotations

import json
import pathlib

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "def add(a, b):\n    return a + b\n",
    "The naïve café serves 日本語 and ďábel, 12 of 345 times. It's the user's own; they've said so.",
    "the cat sat on the mat   with  spaces\n\n\tand tabs; the theory of the thing",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def byte_level(steps: list | None = None, vocab_size: int = 340, **bpe) -> tokenizers.Tokenizer:
    """Byte-level BPE trained on the corpus; `steps` come before merging (default: GPT-2's)."""
    backend = tokenizers.Tokenizer(models.BPE(**bpe))
    steps = steps or [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def adds_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, with a post-processor that puts <s> before every text."""
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return backend


SP_PIECES = (
    *("<unk>", "<s>", "</s>"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *("▁the", "▁cat", "▁c", "▁t", "at", "he", "▁a", "▁th", "ing", "in", "ng", "▁▁", "th"),
    *("▁", "t", "h", "e", "c", "a", "i", "n", "g", "s", "."),
)


def sp_scores() -> list[float]:
    """Later pieces are worse, as in SentencePiece's vocabularies."""
    return [0.0] * 259 + [-float(i) for i in range(len(SP_PIECES) - 259)]


def sentence_piece_json(prefix: bool = True) -> tokenizers.Tokenizer:
    """A tokenizer of Llama 2's kind with the pieces above, put together the way its tokenizer.json is."""
    vocabulary = {piece: i for i, piece in enumerate(SP_PIECES)}
    merges = []
    for piece in sorted(SP_PIECES[259:], key=lambda p: vocabulary[p]):
        merges += [(piece[:i], piece[i:]) for i in range(1, len(piece)) if {piece[:i], piece[i:]} <= set(vocabulary)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SP_PIECES[:3]])
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def write_directory(directory: pathlib.Path, backend: tokenizers.Tokenizer, **config) -> pathlib.Path:
    """tokenizer.json and tokenizer_config.json."""
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}), encoding="utf-8"
    )
    return directory
