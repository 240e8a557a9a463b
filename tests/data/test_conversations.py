"""Assistant masks from chat templates (B85) and the pinned rendering of prompts (B87)."""

import numpy as np
import pytest
import tiny

from dflash_jax.config import ConfigError
from dflash_jax.data import prompts
from dflash_jax.data.conversations import MaskError, check_bos, encode_conversation, encode_prompt
from dflash_jax.data.fingerprints import rendering_fingerprint
from dflash_jax.data.responses import Response, sample_of

TALK = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and\nmore?"},
    {"role": "tool", "content": "five"},
    {"role": "assistant", "content": "5, then"},
)
THINKING = (
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "<think>hm</think>4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "<think>so</think>6"},
)


def supervised(tokenizer, conversation):
    return [tokenizer.decode(conversation.ids[a:b], skip_special_tokens=False) for a, b in conversation.spans]


@pytest.mark.parametrize("template", [tiny.PLAIN, tiny.MARKED], ids=["without_marks", "with_marks"])
def test_b85_only_assistant_turns_are_supervised(template):
    tokenizer = tiny.tokenizer(template)
    conversation = encode_conversation(tokenizer, TALK, [tiny.END])
    assert supervised(tokenizer, conversation) == ["4<|im_end|>", "5, then<|im_end|>"]
    assert conversation.ids[-1] == tiny.END  # the newline behind it is nobody's
    assert conversation.ids.count(tiny.BOS) == 1 and conversation.ids[0] == tiny.BOS
    rendered = tokenizer.apply_chat_template(TALK, add_generation_prompt=False)
    assert list(conversation.ids) == rendered[: len(conversation.ids)]


def test_b85_templates_that_rewrite_earlier_turns_are_refused():
    tokenizer = tiny.tokenizer(tiny.DROPS_THINKING)
    with pytest.raises(MaskError, match="renders message 1 differently once the conversation goes on"):
        encode_conversation(tokenizer, THINKING, [tiny.END])
    # A single turn is derivable, thinking included.
    conversation = encode_conversation(tokenizer, THINKING[:2], [tiny.END])
    assert supervised(tokenizer, conversation) == ["<think>hm</think>4<|im_end|>"]


def test_b85_marks_make_a_rewriting_template_derivable():
    marked = tiny.DROPS_THINKING.replace(
        "{{ m.content.split('</think>')[-1] }}",
        "{% generation %}{{ m.content.split('</think>')[-1] }}{% endgeneration %}",
    ).replace(
        "{% else %}{{ m.content }}{% endif %}",
        "{% elif m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    tokenizer = tiny.tokenizer(marked)
    conversation = encode_conversation(tokenizer, THINKING, [tiny.END])
    assert supervised(tokenizer, conversation) == ["4<|im_end|>", "<think>so</think>6<|im_end|>"]


def test_b85_a_turn_without_end_is_refused():
    endless = tiny.PLAIN.replace("<|im_end|>\n", "{% if m.role != 'assistant' %}<|im_end|>{% endif %}\n")
    with pytest.raises(MaskError, match=r"assistant turn 0 ends with none of the end-of-turn ids \[2\]"):
        encode_conversation(tiny.tokenizer(endless), TALK[1:3], [tiny.END])


def test_b85_marks_that_miss_a_turn_are_refused():
    first_only = tiny.MARKED.replace("{% if m.role == 'assistant' %}", "{% if m.role == 'assistant' and loop.last %}")
    with pytest.raises(MaskError, match="marks 1 spans for 2 assistant turns"):
        encode_conversation(tiny.tokenizer(first_only), TALK, [tiny.END])


@pytest.mark.parametrize("cut", [5, 30, 60, 78, 1000])
def test_b85_truncation_cuts_ids_and_mask_alike(cut):
    conversation = encode_conversation(tiny.tokenizer(), TALK, [tiny.END])
    *earlier, (start, _) = conversation.spans
    response = Response(
        "r", "s", conversation.ids[:start], conversation.ids[start:], "stop", 0, "natural", tuple(earlier)
    )
    whole, sample = sample_of(response), sample_of(response, cut)
    assert len(sample.loss_mask_S) == len(sample.token_S) == sample.length == min(cut, whole.length)
    np.testing.assert_array_equal(sample.token_S, whole.token_S[:cut])
    np.testing.assert_array_equal(sample.loss_mask_S, whole.loss_mask_S[:cut])
    expected = np.zeros(whole.length, bool)
    for a, b in conversation.spans:
        expected[a:b] = True
    np.testing.assert_array_equal(whole.loss_mask_S, expected)


def test_b85_two_bos_are_refused():
    with pytest.raises(MaskError, match="begins with BOS \\(id 0\\) twice"):
        check_bos([tiny.BOS, tiny.BOS, 5], tiny.BOS)
    doubled = tiny.PLAIN.replace("{{ bos_token }}", "{{ bos_token }}{{ bos_token }}")
    with pytest.raises(MaskError, match="twice"):
        encode_prompt(tiny.tokenizer(doubled), TALK[:2])


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_b87_training_prompts_are_rendered_as_served(options):
    tokenizer = tiny.tokenizer(tiny.SWITCHED)
    ids = encode_prompt(tokenizer, TALK[:2], **options)
    assert ids == tokenizer.apply_chat_template(TALK[:2], add_generation_prompt=True, **options)
    thinks_off = options.get("enable_thinking") is False
    assert ("<think>" in tokenizer.decode(ids)) == thinks_off
    answer = "<think>\n\n</think>\n\n4" if thinks_off else "4"
    talk = (*TALK[:2], {"role": "assistant", "content": answer})
    conversation = encode_conversation(tokenizer, talk, [tiny.END], **options)
    assert list(conversation.ids[: conversation.spans[0][0]]) == ids


def test_b87_a_prompt_part_that_serving_would_not_render_is_refused():
    tokenizer = tiny.tokenizer(tiny.SWITCHED)
    with pytest.raises(MaskError, match="generation prompt"):  # serving opens with an empty thought, this text has none
        encode_conversation(tokenizer, TALK[1:3], [tiny.END], enable_thinking=False)


def test_b87_unknown_options_are_refused_and_known_ones_recorded():
    tokenizer = tiny.tokenizer(tiny.SWITCHED)
    with pytest.raises(ConfigError, match="does not read 'enable_thinkin'"):
        encode_prompt(tokenizer, TALK[:2], enable_thinkin=True)
    on, off = (rendering_fingerprint(tokenizer, {"enable_thinking": value}) for value in (True, False))
    assert on["chat_template_kwargs"] == {"enable_thinking": True}
    assert on["chat_template"] != off["chat_template"] and on["tokenizer"] == off["tokenizer"]


def test_b87_code_prompts_have_one_wording():
    """Training prompts and the benchmark go through `code_message`; a stub's blank margin is not part of it."""
    stub = 'def f(x):\n    """Do it."""'
    assert prompts.code_message(f"\n\n{stub}\n\n") == prompts.code_message(stub)
    assert prompts.code_message(stub)["content"] == prompts.CODE_INSTRUCTION.format(stub=stub)
    assert all(
        p.messages[0]["content"].startswith(prompts.CODE_INSTRUCTION.split("{stub}")[0])
        for p in prompts.load("tasks", limit=20)
    )


def test_an_answered_prompt_is_not_answered_again():
    with pytest.raises(MaskError, match="nothing to answer"):
        encode_prompt(tiny.tokenizer(), TALK[:3])
    with pytest.raises(MaskError, match="must be the assistant's"):
        encode_conversation(tiny.tokenizer(), TALK[:2], [tiny.END])
