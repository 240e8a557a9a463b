"""tau during training: the real draft-verify loop on held-out prompts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from dflash_jax.config import ConfigError, from_config_dict
from dflash_jax.data.conversations import encode_prompt
from dflash_jax.data.prompts import mixture
from dflash_jax.decoding.generate import generate
from dflash_jax.drafters.contract import Drafter
from dflash_jax.models.target import Target

Evaluate = Callable[[Target, Drafter], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The `evaluation` section.

    Attributes:
      prompts: how many held-out prompts of each source (see `dflash_jax.data.prompts`); empty for none.
      max_tokens: of each answer. batch_size: rows decoded together.
      max_prompt_tokens: longer prompts are left out.
      block_size: None is the trained size.
    """

    prompts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    max_tokens: int = 96
    batch_size: int = 8
    max_prompt_tokens: int = 384
    block_size: int | None = None
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def open_evaluation(values: Mapping[str, Any], target: Target) -> Evaluate | None:
    """evaluate(target, drafter) -> numbers, or None where the config has no prompts.

    Raises:
      ConfigError: every prompt is too long.
    """
    config = from_config_dict(EvaluationConfig, values)
    if not config.prompts:
        return None
    encoded: dict[str, list[list[int]]] = {}
    for prompt in mixture(config.prompts, config.seed, "heldout"):
        ids = encode_prompt(target.tokenizer, prompt.messages, **config.chat_template_kwargs)
        if len(ids) <= config.max_prompt_tokens:
            encoded.setdefault(prompt.source, []).append(ids)
    if not encoded:
        raise ConfigError(
            f"evaluation.max_prompt_tokens is {config.max_prompt_tokens}: all {sum(config.prompts.values())} "
            "held-out prompts are longer"
        )
    logging.info("evaluation on held-out prompts: %s", {name: len(ids) for name, ids in encoded.items()})

    def evaluate(target: Target, drafter: Drafter) -> dict[str, Any]:
        start = time.monotonic()
        prompts = [ids for group in encoded.values() for ids in group]
        sources = [name for name, group in encoded.items() for _ in group]
        results = generate(
            target, drafter, prompts, max_tokens=config.max_tokens, batch=config.batch_size,
            block_size=config.block_size,
        )  # fmt: skip
        size = config.block_size or drafter.block_size
        summary: dict[str, Any] = acceptance_summary([r.acceptance for r in results], size)
        for name in encoded if len(encoded) > 1 else ():
            own = [r.acceptance for r, source in zip(results, sources, strict=True) if source == name]
            summary[f"tau_{name}"] = acceptance_summary(own, size)["tau"]
        return summary | {"seconds": time.monotonic() - start}

    return evaluate


def acceptance_summary(acceptance: Sequence[Sequence[int]], block_size: int) -> dict[str, float]:
    """Numbers of acceptance lists (tokens committed in each round, the target's own token included).

    Returns:
      tau: tokens a round over all rounds. tau_per_prompt: mean of the prompts' own. accept_j: share of the
        rounds that accepted j - 1 drafted tokens which accepted the j-th too. Rounds cut short by the end of
        an answer count as they are.
    """
    rounds = np.asarray([count for one in acceptance for count in one], np.int64)
    if not len(rounds):
        return {"tau": 0.0, "tau_per_prompt": 0.0, "rounds": 0.0}
    result = {
        "tau": float(rounds.mean()),
        "tau_per_prompt": float(np.mean([np.mean(one) for one in acceptance if len(one)])),
        "rounds": float(len(rounds)),
    }
    for j in range(1, block_size):
        reached = int((rounds >= j).sum())
        result[f"accept_{j}"] = float((rounds > j).sum() / reached) if reached else 0.0
    return result
