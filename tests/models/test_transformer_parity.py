"""The transformer against Hugging Face's, for every dense family, from vectors in tests/golden.

All hidden states and logits, in one prefill, token by token, and in blocks of three over the cache.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from family_runs import distance, family_case, load_directory, run
from flax import nnx
from golden_cases import CASES, GOLDEN, golden_json

from dflash_jax.config import SLIDING, RopeConfig
from dflash_jax.models.transformer import Transformer

FAMILIES = ("llama3_rope", "llama_linear", "mistral_sliding", "qwen2", "qwen2_sliding", "qwen3", "qwen3_yarn")
TOLERANCE = 1e-4


@pytest.mark.parametrize("block", [20, 1, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_hugging_face(name, block):
    case = family_case(name)
    logits, layers = run(case.target, case.ids, block, paged=block == 3)
    assert distance(logits, case.logits) < TOLERANCE
    for layer, (found, wanted) in enumerate(zip(layers, case.layers, strict=True)):
        assert np.abs(found - wanted).max() < TOLERANCE, f"layer {layer}"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3_rope", {"rope": RopeConfig(500.0)}),
        ("qwen3_yarn", {"rope": RopeConfig(10_000.0)}),
        ("qwen2_sliding", {"sliding_window": 6}),
        ("qwen3", {"layer_types": (SLIDING,) * 3}),
    ],
)
def test_vectors_notice_a_wrong_configuration(name, change):
    """The control of the test above: scaling, window and layer kinds each show in these vectors."""
    case = family_case(name)
    config = dataclasses.replace(case.target.config, **change)
    own_head = "head_DxV" in case.target.params
    model = nnx.eval_shape(lambda: Transformer(config, jnp.float32, nnx.Rngs(0), own_head=own_head))
    logits, _ = run(dataclasses.replace(case.target, graphdef=nnx.split(model)[0], config=config), case.ids, 20)
    assert distance(logits, case.logits) > 100 * TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_shared_parity_cases(name, tmp_path):
    """Targets of the drafter's parity cases; the reference's last hidden state is behind the final norm."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    hf = golden_json(name)["target"]
    weights = {key.removeprefix("target_w."): value for key, value in arrays.items() if key.startswith("target_w.")}
    target = load_directory(tmp_path, hf, weights)
    logits, layers = run(target, arrays["target.input_ids"][0].astype(np.int32), 13)
    assert distance(logits, arrays["target.logits"][0]) < TOLERANCE
    wanted = arrays["target.hidden_states"][1:-1, 0]
    assert wanted.shape == layers[:-1].shape
    assert np.abs(layers[:-1] - wanted).max() < TOLERANCE
    assert np.abs(layers[-1] - arrays["target.hidden_states"][-1, 0]).max() > 1e-2  # before the norm, not behind it
