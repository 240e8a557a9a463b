"""On CPU a verified block has the bits of plain steps, so bfloat16 answers do not part either."""

import jax.numpy as jnp
import numpy as np
import pytest
from decoding.scripted import script_table, scripted_drafter
from kernels.compiler import needs_compiler

from dflash_jax.decoding.engine import Engine, Request
from dflash_jax.models.target import random_target
from dflash_jax.training.dry_run import tiny_target

PROMPT, ANSWER = list(range(5, 55)), 40


def answered(engine: Engine) -> tuple[list[int], list[np.ndarray], int]:
    """(tokens, the target's keys and values of row 0 while its last token is being decoded, rounds)."""
    tokens, rounds = [], 0
    for event in engine.run([Request(PROMPT, ANSWER)]):
        tokens += event.token_ids
        rounds += 1
    cache, layers = engine.state.cache, engine.target.config.num_layers
    length = len(PROMPT) + ANSWER - 1  # the last token is in no cache
    return tokens, [np.asarray(x)[0, :, :length] for side in (cache.k, cache.v) for x in side[:layers]], rounds


@needs_compiler
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verified_blocks_have_the_bits_of_plain_steps(dtype, page_size):
    target = random_target(tiny_target(0).config, 0, jnp.dtype(dtype))
    options = {"max_length": 128, "page_size": page_size}
    plain, expected, rounds = answered(Engine(target, **options))
    assert len(plain) == ANSWER and rounds == ANSWER
    wrong = [token if i % 7 else (token + 1) % 200 for i, token in enumerate(plain)]  # some drafts are not kept
    for draft, fewest in ((plain, ANSWER // 6), (wrong, ANSWER // 6 + 1)):
        drafter = scripted_drafter(
            script_table([PROMPT], [draft], target.config.vocab_size), 6, target.config.num_layers
        )
        tokens, found, rounds = answered(Engine(target, drafter, **options))
        assert tokens == plain and fewest <= rounds < ANSWER / 2
        if page_size is None:
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
