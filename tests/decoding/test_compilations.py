"""How many programs there are: a fixed few, whatever lengths, limits and sampling values come."""

import numpy as np
from answers import CountCompilations, mixed_prompts, run
from scripted import script_table, scripted_drafter, scripted_target

from dflash_jax.decoding import step as step_module
from dflash_jax.decoding.engine import Engine
from dflash_jax.decoding.generate import generate, stream
from dflash_jax.decoding.request import Request

TABLE = script_table([[2]], [range(14)])


def pair():
    return scripted_target(TABLE), scripted_drafter(TABLE, 4)


def test_the_counter_counts():
    import jax

    with CountCompilations() as compilations:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert compilations.count >= 1


def traffic(seed: int, count: int, sampled: bool, bent: bool = False) -> list[Request]:
    rng = np.random.default_rng(seed)
    prompts = mixed_prompts(rng.integers(1, 100, count), 15, seed)
    return [
        Request(
            prompt, int(rng.integers(1, 27)),
            temperature=float(rng.choice([0.0, 0.3, 1.5])) if sampled else 0.0,
            top_k=int(rng.integers(0, 20)), top_p=float(rng.uniform(0.1, 1)), min_p=float(rng.uniform(0, 0.5)),
            seed=int(rng.integers(2**63)), stop_token_ids=rng.integers(0, 16, rng.integers(0, 9)).tolist(),
            **(rules(rng) if bent else {}),
        )
        for prompt in prompts
    ]  # fmt: skip


def rules(rng: np.random.Generator) -> dict:
    """Some of the rules that bend logits, or none."""
    values = {
        "presence_penalty": float(rng.uniform(-2, 2)), "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "logit_bias": {int(t): float(rng.normal()) for t in rng.integers(0, 16, rng.integers(1, 9))},
    }  # fmt: skip
    return {name: value for name, value in values.items() if rng.random() < 0.5}


def warm_up(engine: Engine):
    for count in (1, 2, 4):
        for length in (1, 60):  # of the two sizes of a prefill call
            run(engine, [Request([1] * length, 3)] * count)


def test_b89_an_engine_compiles_a_fixed_few_programs():
    """One step; two prefills and an admission for each power of two of prompts that come at once. Then no more."""
    before = [f._cache_size() for f in (step_module.step, step_module.prefill_chunk, step_module.admit)]
    engine = Engine(*pair(), batch=4, max_length=128, greedy=False, page_size=16)
    warm_up(engine)
    after = [f._cache_size() for f in (step_module.step, step_module.prefill_chunk, step_module.admit)]
    assert (np.subtract(after, before) <= [1, 6, 3]).all()
    with CountCompilations() as compilations:
        for seed in range(1, 6):
            run(engine, traffic(seed, 12, sampled=True))
    assert compilations.count == 0


def test_b89_bias_and_penalties_come_and_go_in_the_same_programs():
    engine = Engine(*pair(), batch=4, max_length=128, greedy=False, logits_rules=True)
    warm_up(engine)
    with CountCompilations() as compilations:
        for seed in range(1, 4):
            run(engine, traffic(seed, 12, sampled=True, bent=True))
    assert compilations.count == 0


def test_generate_compiles_nothing_new_within_a_bucket():
    """Each call makes an engine of its own; the programs are there already."""
    prompts = mixed_prompts([5, 9], 15)
    for warm in (prompts, mixed_prompts([90, 9], 15)):  # of the two sizes of a prefill call
        generate(*pair(), warm, max_tokens=20)
        list(stream(*pair(), warm, max_tokens=20, temperature=0.5))
    other_script = script_table([[3]], [[7, 6, 5]])
    with CountCompilations() as compilations:
        generate(*pair(), mixed_prompts([90, 1], 15), max_tokens=[3, 38], stop_token_ids=[4, 5])
        generate(scripted_target(other_script), scripted_drafter(other_script, 4), prompts, max_tokens=7)
        options = {"temperature": [0.0, 2.0], "top_k": 3, "top_p": [0.4, 1.0], "min_p": 0.1, "seed": 2**40}
        list(stream(*pair(), mixed_prompts([64, 65], 15), max_tokens=11, ignore_eos=True, **options))
        generate(*pair(), prompts, max_tokens=11, temperature=1e-9)  # means greedy: the greedy programs
    assert compilations.count == 0
