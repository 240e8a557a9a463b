"""bfloat16 (B39): where drafted and plain answers part, rounding alone is to blame; anything else is found out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from golden_cases import load_golden
from scripted import script_table, scripted_drafter, wrong_at

from dflash_jax.checkpoints.load_drafter import shared_weights
from dflash_jax.config import FULL, RopeConfig, TargetConfig
from dflash_jax.drafters.contract import Drafter
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.evaluation.methods import EngineMethod, first_difference
from dflash_jax.evaluation.near_ties import Difference, explain, ulps
from dflash_jax.models.target import Target, random_target
from dflash_jax.models.transformer import Transformer

VOCAB, PROMPTS, TOKENS, BLOCK = 400, 300, 9, 4


@functools.cache
def random_pair() -> tuple[Target, list[list[int]], list[list[int]], Drafter]:
    """(target, prompts, plain answers, drafter): a random bfloat16 target, and drafts that are mostly its own answers.

    Each prompt begins with a token of its own, by which the drafter knows what to propose.
    """
    layers = 2
    config = TargetConfig(
        family="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_layers=layers, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), max_positions=64,
        layer_types=(FULL,) * layers,
    )  # fmt: skip
    target = random_target(config, 4, jnp.bfloat16)
    rng = np.random.default_rng(39)
    prompts = [[i, *rng.integers(0, VOCAB, rng.integers(0, 6)).tolist()] for i in range(PROMPTS)]
    plain = EngineMethod("plain", target)
    answers = [plain.answer(prompt, TOKENS).token_ids for prompt in prompts]
    wrong = {i: [len(p) + 2, len(p) + 7] for i, p in enumerate(prompts) if i % 3 == 0}
    table = wrong_at(script_table(prompts, answers, VOCAB), wrong, VOCAB)
    return target, prompts, answers, scripted_drafter(table, BLOCK, layers)


def differences(target: Target, other: EngineMethod, prompts, answers) -> tuple[list[Difference], list[list[int]]]:
    """(what became of each answer that is not plain decoding's, all acceptance lists)."""
    plain, found, acceptance = EngineMethod("plain", target), [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        run = other.answer(prompt, TOKENS)
        acceptance.append(list(run.acceptance))
        index = first_difference(answer, run.token_ids)
        if index is not None:
            found.append(explain(plain, prompt, TOKENS, answer, run.token_ids, index))
    return found, acceptance


def test_b39b_answers_part_at_near_ties_only():
    target, prompts, answers, drafter = random_pair()
    found, acceptance = differences(target, EngineMethod("drafted", target, drafter), prompts, answers)
    print(f"{len(found)} of {PROMPTS} answers part")
    for difference in found:
        assert difference.near_tie, difference
        assert ulps(*difference.best_logits, target.dtype) <= 2.0, difference
    assert sum(rounds == [4, 4] for rounds in acceptance) > 100  # whole blocks were verified at once
    assert sum(1 in rounds for rounds in acceptance) > 50  # and some drafts refused


class Perturbed(Transformer):
    """A target that in a block, and there only, rates odd tokens a little higher: 6 ulps of its best logits."""

    def logits(self, hidden_BxMxD):
        logits_BxMxV = super().logits(hidden_BxMxD)
        more_V = 0.1 * (jnp.arange(logits_BxMxV.shape[-1]) % 2).astype(logits_BxMxV.dtype)
        return logits_BxMxV + more_V[None, None] if hidden_BxMxD.shape[1] > 1 else logits_BxMxV


def test_b39b_a_perturbed_target_is_found_out():
    target, prompts, answers, drafter = random_pair()
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: Perturbed(target.config, target.dtype, nnx.Rngs(0))))
    faulty = EngineMethod("faulty", dataclasses.replace(target, graphdef=graphdef), drafter)
    found, _ = differences(target, faulty, prompts[:100], answers[:100])
    assert sum(not difference.near_tie for difference in found) > 10


class WrongContext(DFlash):
    """A drafter whose cache holds the negatives of what it should."""

    def absorb(self, shared, cache, verified):
        return super().absorb(shared, cache, verified.replace(taps_BxMxTD=-verified.taps_BxMxTD))


def test_b39b_a_wrong_drafter_cache_does_not_matter():
    """Drafts get worse; answers do not care."""
    target, trained, _ = load_golden("tr_llama_full")
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)  # noqa: E731
    target = dataclasses.replace(target, params=narrow(target.params), dtype=jnp.bfloat16)
    right = dataclasses.replace(
        trained, params=narrow(trained.params), shared=shared_weights(target), source="bfloat16"
    )  # fmt: skip
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: WrongContext(trained.config, target.dtype, nnx.Rngs(0))))
    rng = np.random.default_rng(40)
    prompts = [rng.integers(0, 96, rng.integers(1, 7)).tolist() for _ in range(60)]
    plain = EngineMethod("plain", target)
    answers = [plain.answer(prompt, TOKENS).token_ids for prompt in prompts]
    rounds = []
    for drafter in (right, dataclasses.replace(right, graphdef=graphdef)):
        found, acceptance = differences(target, EngineMethod("drafted", target, drafter), prompts, answers)
        assert all(difference.near_tie for difference in found), found
        rounds.append(sum(len(one) for one in acceptance))
    assert rounds[1] > rounds[0] + 30
