"""What is particular to the tokenizers and chat templates of Gemma and Qwen3.5, against transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
import transformers
from family_cases import golden_family
from safetensors.numpy import save_file
from tiny_tokenizers import byte_level, write_directory
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from dflash_jax.checkpoints.load_target import load_target
from dflash_jax.checkpoints.tokenizer import StreamDecoder, load_tokenizer
from dflash_jax.config import ConfigError

# Gemma writes the assistant as "model", refuses roles that do not alternate, and takes content as text or as parts.
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% elif message['content'] is iterable %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
# Qwen3.5 thinks unless told not to, and drops the thoughts of turns before the last question.
QWEN_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content -%}{%- if 'text' in part -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_query=messages|length - 1, searching=true) -%}
{%- for message in messages[::-1] -%}
{%- if ns.searching and message.role == 'user' -%}
{%- set ns.searching = false -%}{%- set ns.last_query = (messages|length - 1) - loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = text(message.content)|trim -%}
{%- if message.role == 'assistant' -%}
{%- set thoughts = '' -%}
{%- if message.reasoning_content is string -%}
{%- set thoughts = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thoughts = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last_query -%}
{{- '<|im_start|>assistant\\n<think>\\n' + thoughts|trim + '\\n</think>\\n\\n' + content -}}
{%- else -%}{{- '<|im_start|>assistant\\n' + content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- else -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""
CHAT = [
    {"role": "user", "content": "the cat "},
    {"role": "assistant", "content": "<think>\nthe\n</think>\n\nthing"},
    {"role": "user", "content": "in the 日"},
]


def gemma_backend() -> tokenizers.Tokenizer:
    """BPE over pieces with byte fallback; spaces are "▁", none is put in front."""
    pieces = (*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecaing.\n", "th", "the", "▁the", "▁c", "at", "▁cat")
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys((*GEMMA_SPECIAL, *pieces)))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c"), ("a", "t"), ("▁c", "at")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in GEMMA_SPECIAL])
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return backend


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    directory = tmp_path_factory.mktemp("gemma")
    return write_directory(directory, gemma_backend(), **special, chat_template=GEMMA_TEMPLATE, add_bos_token=True)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """The template lies in a file of its own, and there is no BOS at all."""
    directory = tmp_path_factory.mktemp("qwen")
    (directory / "chat_template.jinja").write_text(QWEN_TEMPLATE, encoding="utf-8")
    special = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "</s>"}
    return write_directory(directory, byte_level(), **special, add_prefix_space=False)


@pytest.mark.parametrize("text", ["the cat", " the", "the\n cat.", "日 the", ""])
def test_gemma_text(gemma, text):
    ours, theirs = load_tokenizer(gemma), transformers.AutoTokenizer.from_pretrained(gemma)
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ids[0] == ours.bos_token_id
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == text
    decoder = StreamDecoder(ours)
    assert "".join([*(decoder.push([i]) for i in ids), decoder.finish()]) == text


def test_gemma_chat(gemma):
    ours, theirs = load_tokenizer(gemma), transformers.AutoTokenizer.from_pretrained(gemma)
    ids = ours.apply_chat_template(CHAT)
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids.count(ours.bos_token_id) == 1
    text = ours.render_chat(CHAT)
    assert text.startswith("<bos><start_of_turn>user\nthe cat<end_of_turn>\n<start_of_turn>model\n")
    assert text.endswith("<start_of_turn>model\n")
    parts = [{"role": "user", "content": [{"type": "text", "text": "the cat "}]}, *CHAT[1:]]
    assert ours.apply_chat_template(parts) == ids
    # A rendered chat that is encoded as text gets no second BOS.
    assert ours.encode(text) == ids
    with pytest.raises(ConfigError, match="roles must alternate"):
        ours.apply_chat_template([{"role": "system", "content": "the"}, *CHAT])


def test_gemma_ends(gemma, tmp_path):
    """The end of a turn is no EOS of the tokenizer: only generation_config.json and config.json name it."""
    config, weights = golden_family("gemma2")
    table = "model.embed_tokens.weight"
    rows = np.resize(weights[table], (300, 32))
    directory = write_directory(tmp_path, gemma_backend(), bos_token="<bos>", eos_token="<eos>")
    save_file({**weights, table: rows}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": 300, "eos_token_id": 1}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    target = load_target(directory)
    assert target.eos_token_ids == (1, target.tokenizer.backend.token_to_id("<end_of_turn>"))


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_qwen_thinking_switch(qwen, options):
    ours, theirs = load_tokenizer(qwen), transformers.AutoTokenizer.from_pretrained(qwen)
    ids = ours.apply_chat_template(CHAT, **options)
    assert ids == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, **options)
    text = ours.render_chat(CHAT, **options)
    assert "assistant\nthing<|im_end|>" in text  # without the thoughts of an earlier turn
    assert text.endswith("<think>\n\n</think>\n\n" if options.get("enable_thinking") is False else "<think>\n")


def test_qwen_keeps_the_thoughts_of_the_last_answer(qwen):
    ours, theirs = load_tokenizer(qwen), transformers.AutoTokenizer.from_pretrained(qwen)
    for answer in (CHAT[1], {"role": "assistant", "content": "thing", "reasoning_content": "the"}):
        chat = [CHAT[0], answer]
        text = ours.render_chat(chat, add_generation_prompt=False)
        assert text == theirs.apply_chat_template(chat, tokenize=False)
        assert text.endswith("<think>\nthe\n</think>\n\nthing<|im_end|>\n")


def test_qwen_has_no_bos(qwen):
    ours = load_tokenizer(qwen)
    assert ours.bos_token_id is None
    assert ours.encode("the cat") == ours.backend.encode("the cat", add_special_tokens=False).ids
