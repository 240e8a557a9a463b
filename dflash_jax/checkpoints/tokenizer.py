"""The one tokenizer class: text to ids and back, chat rendering, and text for streams."""

from __future__ import annotations

import codecs
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from dflash_jax.checkpoints.chat_template import ChatTemplate
from dflash_jax.checkpoints.json_files import read_json
from dflash_jax.checkpoints.token_bytes import TokenBytes
from dflash_jax.config import ConfigError

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A `tokenizers.Tokenizer` with its special tokens and its chat template.

    Args:
      backend: the tokenizer proper. It is encoded with and decoded from here only.
      bos_token, eos_token, pad_token, unk_token: texts of special tokens, each in the vocabulary, or None.
      chat_template: Jinja source, or None.
      add_bos, add_eos: whether plain text gets them; None leaves it to the backend's post-processor.

    Raises:
      ConfigError: a special token is not in the vocabulary, the template is no valid Jinja, or the decoder is
        not supported.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        unk_token: str | None = None,
        chat_template: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ):
        self.backend = backend
        self.special_tokens = {
            role: text
            for role, text in zip(_ROLES, (bos_token, eos_token, pad_token, unk_token), strict=True)
            if text is not None
        }
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        pad = self._id_of("pad_token")
        self.pad_token_id = self.eos_token_id if pad is None else pad
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        self.add_bos, self.add_eos = add_bos, add_eos
        added = backend.get_added_tokens_decoder()
        roles = [self._id_of(role) for role in self.special_tokens]
        self.special_ids = frozenset([i for i, token in added.items() if token.special] + roles)
        self.token_bytes = TokenBytes(backend, self.special_ids)

    def _id_of(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        if text is None:
            return None
        token_id = self.backend.token_to_id(text)
        if token_id is None:
            raise ConfigError(f"{role} is {text!r}, which is not in the tokenizer's vocabulary")
        return token_id

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The model's table may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def max_token_id(self) -> int:
        """The largest id of any token; -1 of an empty vocabulary."""
        return len(self.token_bytes) - 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of plain text.

        With `add_special_tokens`, BOS and EOS are added as the checkpoint says; never a second BOS where the
        text, such as a rendered chat, starts with one already.
        """
        by_backend = add_special_tokens and self.add_bos is None and self.add_eos is None
        ids = self.backend.encode(text, add_special_tokens=by_backend).ids
        if add_special_tokens and not by_backend:
            if self.add_bos and self.bos_token_id is not None:
                ids = [self.bos_token_id, *ids]
            if self.add_eos and self.eos_token_id is not None:
                ids = [*ids, self.eos_token_id]
        if add_special_tokens and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            ids = ids[1:]
        return list(ids)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD, one for each maximal ill-formed part."""
        text = self.token_bytes.join(ids, skip_special_tokens).decode("utf-8", errors="replace")
        return text[1:] if self.token_bytes.strips_leading_space and text.startswith(" ") else text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Ids of a conversation; `options` go to the template and are refused if it does not read them.

        The template is responsible for BOS (no special token is added to what it renders).

        Raises:
          ConfigError: there is no template, an option is unknown, or the template refuses the messages.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, **options), add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The text that `apply_chat_template` encodes."""
        return self.require_chat_template().render(messages, add_generation_prompt, **options).text

    def require_chat_template(self) -> ChatTemplate:
        """The chat template.

        Raises:
          ConfigError: the checkpoint has none.
        """
        if self.chat_template is None:
            raise ConfigError(
                "the checkpoint has no chat template (neither chat_template.jinja nor chat_template in "
                "tokenizer_config.json); pass plain text or ids instead of messages"
            )
        return self.chat_template


class StreamDecoder:
    """Text of a growing id sequence, in pieces: the joined pieces equal `tokenizer.decode` of all ids.

    A character is given out when its last byte has come; blocks of any sizes give the same text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = tokenizer.token_bytes.strips_leading_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that the ids complete, maybe none."""
        return self._strip(self._utf8.decode(self._token_bytes.join(ids, self._skip)))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut off, else nothing."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not text or not self._strip_next:
            return text
        self._strip_next = False
        return text[1:] if text.startswith(" ") else text


def load_tokenizer(directory: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory: tokenizer.json, tokenizer_config.json, chat_template.jinja.

    Raises:
      ConfigError: tokenizer.json is missing or broken, or a special token is not in it.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json") if (directory / name).is_file()]
        found = f"only {' and '.join(others)}" if others else "no tokenizer files"
        raise ConfigError(
            f"{directory} has no tokenizer.json ({found}); make one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path} can not be read by tokenizers {tokenizers.__version__}: {error}") from error
    # Files may ask for padding or truncation of training batches; neither belongs into a prompt.
    backend.no_padding()
    backend.no_truncation()
    config = read_json(directory / "tokenizer_config.json")
    special = {**read_json(directory / "special_tokens_map.json"), **config}
    return Tokenizer(
        backend,
        **{role: _token_text(special.get(role), role) for role in _ROLES},
        chat_template=_chat_template(directory, config),
        add_bos=config.get("add_bos_token"),
        add_eos=config.get("add_eos_token"),
    )


def _token_text(value: Any, role: str) -> str | None:
    """A special token is stored as text or as an object with its text under `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{role} is {value!r}, expected a text")
    return text


def _chat_template(directory: pathlib.Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json: a text, or named templates.

    Of several named ones `default` is taken.
    """
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    value = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    if isinstance(value, Mapping):
        if "default" not in value:
            raise ConfigError(f"chat_template has {', '.join(sorted(value))} but no template named 'default'")
        value = value["default"]
    return value
