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
import numpy as np

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
      other_logit: plain decoding's logit of other_token.
      ulps: distance of the best logit and other_logit (of the two best, if there is none) in units in the last place
        of the run's dtype.
      near_tie: whether rounding excuses the difference: both chose tokens whose logits are that close to the best. The
        two best then are, too; of three that tie, any two may have been chosen.
    """

    index: int
    plain_token: int | None
    other_token: int | None
    best_tokens: tuple[int, int]
    best_logits: tuple[float, float]
    other_logit: float | None
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
    logit_V = logits_behind(plain, prompt_ids, max_tokens, index)
    best, second = np.argsort(-logit_V, stable=True)[:2].tolist()  # of equal ones the lowest id, as in decoding
    plain_token = plain_ids[index] if index < len(plain_ids) else None
    other_token = other_ids[index] if index < len(other_ids) else None
    dtype = jnp.dtype(plain.target.dtype)

    def distance(token: int) -> float:
        return ulps(float(logit_V[best]), float(logit_V[token]), dtype)

    def close(token: int | None) -> bool:
        if token is None:
            return False
        if dtype == jnp.float32:
            return float(logit_V[best]) - float(logit_V[token]) < MAX_MARGIN_FLOAT32
        return distance(token) <= MAX_ULPS

    return Difference(
        index=index,
        plain_token=plain_token,
        other_token=other_token,
        best_tokens=(best, second),
        best_logits=(float(logit_V[best]), float(logit_V[second])),
        other_logit=None if other_token is None else float(logit_V[other_token]),
        ulps=distance(second if other_token is None else other_token),
        near_tie=close(plain_token) and close(other_token),
    )


def ulps(a: float, b: float, dtype: jnp.dtype) -> float:
    """|a - b| in units in the last place of `dtype` at the larger of the two."""
    largest = max(abs(a), abs(b))
    exponent = math.floor(math.log2(largest)) if largest > 0 else jnp.finfo(dtype).minexp
    return abs(a - b) / 2.0 ** (exponent - jnp.finfo(dtype).nmant)


def logits_behind(plain: EngineMethod, prompt_ids: Sequence[int], max_tokens: int, index: int) -> np.ndarray:
    """Next logits [V], float32, behind `index` tokens of plain decoding's answer.

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
    return np.asarray(_next_logits(engine.config, engine.weights, cache, root_B))


@functools.partial(jax.jit, static_argnums=0)
def _next_logits(config: StepConfig, weights: Weights, cache: KVCache, root_B: jax.Array) -> jax.Array:
    """Row 0's next logits [V]."""
    target = config.target.build(weights.target)
    forward = target(root_B[:, None], cache.length_B[:, None], cache, causal(1), ())
    return target.logits(forward.hidden_BxMxD)[0, 0].astype(jnp.float32)
