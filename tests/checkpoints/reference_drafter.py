"""Runs a drafter directory in the reference implementation (torch, PyPI package `dflash`).

    python reference_drafter.py DIRECTORY INPUTS.npz OUTPUTS.npz

A process of its own, started by test_drafter_reference.py, so that torch may live in another environment than
jax. It loads the directory as the reference's command line does and refuses weights that do not match by name.

INPUTS: taps_CxTD, noise_KxD (embedded block), head_VxD, split (context rows of the first of two cached calls).
OUTPUTS: fused_CxD, hidden_KxD, logits_KxV (one call), cached_KxD (the same after two cached calls), and of the
config as read: block_size, mask_token_id, target_layer_ids, scale.
"""

import sys

import numpy as np
import torch
from dflash.model import DFlashDraftModel, _crop_to, _draft_value, _make_cache
from transformers import AutoConfig


def main(directory: str, inputs: str, outputs: str) -> None:
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(directory)
    assert config.architectures == ["DFlashDraftModel"], config.architectures
    model, info = DFlashDraftModel.from_pretrained(
        directory, attn_implementation="sdpa", dtype=torch.float32, output_loading_info=True
    )
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    model.eval()

    with np.load(inputs) as file:
        taps, noise, head = (torch.from_numpy(file[k])[None] for k in ("taps_CxTD", "noise_KxD", "head_VxD"))
        split = int(file["split"])
    num_context, num_slots = taps.shape[1], noise.shape[1]
    position = torch.arange(num_context + num_slots)[None]
    output_head = torch.nn.Linear(head.shape[2], head.shape[1], bias=False)
    with torch.no_grad():
        output_head.weight.copy_(head[0])
        fused = model.hidden_norm(model.fc(taps))
        hidden = model(position_ids=position, noise_embedding=noise, target_hidden=taps)
        logits = model.compute_logits(hidden, output_head)

        cache = _make_cache(config)
        for start, end in ((0, split), (split, num_context)):
            cached = model(
                position_ids=position[:, start : end + num_slots],
                noise_embedding=noise,
                target_hidden=taps[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            _crop_to(cache, end)
    np.savez(
        outputs,
        fused_CxD=fused[0].numpy(),
        hidden_KxD=hidden[0].numpy(),
        logits_KxV=logits[0].numpy(),
        cached_KxD=cached[0].numpy(),
        block_size=model.block_size,
        mask_token_id=model.mask_token_id,
        target_layer_ids=np.array(model.target_layer_ids),
        scale=float(_draft_value(config, "input_embedding_scale", 1.0)),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
