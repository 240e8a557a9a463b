"""A trained tiny pair and prompts for it: what the benchmark tests share."""

from __future__ import annotations

import numpy as np
from golden_cases import load_golden

from dflash_jax.evaluation.runner import Prompts, describe
from dflash_jax.evaluation.tasks import EncodedPrompt

CASE = "tr_llama_full"
MAX_TOKENS = 24


def pair():
    """(target, drafter): six layers, block size 4, trained enough that some drafts are right."""
    target, drafter, _ = load_golden(CASE)
    return target, drafter


def golden_prompt() -> tuple[int, ...]:
    """The prompt that the reference's numbers were made with."""
    return tuple(int(t) for t in load_golden(CASE)[2]["target.input_ids"][0])


def prompts(count: int = 4) -> Prompts:
    """The golden prompt, and others made of its pieces; two tasks."""
    base, rng = golden_prompt(), np.random.default_rng(0)
    made = [EncodedPrompt("one", "one:0", base)]
    for i in range(1, count):
        ids = [*base[i:], *rng.integers(3, 90, 3).tolist()]
        made.append(EncodedPrompt("one" if i % 2 == 0 else "two", f"p:{i}", tuple(ids)))
    by_task: dict[str, list[EncodedPrompt]] = {}
    for prompt in made:
        by_task.setdefault(prompt.task, []).append(prompt)
    return Prompts(by_task, dict.fromkeys(by_task, 0))


def setup(methods) -> dict:
    target, drafter = pair()
    return describe(target, drafter, MAX_TOKENS, methods)
