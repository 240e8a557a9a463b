"""On CPU a verified block has the bits of plain steps, so bfloat16 answers do not part either."""

import jax.numpy as jnp
import numpy as np
import pytest
from decoding.scripted import script_table, scripted_drafter
from family_runs import family_case
from kernels.compiler import needs_compiler

from dflash_jax.config import TargetConfig
from dflash_jax.decoding.engine import Engine, Request
from dflash_jax.models.target import random_target
from dflash_jax.training.dry_run import tiny_target

PROMPT, ANSWER, LENGTH = list(range(5, 15)), 40, 64


def answered(engine: Engine) -> tuple[list[int], list[np.ndarray], int]:
    """(tokens, the target's keys and values of row 0 but for the last token's, rounds)."""
    tokens, rounds = [], 0
    for event in engine.run([Request(PROMPT, ANSWER)]):
        tokens += event.token_ids
        rounds += 1
    cache, layers = engine.state.cache, engine.target.config.num_layers
    length = len(PROMPT) + ANSWER - 1  # the last token is in no cache
    return tokens, [np.asarray(x)[0, :, :length] for side in (cache.k, cache.v) for x in side[:layers]], rounds


def check(config: TargetConfig, dtype: str, **options) -> None:
    """Plain decoding against drafts that are right, and against some that are not kept."""
    target = random_target(config, 0, jnp.dtype(dtype))
    plain, expected, rounds = answered(Engine(target, max_length=LENGTH, **options))
    assert len(plain) == ANSWER and rounds == ANSWER
    wrong = [token if i % 7 else (token + 1) % 20 for i, token in enumerate(plain)]
    for draft, fewest in ((plain, ANSWER // 6), (wrong, ANSWER // 6 + 1)):
        drafter = scripted_drafter(script_table([PROMPT], [draft], config.vocab_size), 6, config.num_layers)
        tokens, found, rounds = answered(Engine(target, drafter, max_length=LENGTH, **options))
        assert tokens == plain and fewest <= rounds < ANSWER / 2
        if not options:  # pages lie elsewhere
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)


@needs_compiler
@pytest.mark.parametrize("options", [{}, {"page_size": 16}], ids=["contiguous", "paged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verified_blocks_have_the_bits_of_plain_steps(dtype, options):
    check(tiny_target(0).config, dtype, **options)


@needs_compiler
@pytest.mark.parametrize("family", ["qwen3", "mistral_sliding", "gemma2"])
def test_verified_blocks_have_the_bits_of_plain_steps_in_other_dense_families(family):
    check(family_case(family).target.config, "bfloat16")
