"""Every family of targets decodes speculatively what it decodes plainly, round by round as foretold.

Four rows of different lengths; a random DFlash drafter, and an oracle that is made wrong here and there, so that
rows reject at different slots of the same round. Recurrent targets must forget what was rejected.
"""

import dataclasses
import functools

import numpy as np
import pytest
from answers import Answer, mixed_prompts, of_results
from family_runs import family_case
from scripted import script_table, scripted_drafter, wrong_at

from dflash_jax import generate, sharding
from dflash_jax.checkpoints.load_drafter import random_drafter
from dflash_jax.config import DrafterConfig
from dflash_jax.models.target import Target, place
from dflash_jax.training.initialise import drafter_config

FAMILIES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "gemma2", "gemma3_text",
    "gemma4_text", "llama4_text", "qwen3_next", "qwen3_5", "qwen3_5_moe",
)  # fmt: skip
# Each test compiles for many seconds; the other families run with -m slow.
OFTEN = ("deepseek_v3", "gpt_oss", "gemma3_text", "llama4_text", "qwen3_next", "qwen3_5_moe")
SLOW = pytest.mark.slow
BLOCK, LENGTHS, LIMITS = 5, (3, 17, 1, 9), (22, 14, 22, 18)


@functools.cache
def plain(name: str) -> tuple[list[list[int]], list[Answer]]:
    """(prompts, greedy answers of plain decoding). A prompt's first token names its row."""
    target = family_case(name).target
    prompts = [[i, *p[1:]] for i, p in enumerate(mixed_prompts(LENGTHS, target.config.vocab_size, seed=3))]
    return prompts, of_results(generate(target, None, prompts, max_tokens=LIMITS, stop_token_ids=()))


def foretold(prompt: list[int], answer: Answer, wrong: list[int]) -> tuple[int, ...]:
    """The acceptance list of a drafter that is wrong at these positions and right elsewhere."""
    rounds, root, end = [], len(prompt), len(prompt) + len(answer.token_ids) - 1
    while root < end:
        accepted = 0
        while accepted < BLOCK - 1 and root + 1 + accepted not in wrong:
            accepted += 1
        rounds.append(min(accepted + 1, end - root))
        root += rounds[-1]
    return tuple(rounds)


def draft_config(target: Target) -> DrafterConfig:
    taps = (0, target.config.num_layers - 2)
    return drafter_config(target.config, num_layers=1, block_size=BLOCK, mask_token_id=2, target_layer_ids=taps)


def often(names: tuple[str, ...]) -> list:
    return [name if name in names else pytest.param(name, marks=SLOW) for name in FAMILIES]


@pytest.mark.parametrize("name", often(OFTEN))
def test_an_oracle_with_errors_gives_plain_answers_in_the_rounds_foretold(name):
    target = family_case(name).target
    prompts, answers = plain(name)
    vocab = target.config.vocab_size
    rng = np.random.default_rng(5)
    wrong = {p[0]: sorted(len(p) + rng.choice(20, 5, replace=False)) for p in prompts}
    table = wrong_at(script_table(prompts, [a.token_ids for a in answers], vocab), wrong, vocab)
    oracle = scripted_drafter(table, BLOCK, target.config.num_layers)
    found = of_results(generate(target, oracle, prompts, max_tokens=LIMITS, stop_token_ids=()))
    for prompt, answer, result in zip(prompts, answers, found, strict=True):
        assert result.token_ids == answer.token_ids
        assert result.acceptance == foretold(prompt, answer, wrong[prompt[0]])


@pytest.mark.parametrize("name", often(("deepseek_v3", "qwen3_next")))
def test_a_random_drafter_gives_plain_answers(name):
    target = family_case(name).target
    prompts, answers = plain(name)
    # Fewer rows than prompts: a row's state must not outlive its request.
    found = generate(
        target, random_drafter(draft_config(target), target, seed=1), prompts, max_tokens=LIMITS, stop_token_ids=(),
        batch=2,
    )  # fmt: skip
    assert [tuple(r.token_ids) for r in found] == [a.token_ids for a in answers]


@functools.cache
def placed(name: str, data: int, fsdp: int, expert: int, tensor: int) -> Target:
    target = family_case(name).target
    mesh = sharding.make_mesh(data, tensor, fsdp=fsdp, expert=expert)
    return dataclasses.replace(target, params=place(target.params, mesh), mesh=mesh)


@pytest.mark.parametrize(
    "axes",
    [(2, 1, 2, 2), *(pytest.param(axes, marks=SLOW) for axes in ((8, 1, 1, 1), (1, 2, 4, 1), (1, 1, 1, 8)))],
    ids=str,
)
@pytest.mark.parametrize("name", ["qwen3_5_moe", "deepseek_v3", "gpt_oss"])
def test_meshes_say_what_one_device_says_in_the_same_rounds(name, axes):
    """Recurrent states, experts, a latent of one head, sinks: (data, fsdp, expert, tensor)."""
    target, one = placed(name, *axes), family_case(name).target
    prompts, answers = plain(name)
    drafters = [random_drafter(draft_config(t), t, seed=1) for t in (one, target)]
    found, wanted = (
        of_results(generate(t, d, prompts, max_tokens=LIMITS, stop_token_ids=(), batch=8, page_size=32))
        for t, d in zip((target, one), drafters[::-1], strict=True)
    )
    assert found == wanted
    assert [r.token_ids for r in found] == [a.token_ids for a in answers]
