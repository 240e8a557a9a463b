"""The tokenizer class against transformers, streaming, BOS and chat templates."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers
import transformers
from tiny_tokenizers import CHATML, CORPUS, adds_bos, byte_level, sentence_piece_json, write_directory
from tokenizers import decoders, models

from dflash_jax.checkpoints.placement import CheckpointError
from dflash_jax.checkpoints.token_bytes import byte_alphabet
from dflash_jax.checkpoints.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from dflash_jax.config import ConfigError

HARD_TEXT = "naïve 日本語 👩‍👩‍👧 ďábel"
SPECIAL = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
CHAT = [{"role": "user", "content": "What is 日本語?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(byte_level(), **SPECIAL, chat_template=CHATML)


@pytest.fixture(scope="module")
def sp_tokenizer():
    return Tokenizer(sentence_piece_json(), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def streamed(tokenizer: Tokenizer, ids: list[int], rng: random.Random) -> list[str]:
    """Deltas of a random partition into blocks of 0 to 5 ids, and the final one."""
    decoder, deltas, start = StreamDecoder(tokenizer), [], 0
    while start < len(ids):
        size = rng.randint(0, 5)
        deltas.append(decoder.push(ids[start : start + size]))
        start += size
    return [*deltas, decoder.finish()]


def test_byte_alphabet_is_that_of_the_library():
    backend = tokenizers.Tokenizer(models.WordLevel({}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    for text in ("\x00\n ~\x7f", HARD_TEXT, "".join(map(chr, range(0x80, 0x800)))):
        stand_ins = "".join(piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text))
        assert bytes(alphabet[c] for c in stand_ins) == text.encode("utf-8")


@pytest.mark.parametrize(
    "text", [*CORPUS[:3], HARD_TEXT, "", " leading", "trailing ", "<|im_start|>user\nHi<|im_end|>"]
)
def test_decode_equals_the_library(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == tokenizer.backend.encode(text).ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["the cat", " the  cat.", "日 the", "thing\nthe", "a"])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_decode_equals_the_library(text, prefix):
    tokenizer = Tokenizer(sentence_piece_json(prefix))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == text


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer):
    """Tables are padded; a model may draw a padding row."""
    ids = tokenizer.encode("cat")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, tokenizer.vocab_size + 7]) == "cat"


def test_b60_any_partition_streams_the_same_text(tokenizer, sp_tokenizer):
    rng = random.Random(60)
    for case in (tokenizer, sp_tokenizer):
        ids = case.encode(HARD_TEXT)
        assert len(ids) > len(HARD_TEXT.split())
        for _ in range(50):
            deltas = streamed(case, ids, rng)
            assert "".join(deltas) == case.decode(ids) == HARD_TEXT
            assert not any("\ufffd" in delta for delta in deltas)
            assert deltas[-1] == ""


def test_b60_invalid_byte_then_space(tokenizer):
    by_byte = {byte: tokenizer.backend.token_to_id(c) for c, byte in byte_alphabet().items()}
    ids = [by_byte[0xE6], by_byte[ord(" ")]]
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push([ids[0]]), decoder.push([ids[1]]), decoder.finish()] == ["", "\ufffd ", ""]
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "\ufffd "


@pytest.mark.parametrize("cut", [1, 2])
def test_b60_end_inside_a_character(tokenizer, cut):
    """Streaming and not streaming flush alike."""
    by_byte = {byte: tokenizer.backend.token_to_id(c) for c, byte in byte_alphabet().items()}
    ids = [*tokenizer.encode("ab"), *(by_byte[byte] for byte in "日".encode()[:cut])]
    decoder = StreamDecoder(tokenizer)
    deltas = [decoder.push(ids), decoder.finish()]
    assert deltas == ["ab", "\ufffd"]
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids) == "ab\ufffd"


def test_b60_leading_spaces_stay_between_blocks(sp_tokenizer):
    ids = sp_tokenizer.encode("the cat the cat")
    decoder = StreamDecoder(sp_tokenizer)
    assert [decoder.push([i]) for i in ids] == ["the", " cat", " the", " cat"]


def test_b60_special_tokens_do_not_disturb(sp_tokenizer):
    """The first word loses its space even behind BOS, and no later one does."""
    bos = sp_tokenizer.bos_token_id
    ids = [bos, *sp_tokenizer.encode("the cat"), bos, *sp_tokenizer.encode("the")]
    rng = random.Random(1)
    for _ in range(10):
        assert "".join(streamed(sp_tokenizer, ids, rng)) == sp_tokenizer.decode(ids) == "the cat the"


def test_word_level_tokenizer_without_decoder():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a b a")
    assert tokenizer.decode(ids) == backend.decode(ids) == "a b a"


def test_unknown_decoder_is_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(backend)


# Exactly one BOS.


def test_bos_is_added_once(tmp_path):
    directory = write_directory(tmp_path, adds_bos(byte_level()), **SPECIAL)
    tokenizer, reference = load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    bos = tokenizer.bos_token_id
    ids = tokenizer.encode("the cat")
    assert ids == reference.encode("the cat") and ids.count(bos) == 1
    # A chat that was rendered by hand has its BOS already.
    assert tokenizer.encode("<s>the cat") == ids
    assert tokenizer.encode("the cat", add_special_tokens=False) == ids[1:]
    assert tokenizer.encode("") == [bos]


def test_bos_of_a_chat_template_is_not_doubled(tmp_path):
    template = "{{ bos_token }}" + CHATML
    directory = write_directory(tmp_path, adds_bos(byte_level()), **SPECIAL, chat_template=template)
    tokenizer, reference = load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(CHAT)
    assert ids == reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.encode(tokenizer.render_chat(CHAT)) == ids


def test_add_bos_token_of_the_configuration_decides(tmp_path):
    """The post-processor of tokenizer.json adds one; the configuration says not to."""
    directory = write_directory(tmp_path, adds_bos(byte_level()), **SPECIAL, add_bos_token=False)
    tokenizer = load_tokenizer(directory)
    plain = tokenizer.backend.encode("cat", add_special_tokens=False).ids
    assert tokenizer.encode("cat") == plain
    both = Tokenizer(byte_level(), **SPECIAL, add_bos=True, add_eos=True)
    assert both.encode("cat") == [both.bos_token_id, *plain, both.eos_token_id]


# Files.


def test_directory_against_transformers(tmp_path):
    config = {"chat_template": CHATML, **SPECIAL, "pad_token": {"__type": "AddedToken", "content": "</s>"}}
    directory = write_directory(tmp_path, byte_level(), **config)
    tokenizer, reference = load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for role in ("bos", "eos", "pad"):
        assert getattr(tokenizer, f"{role}_token_id") == getattr(reference, f"{role}_token_id")
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.special_ids == {i for i, token in reference.added_tokens_decoder.items() if token.special}
    for text in (*CORPUS[:3], HARD_TEXT):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        with_special = [tokenizer.eos_token_id, *ids]
        assert tokenizer.decode(with_special) == reference.decode(with_special, skip_special_tokens=True) == text


def test_b10_padding_falls_back_to_one_id(tokenizer):
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert isinstance(tokenizer.pad_token_id, int)


@pytest.mark.parametrize(
    ("field", "files"),
    [
        (None, {"chat_template.jinja": CHATML}),
        (None, {"chat_template.json": json.dumps({"chat_template": CHATML})}),
        ([{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}], {}),
        ({"tool_use": "no", "default": CHATML}, {}),
        ("overruled", {"chat_template.jinja": CHATML}),
    ],
)
def test_places_of_the_chat_template(tmp_path, field, files):
    directory = write_directory(tmp_path, byte_level(), chat_template=field, **SPECIAL)
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    assert load_tokenizer(directory).chat_template.source == CHATML


def test_templates_without_a_default_are_refused(tmp_path):
    directory = write_directory(tmp_path, byte_level(), chat_template={"tool_use": "x"})
    with pytest.raises(ConfigError, match="default"):
        load_tokenizer(directory)


def test_padding_and_truncation_in_the_file_are_dropped(tmp_path):
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = load_tokenizer(write_directory(tmp_path, backend))
    text = "the cat sat on the mat"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ConfigError, match=r"only tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="can not be read"):
        load_tokenizer(tmp_path)
    write_directory(tmp_path, byte_level(), eos_token="<nowhere>")
    with pytest.raises(ConfigError, match=r"eos_token is '<nowhere>'"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is no valid JSON"):
        load_tokenizer(tmp_path)


# Chat templates.


@pytest.mark.parametrize("options", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
def test_b87_rendering_equals_hugging_face(tmp_path, options):
    directory = write_directory(tmp_path, byte_level(), chat_template=CHATML, **SPECIAL)
    tokenizer, reference = load_tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(CHAT, **options)
    assert ids == reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, **options)
    assert ("<think>" in tokenizer.decode(ids)) == (options == {"enable_thinking": False})


def test_b87_unknown_options_are_refused(tokenizer):
    assert tokenizer.chat_template.options == {"enable_thinking"}
    with pytest.raises(ConfigError, match=r"does not read 'thinking'.*enable_thinking"):
        tokenizer.apply_chat_template(CHAT, thinking=True)


def rendered_by_hugging_face(source: str, messages: list, **options) -> str:
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), **SPECIAL, chat_template=source)
    return reference.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("{% if tools is not none %}has tools{% else %}none{% endif %}", {}),
        ("{{ tools | tojson(indent=2) }}", {"tools": [{"type": "function", "function": {"name": "f<>&'é"}}]}),
        ("{% for m in messages %}\n    {% if loop.first %}{% continue %}{% endif %}\n{{ m.content }}{% endfor %}", {}),
        ("{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ nothing }}", {}),
        (
            "  {%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}\n{{ ns.n }}",
            {},
        ),
    ],
)
def test_jinja_dialect_is_that_of_hugging_face(source, options):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    tokenizer = Tokenizer(byte_level(), **SPECIAL, chat_template=source)
    found = tokenizer.chat_template.render(messages, **options).text
    assert found == rendered_by_hugging_face(source, messages, **options)


def test_generation_marks_give_spans_and_no_text():
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    messages = [
        {"role": r, "content": c} for r, c in (("user", "q"), ("assistant", "aé"), ("user", ""), ("assistant", ""))
    ]
    template = Tokenizer(byte_level(), chat_template=source).chat_template
    rendered = template.render(messages)
    assert template.marks_generation
    assert rendered.text == "<user>q<assistant>aé!<user><assistant>!"
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["aé!", "!"]
    assert not Tokenizer(byte_level(), chat_template=CHATML).chat_template.marks_generation


def test_errors_of_templates_are_ours(tokenizer):
    with pytest.raises(ConfigError, match="no valid Jinja"):
        Tokenizer(byte_level(), chat_template="{% if %}")
    refusing = Tokenizer(byte_level(), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="roles must alternate"):
        refusing.apply_chat_template(CHAT)
    with pytest.raises(ConfigError, match="can not render"):
        tokenizer.apply_chat_template([{"role": "user"}])
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(byte_level()).apply_chat_template(CHAT)


def test_templates_run_in_a_sandbox():
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="can not render"):
        Tokenizer(byte_level(), chat_template=escape).apply_chat_template(CHAT)
