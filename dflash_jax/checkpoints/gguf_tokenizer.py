"""Tokenizers rebuilt from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import ConfigError

# tokenizer.ggml.token_type
_CONTROL, _USER_DEFINED = 3, 4

# Words of a text before byte-pair merging: contractions, letters with one leading sign, digits in groups of at
# most `n`, signs with trailing line ends, white space.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _byte_level(use_regex=False)]


# tokenizer.ggml.pre -> (pre-tokenizers, whether text is normalised to NFC, whether whole tokens beat merges)
_BYTE_PAIR_KINDS = {
    "gpt-2": lambda: ([_byte_level(use_regex=True)], False, False),
    "smollm": lambda: ([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)], False, False),
    "qwen2": lambda: (_split(_WORDS.format(digits="")), True, False),
    "deepseek-r1-qwen": lambda: (_split(_WORDS.format(digits="")), True, False),
    "llama-bpe": lambda: (_split(_WORDS.format(digits="{1,3}")), False, True),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer from decoded `tokenizer.*` metadata.

    Byte-level BPE (model gpt2) of the kinds gpt-2, smollm, qwen2, deepseek-r1-qwen and llama-bpe, and
    SentencePiece BPE (model llama).

    Raises:
      ConfigError: the tokenizer is of another kind, or metadata are missing.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if model is None or tokens is None:
        raise ConfigError("the GGUF file has no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens)")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if model == "gpt2":
        backend = _byte_pair(metadata, tokens)
        default_add_bos = metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    elif model == "llama":
        backend = _sentence_piece(metadata, tokens)
        default_add_bos = True
    else:
        raise ConfigError(f"tokenizer.ggml.model is {model!r}; supported are 'gpt2' (BPE) and 'llama' (SentencePiece)")
    backend.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == _CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )

    def special(role: str) -> str | None:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return tokens[token_id] if token_id is not None and token_id < len(tokens) else None

    return Tokenizer(
        backend,
        bos_token=special("bos"),
        eos_token=special("eos"),
        pad_token=special("padding"),
        unk_token=special("unknown"),
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", default_add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    )


def _byte_pair(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    kind = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind not in _BYTE_PAIR_KINDS:
        raise ConfigError(
            f"tokenizer.ggml.pre is {kind!r}, which is not supported; supported are {', '.join(_BYTE_PAIR_KINDS)}. "
            "Load the Hugging Face directory of this model instead"
        )
    steps, nfc, whole_tokens_first = _BYTE_PAIR_KINDS[kind]()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=whole_tokens_first))
    if nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: the pair whose union has the best score is merged first.

    Merges are listed by falling score of what they make, so that rank order is score order.
    """
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ConfigError("the GGUF file has a SentencePiece tokenizer without tokenizer.ggml.scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, i in vocabulary.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(-scores[i], pair) for pair in pairs]
    merges.sort(key=lambda entry: entry[0])  # stable: pairs of one token stay in order
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            [pair for _, pair in merges],
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
