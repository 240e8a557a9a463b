"""tau during training: the real draft-verify loop on held-out prompts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from dflash_jax import sharding
from dflash_jax.config import ConfigError, from_config_dict
from dflash_jax.data.conversations import encode_prompt
from dflash_jax.data.prompts import Counts, check_counts, mixture
from dflash_jax.decoding.generate import generate
from dflash_jax.drafters.contract import Drafter
from dflash_jax.evaluation.cost_curve import call_seconds
from dflash_jax.evaluation.statistics import summarise
from dflash_jax.models.target import Target
from dflash_jax.training import processes

Evaluate = Callable[[Target, Drafter], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The `evaluation` section.

    Attributes:
      prompts: how many held-out prompts of each source, as `dflash_jax.data.prompts.mixture` takes them; empty for
        none. Of conversations that end with an answer the last question is asked.
      max_tokens: of each answer. batch_size: rows decoded together.
      max_prompt_tokens: longer prompts are left out.
      block_size: None is the trained size.
      cost_repeats: how often the calls of a round are timed for `predicted_speedup`, once a run; 0 for no prediction.
    """

    prompts: Counts = dataclasses.field(default_factory=dict)
    max_tokens: int = 96
    batch_size: int = 8
    max_prompt_tokens: int = 384
    block_size: int | None = None
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    cost_repeats: int = 20

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 2), ("batch_size", 1), ("max_prompt_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"evaluation.{name} is {getattr(self, name)}, must be at least {least}")
        if self.block_size is not None and self.block_size < 2:
            raise ConfigError(
                f"evaluation.block_size is {self.block_size}, must be at least 2, or None for the trained size"
            )
        check_counts(self.prompts, "evaluation.prompts")
        if self.cost_repeats < 0:
            raise ConfigError(
                f"evaluation.cost_repeats is {self.cost_repeats}, must be at least 0 (no prediction of the speedup)"
            )


def open_evaluation(values: Mapping[str, Any], target: Target) -> Evaluate | None:
    """evaluate(target, drafter) -> numbers, or None where the config has no prompts.

    Several processes share the prompts, and all get the numbers of all. Where the target lies over several, they decode
    all prompts together.

    The numbers are those of `dflash_jax.evaluation.statistics`: tau over all rounds (and by source, `tau_code`),
    tau_per_answer, accept_j, the share of j-th drafted tokens that were accepted when all before them were, and
    histogram, a list of how many rounds gave i tokens. predicted_speedup is what these make of wall-clock time on this
    device for one stream: tau * target_1_ms / (target_block_ms + draft_ms), the calls timed once a run over a context
    as long as these answers are in the middle. Prefill and the host's part are not in it.

    Raises:
      ConfigError: every prompt is too long.
    """
    config = from_config_dict(EvaluationConfig, values, "evaluation")
    if not config.prompts:
        return None
    room = target.config.max_positions - config.max_tokens
    if room < 1:
        raise ConfigError(
            f"evaluation.max_tokens is {config.max_tokens}, must be less than {target.config.max_positions}, the "
            "target's context"
        )
    encoded: dict[str, list[list[int]]] = {}
    found = mixture(config.prompts, config.seed, "heldout")
    for prompt in found:
        ids = encode_prompt(target.tokenizer, prompt.question, **config.chat_template_kwargs)
        if len(ids) <= min(room, config.max_prompt_tokens):
            encoded.setdefault(prompt.source, []).append(ids)
    if not encoded:
        raise ConfigError(
            f"evaluation.max_prompt_tokens is {config.max_prompt_tokens} and the context has room for {room}: all "
            f"{len(found)} held-out prompts are longer"
        )
    logging.info("evaluation on held-out prompts: %s", {name: len(ids) for name, ids in encoded.items()})

    costs: dict[str, float] = {}

    def evaluate(target: Target, drafter: Drafter) -> dict[str, Any]:
        start = time.monotonic()
        prompts = [ids for group in encoded.values() for ids in group]
        sources = [name for name, group in encoded.items() for _ in group]
        results = generate(
            target, drafter, processes.share(prompts, target.mesh), max_tokens=config.max_tokens,
            batch=config.batch_size, block_size=config.block_size,
        )  # fmt: skip
        rounds = [r.acceptance for r in results]
        acceptance = processes.gather(rounds, len(prompts), config.max_tokens, target.mesh)
        size = config.block_size or drafter.block_size
        by_source: dict[str, list[list[int]]] = {}
        for source, rounds in zip(sources, acceptance, strict=True):
            by_source.setdefault(source, []).append(rounds)
        numbers = summarise(acceptance, size)
        if numbers["tau"] is None:
            raise ConfigError(
                f"evaluation.max_tokens is {config.max_tokens} and no answer went beyond its first token: there is no "
                "round to measure; raise it or choose other evaluation.prompts"
            )
        if config.cost_repeats and not costs:
            context = sum(map(len, prompts)) // len(prompts) + config.max_tokens // 2
            costs.update(_round_costs(target, drafter, size, context, config.cost_repeats))
        report = {name: numbers[name] for name in ("tau", "tau_per_answer", "rounds", "histogram")}
        report |= {f"accept_{j}": share for j, share in enumerate(numbers["per_position"], 1)}
        for name, lists in by_source.items() if len(by_source) > 1 else ():
            report[f"tau_{name}"] = summarise(lists, size)["tau"]
        if costs:
            round_ms = costs["target_block_ms"] + costs["draft_ms"]
            report |= {"predicted_speedup": numbers["tau"] * costs["target_1_ms"] / round_ms, **costs}
        return report | {"seconds": time.monotonic() - start}

    return evaluate


def _round_costs(target: Target, drafter: Drafter, size: int, context: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a target call over one token and over a block, and of a draft; those of the first process."""
    with sharding.use(target.mesh):
        target_s, draft_s = call_seconds(
            target, drafter, context=context, capacity=context + size, widths=(1, size), block_sizes=(size,),
            repeats=repeats,
        )  # fmt: skip
    numbers = processes.of_the_first([1e3 * s for s in (target_s[1], target_s[size], draft_s[size])])
    return dict(zip(("target_1_ms", "target_block_ms", "draft_ms"), numbers, strict=True))
