"""A tokenizer of single bytes with chat tokens, and a target of three small layers."""

import dataclasses

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dflash_jax.checkpoints.tokenizer import Tokenizer
from dflash_jax.config import RopeConfig, TargetConfig
from dflash_jax.data.responses import Sample
from dflash_jax.models.target import Target, random_target

SPECIAL = ("<bos>", "<|im_start|>", "<|im_end|>")
BOS, START, END = range(3)

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_THINKING = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def tokenizer(template: str = PLAIN) -> Tokenizer:
    """One token a byte, the special tokens at ids 0, 1, 2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate((*SPECIAL, *alphabet))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    return Tokenizer(backend, bos_token="<bos>", eos_token="<|im_end|>", chat_template=template)


CONFIG = TargetConfig(
    family="llama", vocab_size=259, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=8, rms_norm_eps=1e-5, rope=RopeConfig(), max_positions=256, layer_types=("full_attention",) * 3,
    tie_embeddings=True,
)  # fmt: skip


def target(seed: int = 0, template: str = PLAIN) -> Target:
    return dataclasses.replace(
        random_target(CONFIG, seed), tokenizer=tokenizer(template), eos_token_ids=(END,), source=f"tiny:{seed}"
    )


def ending_often() -> Target:
    """A target whose answers end by themselves now and then, so that second turns come to be."""
    ending = target()
    table = ending.params["embedding_VxD"]
    ending.params["embedding_VxD"] = table.replace(table.get_value().at[END].mul(200.0))
    return ending


def samples(count: int, longest: int = 40, seed: int = 0) -> list[Sample]:
    """Random samples; the first three tokens of each are its prompt."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        length = int(rng.integers(5, longest + 1))
        token_S = rng.integers(3, CONFIG.vocab_size, length).astype(np.int32)
        made.append(Sample(f"s{i}", token_S, np.arange(length) >= 3))
    return made
