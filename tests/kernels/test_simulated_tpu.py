"""The kernels in JAX's TPU simulator: memory starts as NaN, reads out of bounds raise, races are looked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import AnchorCase, BlockCase, anchor_inputs, block_inputs
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels.anchor_attention import anchor_attention
from dflash_jax.kernels.anchor_attention_pallas import anchor_attention_pallas
from dflash_jax.kernels.block_attention import paged_block_attention
from dflash_jax.kernels.block_attention_pallas import paged_block_attention_pallas

pytestmark = pytest.mark.slow

SIMULATOR = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@pytest.fixture(autouse=True)
def fresh_simulator():
    yield
    pltpu.reset_tpu_interpret_mode_state()  # an exception leaves it unusable for the next test


@pytest.mark.parametrize(
    "case",
    [
        BlockCase(lengths=(48, 17), window=20, visibility="tree"),
        BlockCase(batch=1, page_size=700, pages=2, lengths=(1250,)),
        BlockCase(slots=3, page_size=520, pages=None, lengths=(0, 515)),
        BlockCase(lengths=(48, 17), sinks=True, softcap=2.0, chunk=20, value_dim=32),
        BlockCase(slots=5, kv_heads=1, group=128, head_dim=40, in_keys=True, value_dim=32, lengths=(48, 0)),
        BlockCase(slots=3, kv_heads=1, head_dim=40, in_keys=True, value_dim=32, page_size=520, pages=None),
    ],
    ids=[
        "several pages a step", "pages in parts", "contiguous, last part half empty",
        "sinks, soft cap, chunks, narrow values", "latent, heads in two tiles", "latent, contiguous",
    ],
)  # fmt: skip
def test_block_attention(case):
    arrays, keywords = block_inputs(case)
    rows = ("length_B", "position_BxM", "visibility", "sinks_N")
    options = {name: value for name, value in keywords.items() if name not in rows}
    out = paged_block_attention_pallas(
        *arrays, *[keywords[name] for name in rows], **options, interpret=SIMULATOR
    )  # fmt: skip
    np.testing.assert_allclose(out, paged_block_attention(*arrays, **keywords), atol=2e-6)


def test_anchor_attention():
    case = AnchorCase(batch=1, anchors=20, slots=16, kv_heads=1, context=700, window=300)
    arrays, keywords = anchor_inputs(case)
    masks = [keywords[name] for name in ("anchor_BxA", "keep_BxA", "visibility_KxK", "document_BxS")]
    gradient = jnp.cos(arrays[0])

    def kernels(*arrays):
        return anchor_attention_pallas(
            *arrays, *masks, window=case.window, scale=keywords["scale"], interpret=SIMULATOR
        )  # fmt: skip

    out, pull = jax.vjp(kernels, *arrays)
    expected, expected_pull = jax.vjp(lambda *arrays: anchor_attention(*arrays, **keywords), *arrays)
    for x, y in zip((out, *pull(gradient)), (expected, *expected_pull(gradient)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
