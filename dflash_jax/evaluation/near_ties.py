"""Why two greedy decoders part: an exact look at the target's two best tokens where they first differ.

Verifying a block and decoding one token are products of different shapes, so their sums are rounded differently.
In float32 that does not move an argmax; in bfloat16 it may, where the two best logits are a rounding step or two
apart. Such a parting is excused. Any other one is a fault of the decoder.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash_jax.decoding.step import StepConfig, Weights
from dflash_jax.evaluation.methods import EngineMethod
from dflash_jax.kernels.kv_cache import KVCache
from dflash_jax.models.attention import causal

MAX_ULPS = 2.0  # of the run's dtype, at the size of the better logit
MAX_MARGIN_FLOAT32 = 1e-5


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where an answer first differs from plain decoding's.

    Attributes:
      index: of the token in the answer.
      plain_token, other_token: what the two chose; None where the answer had ended.
      best_tokens, best_logits: plain decoding's two best there, best first.
      ulps: their distance in units in the last place of the run's dtype.
      near_tie: whether rounding excuses the difference, and the other one chose one of the two.
    """

    index: int
    plain_token: int | None
    other_token: int | None
    best_tokens: tuple[int, int]
    best_logits: tuple[float, float]
    ulps: float
    near_tie: bool


def explain(
    plain: EngineMethod,
    prompt_ids: Sequence[int],
    max_tokens: int,
    plain_ids: Sequence[int],
    other_ids: Sequence[int],
    index: int,
) -> Difference:
    """Decodes plainly up to the first difference again and looks at the logits there."""
    tokens, logits = best_two(plain, prompt_ids, max_tokens, index)
    plain_token = plain_ids[index] if index < len(plain_ids) else None
    other_token = other_ids[index] if index < len(other_ids) else None
    dtype = jnp.dtype(plain.target.dtype)
    distance = ulps(logits[0], logits[1], dtype)
    margin = logits[0] - logits[1]
    close = margin < MAX_MARGIN_FLOAT32 if dtype == jnp.float32 else distance <= MAX_ULPS
    near_tie = close and {plain_token, other_token} == set(tokens)
    return Difference(index, plain_token, other_token, tokens, logits, distance, near_tie)


def ulps(a: float, b: float, dtype: jnp.dtype) -> float:
    """|a - b| in units in the last place of `dtype` at the larger of the two."""
    largest = max(abs(a), abs(b))
    exponent = math.floor(math.log2(largest)) if largest > 0 else jnp.finfo(dtype).minexp
    return abs(a - b) / 2.0 ** (exponent - jnp.finfo(dtype).nmant)


def best_two(
    plain: EngineMethod, prompt_ids: Sequence[int], max_tokens: int, index: int
) -> tuple[tuple[int, int], tuple[float, float]]:
    """(tokens, logits) of the two best behind `index` tokens of plain decoding's answer, best first.

    Computed by the one-token program over the very cache that plain decoding has there.
    """
    # A new engine: the method's own may hold other rows. Its programs are compiled already.
    engine = plain.new_engine(plain.engine_for(prompt_ids, max_tokens).capacity)
    engine.admit([(0, plain.request(prompt_ids, max_tokens))])
    for _ in range(index - 1):
        engine.round()
    cache, root_B = engine.state.cache, engine.state.root_B
    if index == 0:
        # Behind the prompt: its last token is the root, over the cache rows before it.
        cache, root_B = cache.replace(length_B=cache.length_B - 1), jnp.full_like(root_B, prompt_ids[-1])
    logits_2, tokens_2 = _top_two(engine.config, engine.weights, cache, root_B)
    return (int(tokens_2[0]), int(tokens_2[1])), (float(logits_2[0]), float(logits_2[1]))


@functools.partial(jax.jit, static_argnums=0)
def _top_two(
    config: StepConfig, weights: Weights, cache: KVCache, root_B: jax.Array
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The two best next logits of row 0 and their tokens."""
    target = config.target.build(weights.target)
    forward = target(root_B[:, None], cache.length_B[:, None], cache, causal(1), ())
    return jax.lax.top_k(target.logits(forward.hidden_BxMxD)[0, 0], 2)
