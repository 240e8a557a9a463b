"""What `convert_drafter` writes for vllm-project/speculators, loaded and run by that package on torch.

Needs the PyPI package `speculators` (tried with 0.9.0), here or in the environment whose interpreter
DFLASH_JAX_SPECULATORS_PYTHON names.
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

from dflash_jax.checkpoints.convert_drafter import convert_drafter
from dflash_jax.checkpoints.export_drafter import export_drafter
from dflash_jax.checkpoints.export_target import export_target
from dflash_jax.checkpoints.load_drafter import load_drafter, random_drafter
from dflash_jax.config import FULL, SLIDING
from dflash_jax.kernels.kv_cache import KVCache
from tests.checkpoints.test_drafter_reference import BASE, TOLERANCE, ours, target

PYTHON = os.environ.get("DFLASH_JAX_SPECULATORS_PYTHON", sys.executable)
SCRIPT = pathlib.Path(__file__).with_name("reference_speculators.py")
IDS = np.arange(0, 48, 2)
CASES = {
    "full": BASE,
    # The context fits the window: its far end is placed differently (docs/checkpoints.md).
    "sliding": dataclasses.replace(BASE, layer_types=(SLIDING, FULL, SLIDING), sliding_window=64),
    "biases": dataclasses.replace(BASE, attention_bias=True),
}


@functools.cache
def why_not() -> str:
    """Empty where the package can be run, else the reason."""
    probe = [PYTHON, "-c", "from speculators.models.dflash import DFlashDraftModel"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no reason given"])[-1]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_speculators_loads_the_export_and_agrees(case, tmp_path):
    if why_not():
        pytest.skip(f"speculators can not be run by {PYTHON}: {why_not()}; see this file's docstring")
    made = random_drafter(CASES[case], target(), seed=4)
    leaves, tree = jax.tree.flatten(made.params)
    rng = np.random.default_rng(4)
    moved = [x + 0.1 * jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in leaves]
    exported = export_drafter(
        tmp_path / "d", made.config, jax.tree.unflatten(tree, moved), dtype=jnp.float32, draft_to_target=IDS
    )
    model = export_target(tmp_path / "t", target())
    directory = convert_drafter(exported, tmp_path / "s", "speculators", target=model)

    drafter = load_drafter(directory, target())
    config, taps = drafter.config, rng.normal(size=(11, 2 * 32)).astype(np.float32)
    rows = (1, config.num_kv_heads, 32, config.head_dim)
    layers = tuple(jnp.zeros(rows) for _ in range(config.num_target_layers + config.num_layers))
    cache = KVCache(layers, layers, None, jnp.zeros((1,), jnp.int32))
    fused, noise, hidden, logits = ours(
        drafter.graphdef, drafter.params, drafter.shared, cache, jnp.asarray(taps)[None], jnp.array([5])
    )
    block = np.array([5] + [config.mask_token_id] * (config.block_size - 1))
    np.savez(tmp_path / "inputs.npz", taps_CxTD=taps, block_K=block)
    command = [PYTHON, str(SCRIPT), str(directory), str(tmp_path / "inputs.npz"), str(tmp_path / "outputs.npz")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "outputs.npz") as reference:
        for name, value in (("fused_CxD", fused), ("noise_KxD", noise), ("hidden_KxD", hidden), ("logits_KxU", logits)):
            np.testing.assert_allclose(value[0], reference[name], atol=TOLERANCE, rtol=0, err_msg=name)
        np.testing.assert_array_equal(np.arange(len(IDS)) + reference["d2t_U"], IDS)
        np.testing.assert_array_equal(np.flatnonzero(reference["t2d_V"]), IDS)
        assert int(reference["block_size"]) == config.block_size
        assert int(reference["mask_token_id"]) == config.mask_token_id
        assert reference["aux_ids"].tolist() == [i + 1 for i in config.target_layer_ids]
