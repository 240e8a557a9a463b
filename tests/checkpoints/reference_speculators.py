"""Runs a drafter directory in the PyPI package `speculators` (torch).

    python reference_speculators.py DIRECTORY INPUTS.npz OUTPUTS.npz

A process of its own, started by test_speculators_reference.py. It loads the directory as vllm-project/speculators does,
refuses names that do not match, and drives the model's own modules over one block: its forward pass is made for
training, with anchors that it draws itself.

INPUTS: taps_CxTD, block_K (token ids: the anchor, then masks).
OUTPUTS: fused_CxD, noise_KxD, hidden_KxD, logits_KxU, and of the model as loaded: d2t_U, t2d_V, block_size,
mask_token_id, aux_ids.
"""

import sys

import numpy as np
import torch
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig


def main(directory: str, inputs: str, outputs: str) -> None:
    torch.set_num_threads(1)
    config = DFlashSpeculatorConfig.from_pretrained(directory)
    config.transformer_layer_config._attn_implementation = "eager"
    model, info = DFlashDraftModel.from_pretrained(directory, config=config, output_loading_info=True)
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert not any(wrong.values()), wrong
    model = model.float().eval()

    with np.load(inputs) as file:
        taps, block = torch.from_numpy(file["taps_CxTD"])[None], torch.from_numpy(file["block_K"])[None]
    num_context, num_slots = taps.shape[1], block.shape[1]
    position = torch.arange(num_context + num_slots)[None]
    # The anchor sees the whole context and the block; sliding layers see earlier slots of it only.
    seen = {"full_attention": torch.ones(num_slots, num_context + num_slots, dtype=torch.bool)}
    causal = torch.ones(num_slots, num_slots).tril().bool()
    window = config.transformer_layer_config.sliding_window
    near = torch.arange(num_context) >= num_context - (window or 0)
    seen["sliding_attention"] = torch.cat([near.expand(num_slots, -1), causal], dim=1)
    with torch.no_grad():
        fused = model.hidden_norm(model.fc(taps))
        noise = hidden = model.embed_tokens(block)
        embeddings = model.rotary_emb(taps, position)
        for kind, layer in zip(config.transformer_layer_config.layer_types, model.layers, strict=True):
            mask = torch.zeros(num_slots, num_context + num_slots).masked_fill(~seen[kind], float("-inf"))[None, None]
            hidden = layer(
                hidden_states=hidden, target_hidden=fused, attention_mask=mask, position_ids=position,
                position_embeddings=embeddings,
            )  # fmt: skip
        hidden = model.norm(hidden)
        logits = model.lm_head(hidden)
    np.savez(
        outputs,
        fused_CxD=fused[0].numpy(),
        noise_KxD=noise[0].numpy(),
        hidden_KxD=hidden[0].numpy(),
        logits_KxU=logits[0].numpy(),
        d2t_U=model.d2t.numpy(),
        t2d_V=model.t2d.numpy(),
        block_size=model.block_size,
        mask_token_id=model.mask_token_id,
        aux_ids=np.array(model.target_layer_ids),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
