"""What is asked of the decoder, and the checks that it can be answered."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence

from dflash_jax.decoding.sampling import check_sampling_value, check_seed

MAX_STOP_IDS = 8


@dataclasses.dataclass
class Request:
    """One prompt and how to answer it.

    Attributes:
      prompt_ids: token ids, at least one.
      max_tokens: the most tokens to emit.
      temperature, top_k, top_p, min_p: sampling; temperature 0 is greedy.
      seed: of the row's own random stream; all 64 bits count.
      stop_token_ids: ids that end the answer (they are part of it).
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()


def is_whole(value: object) -> bool:
    """Whether a value is a whole number by type: 3 and numpy's 3 are, 3.0 and True are not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_request(request: Request, index: int, max_length: int, vocab_size: int) -> None:
    """Refuses what can not be decoded, before any device work.

    Raises:
      ValueError: names the prompt, the field, the value and the bound.
    """
    where = f"prompt {index}"
    if len(request.prompt_ids) == 0:
        raise ValueError(f"{where} is empty: at least one token is needed to start from")
    _check_ids(request.prompt_ids, f"{where} holds token id", vocab_size)
    if not is_whole(request.max_tokens) or request.max_tokens < 1:
        raise ValueError(f"max_tokens of {where} is {request.max_tokens!r}, must be a whole number >= 1")
    if len(request.prompt_ids) >= max_length:
        raise ValueError(
            f"{where} has {len(request.prompt_ids)} tokens, the context holds {max_length}: nothing is left to "
            "answer with; shorten the prompt or raise max_length"
        )
    for name in ("temperature", "top_k", "top_p", "min_p"):
        check_sampling_value(name, getattr(request, name), where)
    check_seed(request.seed, where)
    if len(request.stop_token_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"stop_token_ids of {where} are {len(request.stop_token_ids)} ids (the target's own ends included), "
            f"at most {MAX_STOP_IDS} are supported"
        )
    _check_ids(request.stop_token_ids, f"stop_token_ids of {where} hold", vocab_size)


def _check_ids(ids: Sequence[int], what: str, vocab_size: int) -> None:
    for token in ids:
        if not is_whole(token) or not 0 <= token < vocab_size:
            raise ValueError(f"{what} {token!r}, ids must be whole numbers in [0, {vocab_size})")
