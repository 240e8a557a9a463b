"""GGUF files: weights of every type, row order, configuration and tokenizer from metadata."""

from __future__ import annotations

import dataclasses
import itertools
import json

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import (
    GGUF_NAME,
    architecture_fields,
    byte_level_fields,
    halves_to_pairs,
    pack_q4_k,
    pack_q5_k,
    pack_q6_k,
    write_gguf,
)
from golden_cases import GOLDEN
from tiny_tokenizers import CHATML, CORPUS, SP_PIECES, byte_level, sentence_piece_json, sp_scores
from tokenizers import Regex, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_PATTERN

from dflash_jax.checkpoints.gguf_reader import GGUFFile, pairs_to_halves, target_config_from_gguf
from dflash_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from dflash_jax.checkpoints.hf_config import target_config_from_hf
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.placement import CheckpointError, export_tensors
from dflash_jax.checkpoints.target_names import target_placements
from dflash_jax.config import FULL, ConfigError, RopeConfig, TargetConfig
from dflash_jax.models.layers import rope_frequencies

# One layer whose rows are a whole number of 256-blocks; the table has more rows than the tokenizer has tokens.
WIDE = TargetConfig(
    family="llama", vocab_size=352, hidden_size=256, intermediate_size=256, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=64, rms_norm_eps=1e-5, rope=RopeConfig(), max_positions=64, layer_types=(FULL,), tie_embeddings=True,
)  # fmt: skip
MATRIX_SHAPES = {
    "model.embed_tokens.weight": (352, 256),
    "model.layers.0.self_attn.q_proj.weight": (256, 256),
    "model.layers.0.self_attn.k_proj.weight": (128, 256),
    "model.layers.0.self_attn.v_proj.weight": (128, 256),
    "model.layers.0.self_attn.o_proj.weight": (256, 256),
    "model.layers.0.mlp.gate_proj.weight": (256, 256),
    "model.layers.0.mlp.up_proj.weight": (256, 256),
    "model.layers.0.mlp.down_proj.weight": (256, 256),
}
NORM_SHAPES = {
    "model.norm.weight": (256,),
    "model.layers.0.input_layernorm.weight": (256,),
    "model.layers.0.post_attention_layernorm.weight": (256,),
}


def wide_weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(s).astype(np.float32) for key, s in (MATRIX_SHAPES | NORM_SHAPES).items()}


def trained_byte_level(steps=None):
    """(tokenizer, its merges)."""
    backend = byte_level(steps)
    return backend, json.loads(backend.to_str())["model"]["merges"]


@pytest.fixture(scope="module")
def metadata() -> dict:
    return {**architecture_fields("llama", WIDE), **byte_level_fields(*trained_by("gpt-2"))}


def trained_by(pre: str):
    backend, merges = trained_byte_level(PRE_TOKENIZERS[pre]())
    return backend, pre, merges


def exported(target) -> dict[str, np.ndarray]:
    own_head = "head_DxV" in target.params
    return dict(export_tensors(target.params, target_placements(target.config, own_head)))


