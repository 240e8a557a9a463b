"""What `export_drafter` writes, loaded unchanged by the reference implementation on torch.

Needs torch and the PyPI package `dflash` (the extra `parity`), here or in the environment whose interpreter
DFLASH_JAX_TORCH_PYTHON names.
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_cases import load_golden

from dflash_jax.checkpoints.convert_drafter import convert_drafter
from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_drafter import load_drafter, random_drafter
from dflash_jax.config import FULL, SLIDING, DrafterConfig, RopeConfig, TargetConfig
from dflash_jax.drafters.contract import Verified
from dflash_jax.kernels.kv_cache import KVCache, advance
from dflash_jax.models.target import random_target

PYTHON = os.environ.get("DFLASH_JAX_TORCH_PYTHON", sys.executable)
SCRIPT = pathlib.Path(__file__).with_name("reference_drafter.py")
TOLERANCE = 1e-4


@functools.cache
def why_not() -> str:
    """Empty where the reference can be run, else the reason."""
    probe = subprocess.run([PYTHON, "-c", "import torch, dflash.model"], capture_output=True, text=True, check=False)
    return "" if probe.returncode == 0 else (probe.stderr.strip().splitlines() or ["no reason given"])[-1]


BASE = DrafterConfig(
    hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=12, rms_norm_eps=1e-5,
    rope=RopeConfig(theta=5e5), vocab_size=48, block_size=6, mask_token_id=47, target_layer_ids=(0, 2),
    num_target_layers=5, layer_types=(FULL,) * 3, max_positions=128,
)  # fmt: skip
CASES = {
    "full": BASE,
    "sliding": dataclasses.replace(BASE, layer_types=(SLIDING, SLIDING, FULL), sliding_window=4),
    "sliding, two-sided, narrower than the block": dataclasses.replace(
        BASE, layer_types=(SLIDING, FULL, SLIDING), sliding_window=3, causal=False
    ),
    "full, causal": dataclasses.replace(BASE, causal=True),
    "yarn": dataclasses.replace(
        BASE, rope=RopeConfig(theta=1e4, kind="yarn", factor=8.0, original_max_positions=16, beta_fast=16.0)
    ),
    "llama3": dataclasses.replace(
        BASE, rope=RopeConfig(theta=1e4, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                              original_max_positions=16),
    ),
    "biases and factors": dataclasses.replace(
        BASE, attention_bias=True, embedding_scale=3.5, output_multiplier=0.5, final_logit_softcap=2.0
    ),
}  # fmt: skip


@functools.cache
def target():
    return random_target(
        TargetConfig(
            family="llama", vocab_size=48, hidden_size=32, intermediate_size=48, num_layers=5, num_heads=4,
            num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), max_positions=128,
            layer_types=(FULL,) * 5, tie_embeddings=True,
        )
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def ours(graphdef, params, shared, cache, taps_BxCxTD, root_B):
    """(fused, noise, hidden, logits) of one block over a context absorbed at once."""
    module = nnx.merge(graphdef, params)
    count_B = jnp.array([taps_BxCxTD.shape[1]], jnp.int32)
    tokens = jnp.zeros(taps_BxCxTD.shape[:2], jnp.int32)
    hidden = jnp.zeros((*taps_BxCxTD.shape[:2], shared.embedding_VxD.shape[1]))
    cache = advance(module.absorb(shared, cache, Verified(tokens, taps_BxCxTD, hidden, count_B)), count_B)
    block = module.block_tokens(root_B, module.config.block_size)
    out = module.block_hidden(shared, cache, block)
    return module.fuse(taps_BxCxTD), module.embed(shared, block), out, module.logits(shared, out)


def compare(directory, drafter, tmp_path):
    """Both implementations on one random context and block."""
    config = drafter.config
    rng = np.random.default_rng(0)
    taps = rng.normal(size=(11, len(config.target_layer_ids) * config.hidden_size)).astype(np.float32)
    rows = (1, config.num_kv_heads, 32, config.head_dim)
    layers = tuple(jnp.zeros(rows) for _ in range(config.num_target_layers + config.num_layers))
    cache = KVCache(layers, layers, None, jnp.zeros((1,), jnp.int32))
    fused, noise, hidden, logits = ours(
        drafter.graphdef, drafter.params, drafter.shared, cache, jnp.asarray(taps)[None], jnp.array([5])
    )
    inputs, outputs = tmp_path / "inputs.npz", tmp_path / "outputs.npz"
    np.savez(inputs, taps_CxTD=taps, noise_KxD=noise[0], head_VxD=drafter.shared.head_DxV.T, split=7)
    command = [PYTHON, str(SCRIPT), str(directory), str(inputs), str(outputs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(outputs) as reference:
        np.testing.assert_allclose(fused[0], reference["fused_CxD"], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(hidden[0], reference["hidden_KxD"], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(hidden[0], reference["cached_KxD"], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(logits[0], reference["logits_KxV"], atol=TOLERANCE, rtol=0)
        assert int(reference["block_size"]) == config.block_size
        assert int(reference["mask_token_id"]) == config.mask_token_id
        assert reference["target_layer_ids"].tolist() == list(config.target_layer_ids)
        assert float(reference["scale"]) == (config.embedding_scale or 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_reference_loads_the_export_and_agrees(case, tmp_path):
    if why_not():
        pytest.skip(f"the reference can not be run by {PYTHON}: {why_not()}; see this file's docstring")
    made = random_drafter(CASES[case], target(), seed=4)
    leaves, tree = jax.tree.flatten(made.params)
    rng = np.random.default_rng(4)
    moved = [x + 0.1 * jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
    directory = export_drafter(tmp_path / "drafter", made.config, jax.tree.unflatten(tree, moved))
    compare(directory, load_drafter(directory, target()), tmp_path)


def test_the_reference_loads_the_old_spelling(tmp_path):
    """Through speculators' format, too: what comes back is the drafter that went."""
    if why_not():
        pytest.skip(f"the reference can not be run by {PYTHON}: {why_not()}; see this file's docstring")
    made = random_drafter(CASES["llama3"], target(), seed=4)
    directory, model = export_drafter(tmp_path / "d", made.config, made.params), export_target(tmp_path / "t", target())
    for to in ("speculators", "zlab_old"):
        directory = convert_drafter(directory, tmp_path / to, to, target=model)
    compare(directory, load_drafter(directory, target()), tmp_path)


def test_the_reference_loads_what_was_its_own(tmp_path):
    """The reference's trained weights, through this program and back."""
    if why_not():
        pytest.skip(f"the reference can not be run by {PYTHON}: {why_not()}; see this file's docstring")
    golden_target, drafter, _ = load_golden("tr_qwen3_sliding")
    directory = export_drafter(
        tmp_path / "drafter", drafter.config, drafter.params, dtype=jnp.float32, draft_to_target=np.arange(8, 60)
    )
    compare(directory, load_drafter(directory, golden_target, draft_vocab=False), tmp_path)
