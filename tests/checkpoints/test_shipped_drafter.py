"""The drafter that comes with the package: whole, small, and good for the default target."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

import dflash_jax
from dflash_jax.checkpoints.load_drafter import load_drafter
from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.smollm2 import SOURCE
from dflash_jax.data.conversations import encode_prompt
from dflash_jax.data.prompts import load

ASSETS = pathlib.Path(dflash_jax.__file__).parent / "assets"
PLAIN, WALKED = "smollm2-135m-dflash", "smollm2-135m-dflash-markov"


@pytest.mark.parametrize(("name", "layers", "more", "megabytes"), [(PLAIN, 2, 0, 25), (WALKED, 3, 2, 40)])
def test_it_is_small_and_stored_in_bf16(name, layers, more, megabytes):
    folder = ASSETS / name
    assert sum(p.stat().st_size for p in folder.iterdir()) < megabytes * 1e6
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        names = list(file.keys())
        assert len(names) == 11 * layers + 3 + more
        assert {str(file.get_tensor(name).dtype) for name in names} == {"bfloat16"}
    assert "HumanEval is held out" in " ".join((folder / "README.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def target():
    return load_target(SOURCE, dtype=jnp.float32)


@pytest.mark.parametrize("name", [PLAIN, WALKED])
def test_it_fits_the_default_target_and_proposes_chat_tokens(name, target):
    drafter = load_drafter(f"asset:{name}", target)
    assert drafter.config.mask_token_id == 16
    assert drafter.config.mask_token_id not in target.eos_token_ids
    ids = np.asarray(drafter.shared.draft_to_target_V)
    assert set(target.eos_token_ids) <= set(ids.tolist())
    whole = load_drafter(f"asset:{name}", target, draft_vocab=False)
    assert whole.shared.head_DxV.shape == (576, 49152)
    np.testing.assert_array_equal(np.asarray(whole.shared.head_DxV[:, ids[:64]]), drafter.shared.head_DxV[:, :64])
    if name == WALKED:
        assert drafter.config.markov_rank == 64
        np.testing.assert_array_equal(whole.shared.markov_RxV[:, ids[:64]], drafter.shared.markov_RxV[:, :64])


@pytest.mark.slow
@pytest.mark.parametrize("name", [PLAIN, WALKED])
def test_its_answers_are_the_targets_and_come_several_tokens_a_call(name, target):
    prompts = [encode_prompt(target.tokenizer, p.messages) for p in load("tasks", limit=4, split="heldout")]
    drafter = load_drafter(f"asset:{name}", target)
    plain = dflash_jax.generate(target, None, prompts, max_tokens=64)
    fast = dflash_jax.generate(target, drafter, prompts, max_tokens=64)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    rounds = [n for r in fast for n in r.acceptance]
    assert sum(rounds) / len(rounds) > 1.5
