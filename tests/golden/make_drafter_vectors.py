"""Makes cases of the kind tr_*.npz / tr_*.json: a target, a drafter and the reference's numbers for both.

    python tests/golden/make_drafter_vectors.py OUTPUT_DIR [case ...]      (pip install dflash_jax[parity])

Target and drafter are tiny and trained for a minute on a synthetic rule, so that drafts are sometimes right and
sometimes wrong. Everything is float32 on one CPU thread; weights are rounded to bfloat16 values before anything is
recorded, which halves the files. README.md lists what a file holds.
"""

import json
import pathlib
import sys

import dflash
import numpy as np
import torch
import transformers
from dflash.model import (
    DFlashDraftModel,
    _crop_to,
    _make_cache,
    _raw_input_embeddings,
    dflash_generate,
    extract_context_feature,
)
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB, MASK, BLOCK, TAPS, PROMPT, SPLIT = 96, 95, 4, [1, 3, 4], 13, 9
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.08,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
CASES = {
    "tr_qwen3_full_a": (Qwen3Config, Qwen3ForCausalLM, ["full_attention"] * 2, None),
    "tr_llama_full": (LlamaConfig, LlamaForCausalLM, ["full_attention"] * 2, None),
    "tr_qwen3_sliding": (Qwen3Config, Qwen3ForCausalLM, ["sliding_attention", "full_attention"], 8),
}


