"""Every family with experts, latent or linear attention, soft caps, ..., against Hugging Face's model.

All hidden states and logits: in one prefill, token by token, and in blocks of 2, 5 and 16 with a rejection at
every slot. The dense families are in test_transformer_parity.py.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from family_runs import Case, distance, empty_cache, family_case, forward, run
from flax import nnx
from golden_cases import GOLDEN
from safetensors.numpy import load_file

from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.config import FULL, RopeConfig
from dflash_jax.models.transformer import Transformer

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss",
    "gemma2", "gemma3_text", "gemma4_text", "llama4_text", "qwen3_next", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip

TOLERANCE = 2e-4
TIGHT = 1e-4  # in units of the reference's range, where neither experts nor the delta rule sum in another order


def check(case: Case, start: int, logits_MxV: np.ndarray, layers_LxMxD: np.ndarray, what: str) -> None:
    """Compares the outputs of the tokens from position `start` on."""
    rows = slice(start, start + len(logits_MxV))
    is_plain = case.target.config.moe is None and case.target.config.delta is None
    pairs = [(f"layer {i}", x, y) for i, (x, y) in enumerate(zip(layers_LxMxD, case.layers[:, rows], strict=True))]
    for name, found, wanted in [*pairs, ("logits", logits_MxV, case.logits[rows])]:
        assert np.abs(found - wanted).max() < TOLERANCE, f"{what}, {name}"
        assert not is_plain or distance(found, wanted) < TIGHT, f"{what}, {name}"


# A program a family and block size is minutes of compiling: the rest runs with -m slow.
OFTEN = {"deepseek_v3", "gpt_oss", "gemma4_text", "llama4_text", "qwen3_5_moe"}
SLOW = pytest.mark.slow


def sizes(often: int, *seldom: int) -> list:
    """(family, block) pairs: `often` for every family, the other sizes for some, and for the rest among the slow."""
    pairs = [(name, often) for name in FAMILIES]
    for block in seldom:
        pairs += [(n, block) if n in OFTEN else pytest.param(n, block, marks=SLOW) for n in FAMILIES]
    return pairs


@pytest.mark.parametrize(("name", "block"), sizes(20, 1))
def test_prefill_and_one_token_at_a_time(name, block):
    case = family_case(name)
    check(case, 0, *run(case.target, case.ids, block, paged=block == 1), f"blocks of {block}")


@pytest.mark.parametrize(
    ("name", "block"),
    sizes(5) + [pytest.param(name, block, marks=SLOW) for name in FAMILIES for block in (2, 16)],
)
def test_blocks_with_a_rejection_at_every_slot(name, block):
    """Row r of the batch keeps r + 1 tokens of a block whose other tokens are wrong, and then goes on rightly."""
    case = family_case(name)
    target, ids, prompt = case.target, case.ids, min(3, block)
    kept_B = np.arange(1, block + 1)
    cache = empty_cache(target.config, 2 * block + 24, paged=True, batch=block)

    def call(start_B, kept_B, cache):
        """One block a row: right tokens from start_B on, wrong ones from the kept_B-th on."""
        padded = np.concatenate([ids, np.zeros(block, np.int32)])
        token_BxM = np.stack([padded[start : start + block] for start in start_B])
        wrong_BxM = (token_BxM + 7) % target.config.vocab_size
        token_BxM = np.where(np.arange(block) < kept_B[:, None], token_BxM, wrong_BxM).astype(np.int32)
        logits, layers, cache = forward(
            target.graphdef, target.params, token_BxM, cache, jnp.asarray(kept_B, jnp.int32)
        )
        for row, (start, kept) in enumerate(zip(start_B, kept_B, strict=True)):
            what = f"row {row}, {kept} of {block} tokens from {start} on"
            check(case, start, np.asarray(logits)[row, :kept], np.asarray(layers)[:, row, :kept], what)
        return cache

    start_B = np.zeros(block, int)
    for kept in (np.full(block, prompt), kept_B):
        cache = call(start_B, kept, cache)
        start_B = start_B + kept
    left_B = np.minimum(block, len(ids) - start_B)
    assert (left_B > 0).all()
    call(start_B, left_B, cache)


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_loaded_and_saved_again_the_bytes_are_the_same(name, tmp_path):
    target = family_case(name).target
    export_target(tmp_path / "first", target)
    again = load_target(tmp_path / "first")
    assert again.config == target.config
    export_target(tmp_path / "second", again)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file
    # And the names and numbers are those that Hugging Face's model was saved under.
    saved = load_file(tmp_path / "first" / "model.safetensors")
    with np.load(GOLDEN / f"family_{name}.npz") as arrays:
        wanted = {key[2:]: arrays[key] for key in arrays.files if key.startswith("w.")}
    if name == "qwen3_5_moe":  # transformers saves its experts one by one; published files, and we, stack them
        saved, wanted = ({k: v for k, v in x.items() if ".experts." not in k} for x in (saved, wanted))
    assert set(saved) == set(wanted)
    for key, value in wanted.items():
        np.testing.assert_array_equal(saved[key], value, err_msg=key)


def moe(config, **change):
    return {"moe": dataclasses.replace(config.moe, **change)}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral", lambda c: moe(c, normalise=False)),
        ("mixtral", lambda c: {"sliding_window": 8}),
        ("qwen2_moe", lambda c: moe(c, normalise=True)),
        ("qwen3_moe", lambda c: moe(c, experts_per_token=2)),
        ("deepseek_v2", lambda c: moe(c, num_groups=1, groups_per_token=1)),
        ("deepseek_v2", lambda c: {"attention_scale": None}),
        ("deepseek_v3", lambda c: moe(c, group_score="max")),
        ("deepseek_v3", lambda c: moe(c, groups_per_token=3)),
        ("deepseek_v3", lambda c: {"rope": dataclasses.replace(c.rope, mscale=0.707)}),
        ("gpt_oss", lambda c: {"activation_limit": 1.0}),
        ("gpt_oss", lambda c: {"layer_types": (FULL,) * 4}),
        ("gpt_oss", lambda c: {"rope": dataclasses.replace(c.rope, truncate=True)}),
        ("gpt_oss", lambda c: {"rope": RopeConfig(c.rope.theta)}),
        ("gemma2", lambda c: {"attention_softcap": None}),
        ("gemma2", lambda c: {"final_logit_softcap": None}),
        ("gemma2", lambda c: {"embedding_scale": 1.0}),
        ("gemma2", lambda c: {"norm_offset": 0.0}),
        ("gemma3_text", lambda c: {"rope_sliding": None}),
        ("gemma3_text", lambda c: {"attention_scale": None}),
        ("gemma4_text", lambda c: {"v_norm": False}),
        ("gemma4_text", lambda c: {"full_rotary_dim": None}),
        ("llama4_text", lambda c: {"attention_temperature": None}),
        ("llama4_text", lambda c: {"attention_chunk": 2 * c.attention_chunk}),
        ("llama4_text", lambda c: {"nope_layers": ()}),
        ("llama4_text", lambda c: {"qk_unit_norm": False}),
        ("llama4_text", lambda c: moe(c, weigh_input=False)),
        ("qwen3_next", lambda c: {"rotary_dim": None}),
        ("qwen3_5_moe", lambda c: {"norm_offset": 0.0}),
    ],
)
def test_vectors_notice_a_wrong_configuration(name, change):
    """The control of the tests above: what the families differ in shows in these vectors."""
    case = family_case(name)
    config = dataclasses.replace(case.target.config, **change(case.target.config))
    own_head = "head_DxV" in case.target.params
    model = nnx.eval_shape(lambda: Transformer(config, jnp.float32, nnx.Rngs(0), own_head=own_head))
    logits, _ = run(dataclasses.replace(case.target, graphdef=nnx.split(model)[0], config=config), case.ids, 20)
    assert distance(logits, case.logits) > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_vectors_notice_lost_parameters(name):
    """A bias in the choice and the sinks change the result, so their loss would show."""
    case = family_case(name)
    lost = "selection_bias_E" if name == "deepseek_v3" else "sinks_GxR"
    flat = [
        (path, variable.replace(jnp.zeros_like(variable.get_value())) if path[-1] == lost else variable)
        for path, variable in nnx.to_flat_state(case.target.params)
    ]
    logits, _ = run(dataclasses.replace(case.target, params=nnx.from_flat_state(flat)), case.ids, 20)
    assert distance(logits, case.logits) > 10 * TOLERANCE
