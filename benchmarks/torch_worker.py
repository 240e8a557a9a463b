"""Answers prompts with PyTorch, one JSON line a prompt: the other side of benchmarks/compare_torch.py.

    python torch_worker.py --target=DIR --dtype=float32 [--drafter=DIR] [--threads=2]

Needs torch and transformers, for a drafter also the PyPI package `dflash`; it knows nothing of jax. TARGET and
DRAFTER are directories in Hugging Face's and z-lab's layout.

Standard output starts with {"ready": true, "versions": ...}. Each line of standard input is an object

    {"method": M, "prompt_ids": [...], "max_tokens": N, "stop_token_ids": [...]}

answered by {"token_ids", "acceptance", "first_token_s", "seconds"}, or {"error": text}. Methods:

    generate    transformers' own `generate`, greedy, with its dynamic cache
    loop        the model's forward pass in a loop as short as Python allows, same cache
    dflash-K    the reference implementation of DFlash at block size K
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FirstTokenClock(BaseStreamer):
    """Notes when the first new token came. `generate` hands over the prompt first, then token by token."""

    def __init__(self) -> None:
        self.calls = 0
        self.first = 0.0

    def put(self, value: torch.Tensor) -> None:
        del value
        self.calls += 1
        if self.calls == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


class Answers:
    """The methods over one pair of models."""

    def __init__(self, target_directory: str, drafter_directory: str | None, dtype: torch.dtype):
        self.target = AutoModelForCausalLM.from_pretrained(target_directory, dtype=dtype).eval()
        # What generate would otherwise take from the checkpoint; the caller says when an answer ends.
        self.target.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
        self.drafter = None
        if drafter_directory is not None:
            self.drafter, self.dflash_generate = load_drafter(drafter_directory, dtype)

    def answer(self, method: str, prompt_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> dict:
        """One answer with its clock."""
        run, options = self._method(method)
        prompt = torch.tensor([list(prompt_ids)])
        start = time.perf_counter()
        token_ids, acceptance, first = run(prompt, max_tokens, list(stop_ids), **options)
        end = time.perf_counter()
        return {
            "token_ids": token_ids,
            "acceptance": acceptance,
            "first_token_s": first - start,
            "seconds": end - start,
        }

    def _method(self, method: str) -> tuple[Callable, dict[str, Any]]:
        if method == "generate":
            return self._generate, {}
        if method == "loop":
            return self._loop, {}
        name, _, size = method.partition("-")
        if name == "dflash" and size.isdigit():
            if self.drafter is None:
                raise ValueError(f"method {method!r} needs a drafter; start the worker with --drafter")
            return self._dflash, {"block_size": int(size)}
        raise ValueError(f"method {method!r} is unknown; known are generate, loop and dflash-K")

    @torch.inference_mode()
    def _generate(self, prompt, max_tokens, stop_ids):
        clock = FirstTokenClock()
        ids = self.target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            eos_token_id=stop_ids or None,
            streamer=clock,
        )[0, prompt.shape[1] :].tolist()
        return ids, [1] * (len(ids) - 1), clock.first

    @torch.inference_mode()
    def _loop(self, prompt, max_tokens, stop_ids):
        cache = DynamicCache(config=self.target.config)
        out = self.target(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        ids = [token.item()]
        first = time.perf_counter()
        while len(ids) < max_tokens and ids[-1] not in stop_ids:
            out = self.target(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            ids.append(token.item())
        return ids, [1] * (len(ids) - 1), first

    def _dflash(self, prompt, max_tokens, stop_ids, block_size):
        import dflash.model

        moments = []

        def now() -> float:
            moments.append(time.perf_counter())
            return moments[-1]

        # The reference synchronises CUDA around its clock. Its second reading is right after the first token.
        dflash.model._cuda_time = now
        result = self.dflash_generate(
            self.drafter, self.target, prompt, max_tokens, stop_ids or None, block_size=block_size, return_stats=True
        )
        return result.output_ids[0, prompt.shape[1] :].tolist(), result.acceptance_lengths, moments[1]


def load_drafter(directory: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Callable]:
    """(drafter, dflash_generate) of the reference; refuses weights that do not match by name."""
    from dflash.model import DFlashDraftModel, dflash_generate

    model, info = DFlashDraftModel.from_pretrained(
        directory, attn_implementation="sdpa", dtype=dtype, output_loading_info=True
    )
    wrong = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if any(wrong.values()):
        raise ValueError(f"{directory} does not fit the reference: {wrong}")
    return model.eval(), dflash_generate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--threads", type=int, help="of torch; its own choice where not given")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    # Libraries may print; only answers go to the pipe.
    pipe, sys.stdout = sys.stdout, sys.stderr
    answers = Answers(arguments.target, arguments.drafter, DTYPES[arguments.dtype])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"ready": True, "versions": versions, "threads": torch.get_num_threads()}), file=pipe, flush=True)
    for line in sys.stdin:
        try:
            question = json.loads(line)
            said = answers.answer(
                question["method"], question["prompt_ids"], question["max_tokens"], question["stop_token_ids"]
            )
        except Exception as error:  # the other side decides what a failed question means
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=pipe, flush=True)


if __name__ == "__main__":
    main()