def sequences(generator: torch.Generator, batch: int, length: int) -> torch.Tensor:
    """The rule: the next token follows from the last two by fixed tables, now and then by chance."""
    table = torch.randperm(VOCAB - 1, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(0, VOCAB - 1, (batch, length), generator=generator)
    chance = torch.rand((batch, length), generator=generator)
    for i in range(2, length):
        ruled = table[(tokens[:, i - 1] + 5 * (tokens[:, i - 2] % 2)) % (VOCAB - 1)]
        tokens[:, i] = torch.where(chance[:, i] < 0.1, tokens[:, i], ruled)
    return tokens


def train_target(model, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = sequences(generator, 16, 40)
        loss = F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def train_drafter(drafter, target, steps: int) -> None:
    """One block a sequence at a random anchor; the labels are the target's own greedy choices."""
    generator = torch.Generator().manual_seed(2)
    optimiser = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    for _ in range(steps):
        anchor = int(torch.randint(4, 30, (), generator=generator))
        tokens = sequences(generator, 16, anchor + 1)
        with torch.no_grad():
            for _ in range(BLOCK - 1):
                tokens = torch.cat([tokens, target(tokens).logits[:, -1:].argmax(-1)], dim=1)
            states = target(tokens[:, :anchor], output_hidden_states=True).hidden_states
            block = torch.full((16, BLOCK), MASK)
            block[:, 0] = tokens[:, anchor]
            noise = _raw_input_embeddings(target, block)
        hidden = drafter(
            position_ids=torch.arange(anchor + BLOCK)[None],
            noise_embedding=noise,
            target_hidden=extract_context_feature(states, TAPS),
        )
        loss = F.cross_entropy(target.lm_head(hidden[:, 1:]).flatten(0, 1), tokens[:, anchor + 1 :].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def plain_greedy(target, ids: torch.Tensor, num_tokens: int, stop: list[int] | None) -> torch.Tensor:
    for _ in range(num_tokens):
        ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], dim=1)
        if stop and int(ids[0, -1]) in stop:
            break
    return ids


def round_weights(model) -> None:
    """Float32 weights that bfloat16 could hold: their low halves are zeros, and zeros pack well."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())


def record(target, drafter) -> dict[str, np.ndarray]:
    """All numbers of one case."""
    ids = sequences(torch.Generator().manual_seed(3), 1, PROMPT)
    out = target(ids, output_hidden_states=True)
    taps = extract_context_feature(out.hidden_states, TAPS)
    block = torch.full((1, BLOCK), MASK)
    block[:, 0] = out.logits[:, -1].argmax(-1)
    noise = _raw_input_embeddings(target, block)
    position = torch.arange(PROMPT + BLOCK)[None]

    layers = []
    hooks = [layer.register_forward_hook(lambda _m, _i, result: layers.append(result)) for layer in drafter.layers]
    hidden = drafter(position_ids=position, noise_embedding=noise, target_hidden=taps)
    for hook in hooks:
        hook.remove()

    cache, steps = _make_cache(drafter.config), []
    early = block.clone()
    early[:, 0] = ids[:, SPLIT]
    for start, end, tokens in ((0, SPLIT, early), (SPLIT, PROMPT, block)):
        steps.append(
            drafter(
                position_ids=position[:, start : end + BLOCK],
                noise_embedding=_raw_input_embeddings(target, tokens),
                target_hidden=taps[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
        )
        _crop_to(cache, end)

    numbers = {
        "target.input_ids": ids,
        "target.logits": out.logits,
        "target.hidden_states": torch.stack(out.hidden_states),
        "draft.target_hidden_concat": taps,
        "draft.block_ids": block,
        "draft.noise_embedding": noise,
        "draft.position_ids": position,
        "draft.fused_ctx": drafter.hidden_norm(drafter.fc(taps)),
        **{f"draft.layer{i}_out": x for i, x in enumerate(layers)},
        "draft.hidden": hidden,
        "draft.logits": drafter.compute_logits(hidden, target.lm_head),
        "draft.inc_step1_hidden": steps[0],
        "draft.inc_step2_hidden": steps[1],
        "draft.inc_vs_full_maxdiff": (steps[1] - hidden).abs().max(),
    }
    stop = [int(plain_greedy(target, ids, 12, None)[0, -1])]
    for name, length, ends in (
        ("gen40", 40, None), ("gen17", 17, None), ("gen1", 1, None), ("gen2", 2, None), ("gen40_stop", 40, stop),
    ):  # fmt: skip
        # The reference times itself with CUDA when asked for statistics; its acceptance lists are in them.
        dflash.model._cuda_time = lambda: 0.0
        result = dflash_generate(drafter, target, ids, length, ends, return_stats=True)
        numbers[f"{name}.output_ids"] = result.output_ids
        numbers[f"{name}.acceptance_lengths"] = torch.tensor(result.acceptance_lengths, dtype=torch.int64)
        numbers[f"{name}.ar_ids"] = plain_greedy(target, ids, length, ends)
        assert torch.equal(numbers[f"{name}.ar_ids"], result.output_ids), name
        if ends:
            numbers[f"{name}.stop_token_ids"] = torch.tensor(ends)
    weights = {f"target_w.{k}": v for k, v in target.state_dict().items()}
    weights |= {f"draft_w.{k}": v for k, v in drafter.state_dict().items()}
    return {name: value.detach().numpy() for name, value in (numbers | weights).items()}


def make(name: str, directory: pathlib.Path, target_steps: int = 400, drafter_steps: int = 500) -> None:
    config_class, model_class, layer_types, window = CASES[name]
    torch.manual_seed(0)
    target = model_class(config_class(**SHAPE, num_hidden_layers=6, bos_token_id=1, eos_token_id=2))
    train_target(target, target_steps)
    round_weights(target)
    target.eval()
    config = Qwen3Config(
        **SHAPE,
        num_hidden_layers=2,
        layer_types=layer_types,
        use_sliding_window=window is not None,
        sliding_window=window,
        num_target_layers=6,
        dflash_config={"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": TAPS},
    )
    config._attn_implementation = "sdpa"
    drafter = DFlashDraftModel(config)
    train_drafter(drafter, target, drafter_steps)
    round_weights(drafter)
    drafter.eval()
    with torch.no_grad():
        numbers = record(target, drafter)
    np.savez_compressed(directory / f"{name}.npz", **numbers)
    about = {
        "target": target.config.to_dict(),
        "draft": config.to_dict(),
        "dflash": "0.1.0 (PyPI)",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }
    (directory / f"{name}.json").write_text(json.dumps(about, indent=1) + "\n")
    print(name, "tokens a round:", numbers["gen40.acceptance_lengths"].tolist())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for case in sys.argv[2:] or CASES:
        make(case, pathlib.Path(sys.argv[1]))