# Weights.


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda k: k.name)
def test_types_that_the_package_writes(kind, metadata, tmp_path):
    weights = wide_weights()
    target = load_target(write_gguf(tmp_path / "m.gguf", "llama", metadata, weights, kind))
    found = exported(target)
    assert set(found) == set(weights)
    steps = {Kind.F32: 0, Kind.F16: 2**-10, Kind.BF16: 2**-7, Kind.Q8_0: 1 / 127, Kind.Q4_0: 1 / 8, Kind.Q4_1: 2 / 15}
    for name, value in weights.items():
        if value.ndim == 1:
            np.testing.assert_array_equal(found[name], value)
            continue
        rounded = gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind).reshape(value.shape)
        np.testing.assert_array_equal(found[name], rounded, err_msg=name)
        # At most one step of the type away from what was written, per block of 32.
        bound = steps[kind] * np.abs(value.reshape(-1, 32)).max(-1, keepdims=True) * 1.01
        assert (np.abs(found[name] - value).reshape(-1, 32) <= bound).all(), name


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_types(kind, metadata, tmp_path):
    """Every matrix from integer codes, so that the values are known exactly."""
    rng = np.random.default_rng(1)
    levels, offset, pack = {
        "Q4_K": (16, 8, lambda c: pack_q4_k(c, 1 / 64, 8 / 64)),
        "Q5_K": (32, 16, lambda c: pack_q5_k(c, 1 / 64, 16 / 64)),
        "Q6_K": (64, 32, lambda c: pack_q6_k(c, 1 / 64)),
    }[kind]
    heads = {"q_proj": WIDE.num_heads, "k_proj": WIDE.num_kv_heads}
    raw, wanted = {}, {}
    for name, shape in MATRIX_SHAPES.items():
        codes = rng.integers(0, levels, shape)
        wanted[name] = ((codes - offset) / 64).astype(np.float32)
        count = next((n for projection, n in heads.items() if projection in name), None)
        stored = codes if count is None else halves_to_pairs(codes, count)
        raw[GGUF_NAME[name]] = Kind[kind], pack(stored)
    norms = {name: np.ones(shape, np.float32) for name, shape in NORM_SHAPES.items()}
    target = load_target(write_gguf(tmp_path / "m.gguf", "llama", metadata, norms, raw=raw))
    found = exported(target)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_row_order_of_rotary_pairs():
    rows = np.arange(2 * 6)
    assert halves_to_pairs(rows, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    np.testing.assert_array_equal(pairs_to_halves(halves_to_pairs(rows, 2), 2), rows)
    matrix = np.random.default_rng(0).standard_normal((12, 5))
    np.testing.assert_array_equal(pairs_to_halves(halves_to_pairs(matrix, 3), 3), matrix)


@pytest.mark.parametrize(("architecture", "case"), [("llama", "llama3_rope"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_families_from_gguf_have_the_weights_of_hugging_face(architecture, case, tmp_path):
    """Only llama files are permuted; biases, q/k norms and the tie are seen from the tensors."""
    with np.load(GOLDEN / f"family_{case}.npz") as file:
        weights = {key[2:]: file[key].astype(np.float32) for key in file.files if key.startswith("w.")}
        config = target_config_from_hf(json.loads(str(file["config"])))
    plain = dataclasses.replace(
        config, rope=RopeConfig(config.rope.theta), layer_types=(FULL,) * 3, sliding_window=None
    )
    fields = architecture_fields(architecture, plain)
    if architecture == "llama":
        weights = {key: value for key, value in weights.items() if "mlp" not in key or key.endswith("weight")}
        plain = dataclasses.replace(plain, mlp_bias=False)
    path = write_gguf(tmp_path / "m.gguf", architecture, fields, weights)
    file = GGUFFile(path)
    read = target_config_from_gguf(file)
    assert read.rms_norm_eps == pytest.approx(plain.rms_norm_eps)
    assert dataclasses.replace(read, rms_norm_eps=plain.rms_norm_eps) == plain
    assert set(file.names()) == set(weights)
    for name, value in weights.items():
        np.testing.assert_array_equal(file.read(name), value, err_msg=name)


def test_dtype_and_ends_of_text(metadata, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, wide_weights())
    target = load_target(path, dtype="bfloat16")
    assert target.dtype == jnp.bfloat16
    assert target.params["embedding_VxD"].get_value().dtype == jnp.bfloat16
    assert target.eos_token_ids == (4, 2)  # eos <|im_end|>, eot </s>
    assert target.tokenizer.encode("the cat") == byte_level().encode("the cat").ids


# Refusals.


def test_other_quantisation_is_refused_by_name(metadata, tmp_path):
    weights = wide_weights()
    down = "model.layers.0.mlp.down_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, weights, {down: Kind.Q5_0})
    with pytest.raises(CheckpointError, match=rf"{down} has type Q5_0"):
        load_target(path)


def test_missing_and_unknown_tensors_are_named(metadata, tmp_path):
    weights = wide_weights()
    down = "model.layers.0.mlp.down_proj.weight"
    raw = {"blk.0.attn_sinks.weight": (Kind.F32, np.zeros(4, np.float32))}
    kept = {key: value for key, value in weights.items() if key != down}
    with pytest.raises(CheckpointError) as error:
        load_target(write_gguf(tmp_path / "m.gguf", "llama", metadata, kept, raw=raw))
    assert f"{down} is missing" in str(error.value)
    assert "blk.0.attn_sinks.weight with shape (4,) is unknown" in str(error.value)


def test_broken_files_are_named(metadata, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, wide_weights())
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:3000], b"not a GGUF file at all, but long enough to look at"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"m\.gguf is no complete GGUF file"):
            load_target(path)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_count is 8"),
        ({"llama.attention.sliding_window": 4096}, r"llama\.attention\.sliding_window is 4096"),
        ({"llama.rope.dimension_count": 32}, r"rope\.dimension_count is 32, only the head dim 64"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope'"),
        ({"llama.rope.scaling.type": "linear"}, r"no llama\.rope\.scaling\.factor"),
        ({"llama.attention.head_count": [4, 4]}, "differs from layer to layer"),
        ({"llama.feed_forward_length": None}, r"no llama\.feed_forward_length"),
    ],
)
def test_metadata_that_is_not_supported_is_named(metadata, tmp_path, fields, match):
    changed = {key: value for key, value in {**metadata, **fields}.items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", "llama", changed, {"model.embed_tokens.weight": np.zeros((352, 256), "f")})
    with pytest.raises(ConfigError, match=match):
        load_target(path)


def test_other_architectures_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "gemma2", {}, {"model.embed_tokens.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(ConfigError, match="'gemma2'; supported are llama, qwen2, qwen3"):
        load_target(path)


# Rotary scaling.


def rope_of(tmp_path, metadata, fields, raw=None):
    embedding = {"model.embed_tokens.weight": np.zeros((352, 256), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", {**metadata, **fields}, embedding, raw=raw)
    return target_config_from_gguf(GGUFFile(path)).rope


def test_scaling_from_metadata(metadata, tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert rope_of(tmp_path, metadata, linear) == RopeConfig(10_000.0, "linear", 4.0)
    assert rope_of(tmp_path, metadata, {"llama.rope.scale_linear": 2.0}) == RopeConfig(10_000.0, "linear", 2.0)
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }
    assert rope_of(tmp_path, metadata, yarn) == RopeConfig(10_000.0, "yarn", 4.0, original_max_positions=32)


def test_llama3_scaling_from_divisors(metadata, tmp_path):
    """Llama 3.1 and 3.2 in GGUF have a tensor of divisors instead of the four numbers."""
    for factor in (8.0, 32.0):
        rope = RopeConfig(500_000.0, "llama3", factor, 8192, 1.0, 4.0)
        divisors = rope_frequencies(RopeConfig(500_000.0), 64)[0] / rope_frequencies(rope, 64)[0]
        raw = {"rope_freqs.weight": (Kind.F32, divisors.astype(np.float32))}
        found = rope_of(tmp_path, metadata, {"llama.rope.freq_base": 500_000.0}, raw)
        assert found.kind == "llama3"
        np.testing.assert_allclose(rope_frequencies(found, 64)[0], rope_frequencies(rope, 64)[0], rtol=1e-6)
    ones = {"rope_freqs.weight": (Kind.F32, np.ones(32, np.float32))}
    assert rope_of(tmp_path, metadata, {}, ones) == RopeConfig(10_000.0)
    other = {"rope_freqs.weight": (Kind.F32, np.linspace(1, 8, 32, dtype=np.float32))}
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight does not follow"):
        rope_of(tmp_path, metadata, {}, other)


# Tokenizers.

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def _by_pattern(pattern: str) -> list:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


PRE_TOKENIZERS = {
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": lambda: [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": lambda: _by_pattern(QWEN2_PATTERN),
    "llama-bpe": lambda: _by_pattern(LLAMA3_PATTERN),
}
TEXTS = [
    *CORPUS[:3],
    "x = 12345 + 6.78e9;\r\n\r\n\tif (a&&b) {\n    return 'it''s'; }   ",
    "I'LL we've  DON'T\n\n\n日本語 👩‍👩‍👧 ½ ǆ İ",
    "<|im_start|>user\nHi 42<|im_end|>\n",
    "",
]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_tokenizers(pre, metadata):
    backend, pre, merges = trained_by(pre)
    tokenizer = tokenizer_from_gguf(byte_level_fields(backend, pre, merges))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}


def test_whole_words_beat_merges_in_llama3_files():
    """`ignore_merges`: a word that is a token is that token, whatever the merges would make."""
    backend, merges = trained_byte_level(_by_pattern(LLAMA3_PATTERN))
    fields = byte_level_fields(backend, "llama-bpe", merges)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "Ġzebra"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1]
    assert tokenizer_from_gguf(fields).encode(" zebra") == [340]
    fields["tokenizer.ggml.pre"] = "qwen2"
    assert len(tokenizer_from_gguf(fields).encode(" zebra")) > 1


def test_bos_and_template_of_metadata(metadata):
    backend, pre, merges = trained_by("gpt-2")
    fields = byte_level_fields(backend, pre, merges)
    tokenizer = tokenizer_from_gguf({**fields, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": CHATML})
    assert tokenizer.encode("cat")[0] == tokenizer.bos_token_id == 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "cat"}])
    assert tokenizer.decode(chat, False) == "<|im_start|>user\ncat<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 4


def sentence_piece_fields(prefix: bool) -> dict:
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(SP_PIECES),
        "tokenizer.ggml.scores": sp_scores(),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(SP_PIECES) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def merge_by_score(text: str) -> list[str]:
    """SentencePiece's rule, spelled out: merge the neighbours whose union scores best, leftmost first."""
    score = dict(zip(SP_PIECES, sp_scores(), strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in score]
        if not pairs:
            break
        i = min(pairs)[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [
        byte for piece in pieces for byte in ([piece] if piece in score else [f"<0x{b:02X}>" for b in piece.encode()])
    ]


@pytest.mark.parametrize("text", ["the cat", "nothing  that aches", "hinge, in 日本.", "tttthhheee", "a  a   a"])
def test_sentence_piece_tokenizer(text):
    tokenizer = tokenizer_from_gguf(sentence_piece_fields(prefix=True))
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert [SP_PIECES[i] for i in ids[1:]] == merge_by_score(text)
    assert tokenizer.decode(ids) == text
    assert ids[1:] == sentence_piece_json().encode(text).ids


def test_sentence_piece_without_prefix():
    tokenizer = tokenizer_from_gguf(sentence_piece_fields(prefix=False))
    assert tokenizer.encode("the cat", False) == sentence_piece_json(prefix=False).encode("the cat").ids
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken'"),
        ({"tokenizer.ggml.model": "bert"}, r"tokenizer\.ggml\.model is 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, r"without tokenizer\.ggml\.scores"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
    ],
)
def test_other_tokenizers_are_refused_by_name(metadata, change, match):
    with pytest.raises(ConfigError, match=match):
        tokenizer_from_gguf({**metadata, **change})
