"""Trains with SpecForge's own DFlash model, loss and optimiser: the other side of benchmarks/compare_training.py.

Started by that program; knows nothing of jax. Standard output starts with {"ready": true}; each line of standard
input is {"method": "loss"}, answered by the first batch's loss with every valid anchor, or {"method": "train",
"steps": N}, answered by the seconds of each step and the peak resident memory.
"""

import argparse
import json
import resource
import sys
import time

import torch
from safetensors.torch import load_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """SpecForge's model over cached features, a batch after another."""

    def __init__(self, arguments: argparse.Namespace):
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel
        from specforge.optimizer import BF16Optimizer

        inputs = load_file(f"{arguments.inputs}/inputs.safetensors")
        dtype = DTYPES[arguments.dtype]
        drafter = DFlashDraftModel.from_pretrained(
            f"{arguments.inputs}/drafter", attn_implementation=arguments.attention, dtype=dtype
        )
        vocabulary, size = inputs["embedding"].shape
        head = torch.nn.Linear(size, vocabulary, bias=False, dtype=dtype).requires_grad_(False)
        table = torch.nn.Embedding(vocabulary, size, dtype=dtype).requires_grad_(False)
        head.weight.copy_(inputs["head"])
        table.weight.copy_(inputs["embedding"])
        self.model = OnlineDFlashModel(
            drafter, head, table, drafter.mask_token_id, block_size=arguments.block_size,
            attention_backend=arguments.attention, num_anchors=arguments.anchors, loss_decay_gamma=4.0,
            objective_chunk_blocks=arguments.chunk_blocks,
        ).train()  # fmt: skip
        self.optimizer = BF16Optimizer(self.model, lr=1e-4, max_grad_norm=1.0, total_steps=10_000)
        rows = arguments.rows
        self.batches = [
            {
                "input_ids": inputs["tokens"][i : i + rows].long(),
                "hidden_states": inputs["taps"][i : i + rows].to(dtype),
                "loss_mask": inputs["loss_mask"][i : i + rows].float(),
            }
            for i in range(0, len(inputs["tokens"]), rows)
        ]
        self.taken = 0

    @torch.no_grad()
    def loss(self) -> dict:
        """The first batch's loss where nothing is drawn: every position that can be an anchor is one."""
        anchors, self.model.num_anchors = self.model.num_anchors, self.batches[0]["input_ids"].shape[1]
        loss, _, _ = self.model(**self.batches[0])
        self.model.num_anchors = anchors
        mask = self.batches[0]["loss_mask"] > 0
        return {"loss": loss.item(), "blocks": int((mask[:, :-1] & mask[:, 1:]).sum())}

    def train(self, steps: int) -> dict:
        """That many steps, each with its clock."""
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loss, _, _ = self.model(**self.batches[self.taken % len(self.batches)])
            loss.backward()
            self.optimizer.step()
            loss.item()
            seconds.append(time.perf_counter() - start)
            self.taken += 1
        return {"seconds": seconds, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    for name in ("inputs", "specforge", "attention"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    for name in ("rows", "anchors", "block_size", "chunk_blocks"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.specforge)
    # Libraries may print; only answers go to the pipe.
    pipe, sys.stdout = sys.stdout, sys.stderr
    torch.manual_seed(0)
    trainer = Trainer(arguments)
    print(json.dumps({"ready": True, "threads": torch.get_num_threads()}), file=pipe, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            said = trainer.loss() if question["method"] == "loss" else trainer.train(question["steps"])
        except Exception as error:  # the other side decides what a failed question means
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=pipe, flush=True)


if __name__ == "__main__":
    main()
