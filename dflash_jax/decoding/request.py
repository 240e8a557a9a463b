"""What is asked of the decoder, and the checks that it can be answered."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash_jax.decoding.sampling import check_sampling_value, check_seed

MAX_STOP_IDS = 8
# Far more than any logit, little enough that a float32 sum with one is still a logit.
MAX_LOGIT_BIAS = 1000.0
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}  # and what switches each off


@dataclasses.dataclass
class Request:
    """One prompt and how to answer it.

    Attributes:
      prompt_ids: token ids, at least one.
      max_tokens: the most tokens to emit.
      temperature, top_k, top_p, min_p: sampling; temperature 0 is greedy.
      seed: of the row's own random stream; all 64 bits count.
      stop_token_ids: ids that end the answer (they are part of it).
      presence_penalty, frequency_penalty: taken off the logits of tokens that the answer holds, once or as often as
        it does; 0 is off. The prompt does not count.
      repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or answer hold; 1 is
        off.
      logit_bias: added to the logits of these token ids; -inf forbids one. `logits_rules` has the formulas.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: Sequence[int] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    def logits_rules(self) -> dict[str, Any]:
        """The fields that bend logits and are on, with their values."""
        on = {name: getattr(self, name) for name, off in PENALTIES.items() if getattr(self, name) != off}
        return on | ({"logit_bias": self.logit_bias} if self.logit_bias else {})


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
    for name in ("temperature", "top_k", "top_p", "min_p", *PENALTIES):
        check_sampling_value(name, getattr(request, name), where)
    check_logit_bias(request.logit_bias, f"logit_bias of {where}", vocab_size)
    check_seed(request.seed, where)
    if len(request.stop_token_ids) > MAX_STOP_IDS:
        raise ValueError(
            f"stop_token_ids of {where} are {len(request.stop_token_ids)} ids (the target's own ends included), "
            f"at most {MAX_STOP_IDS} are supported"
        )
    _check_ids(request.stop_token_ids, f"stop_token_ids of {where} hold", vocab_size)


def check_logit_bias(logit_bias: Any, what: str, vocab_size: int | None) -> None:
    """Checks the bias of one request; `what` says in the message what it is.

    Args:
      vocab_size: None where no target is loaded yet.

    Raises:
      ValueError: it is no mapping, an id is none of the vocabulary's, a value is out of range or no number, or no
        token is allowed.
    """
    if logit_bias is None:
        return
    if not isinstance(logit_bias, Mapping):
        raise ValueError(f"{what} is {logit_bias!r}, must be a dict {{token id: number}}, or None")
    _check_ids(logit_bias, f"{what} holds token id", vocab_size)
    for token, bias in logit_bias.items():
        number = isinstance(bias, numbers.Real) and not isinstance(bias, bool)
        if not number or not (abs(bias) <= MAX_LOGIT_BIAS or bias == -math.inf):
            raise ValueError(
                f"{what} is {bias!r} for token {token}, must be a number in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]; "
                "-inf forbids the token"
            )
    if sum(bias == -math.inf for bias in logit_bias.values()) == vocab_size:
        raise ValueError(f"{what} forbids all {vocab_size} tokens; leave one to answer with")


def _check_ids(ids: Iterable[int], what: str, vocab_size: int | None) -> None:
    for token in ids:
        if not is_whole(token) or token < 0 or (vocab_size is not None and token >= vocab_size):
            bound = "whole numbers >= 0" if vocab_size is None else f"whole numbers in [0, {vocab_size})"
            raise ValueError(f"{what} {token!r}, ids must be {bound}")
