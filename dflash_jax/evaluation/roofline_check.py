"""The roofline against published measurements of DFlash: python -m dflash_jax.evaluation.roofline_check

Prints, for each measurement, the speedup that `roofline` foretells from chip, precision, tau and concurrency beside
the one that was measured. Three predictions:

bare     the roofline alone
layers   a fixed time a layer besides: the median of what the published rates of *plain* decoding leave over
engine   a fixed time a round, and one a row of a round, besides, on a line through the first series (Qwen3-4B,
         MATH500): what its engine did between the calls. All other series are foretold.

Sources: Chen et al. 2026 (arXiv 2602.06036), the paper; a post of LMSYS, Modal and Z Lab of 2026-06-15; issues of
sgl-project/sglang by number. None says how long the contexts were: 1024 tokens are assumed (`--context`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflash_jax.checkpoints.architecture import read_architectures
from dflash_jax.config import DrafterConfig, TargetConfig
from dflash_jax.evaluation.roofline import CHIPS, Load, Placement, round_work, seconds


def _qwen3(hidden: int, inner: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def _qwen35(hidden: int, layers: int, heads: int, kv_heads: int, value_heads: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 256, "rms_norm_eps": 1e-6,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


# The published config.json as far as sizes go.
TARGETS = {
    "Qwen3-4B": _qwen3(2560, 9728, 36, tie_word_embeddings=True),
    "Qwen3-8B": _qwen3(4096, 12288, 36),
    "Qwen3-Coder-30B-A3B": _qwen3(
        2048, 6144, 48, model_type="qwen3_moe", num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "Llama-3.1-8B": _qwen3(4096, 14336, 32, model_type="llama", vocab_size=128256),
    "Qwen3.5-27B": _qwen35(5120, 64, 24, 4, 48, intermediate_size=17408),
    "Qwen3.5-397B-A17B": _qwen35(
        4096, 60, 32, 2, 64, model_type="qwen3_5_moe_text", num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=1024, shared_expert_intermediate_size=1024,
    ),
}  # fmt: skip
# Width of the drafter's MLP; layers; block. The others follow the target or the format (32 heads, 8 of them KV).
DRAFTERS = {
    "Qwen3-4B": (9728, 5, 16),
    "Qwen3-8B": (12288, 5, 16),
    "Qwen3-Coder-30B-A3B": (6144, 8, 16),
    "Llama-3.1-8B": (14336, 5, 10),
    "Qwen3.5-27B": (17408, 5, 16),
    "Qwen3.5-397B-A17B": (12288, 5, 16),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    """One published number.

    Attributes:
      devices: of the chip, tensor parallel.
      rows: concurrent requests.
      tau: as published with it; None where it was not.
      speedup: of tokens a second against plain decoding.
      plain_rate: tokens a second of plain decoding, all rows together; None where it was not published.
      note: what to know of it.
    """

    target: str
    chip: str
    devices: int
    task: str
    rows: int
    tau: float | None
    speedup: float
    source: str
    plain_rate: float | None = None
    note: str = ""


def _series(target: str, task: str, tau: float, speedups: tuple[float, ...], rates: Mapping[int, float] | None = None):
    for rows, factor in zip((1, 4, 8, 16, 32), speedups, strict=True):
        yield Measured(target, "b200", 1, task, rows, tau, factor, "paper", (rates or {}).get(rows))


MEASURED = (
    *_series("Qwen3-4B", "MATH500", 8.01, (4.8, 4.3, 4.1, 3.5, 2.9), {1: 316, 32: 7136}),
    *_series("Qwen3-4B", "HumanEval", 6.63, (4.0, 3.6, 3.2, 2.7, 2.2)),
    *_series("Qwen3-8B", "MATH500", 8.01, (5.1, 4.5, 4.5, 3.9, 2.8), {1: 230}),
    *_series("Qwen3-8B", "HumanEval", 6.50, (4.2, 3.6, 3.6, 3.0, 2.4)),
    *_series("Qwen3-Coder-30B-A3B", "HumanEval", 8.09, (3.5, 3.0, 3.2, 3.2, 3.1)),
    *_series("Llama-3.1-8B", "GSM8K", 4.32, (2.4, 2.2, 2.1, 1.8, 1.6)),
    Measured(
        "Qwen3-8B", "b200", 1, "GSM8K", 1, 6.35, 845.98 / 230, "#23000, v1", note="plain rate: the paper's, of MATH500"
    ),
    Measured(
        "Qwen3-8B", "b200", 1, "GSM8K", 1, 6.35, 1161.88 / 230, "#23000, v2", note="the same with host and device "
        "overlapped"
    ),
    Measured("Qwen3.5-27B", "h100", 4, "not said", 1, 3.2, 2.0, "#19952", note="tau 'about 3.2'"),
    Measured("Qwen3.5-27B", "h100", 4, "not said", 8, 3.2, 1.89, "#19952", note="concurrency '4(8)'"),
    Measured("Qwen3.5-27B", "h100", 4, "not said", 32, 3.2, 1.14, "#19952"),
    Measured("Qwen3.5-397B-A17B", "b200", 8, "HumanEval", 1, None, 874.6 / 202.9, "LMSYS post", 202.9),
)  # fmt: skip

FITTED = 5  # the first series


@dataclasses.dataclass(frozen=True)
class Extra:
    """Seconds beyond the roofline: a layer of any call, a round of a drafter, a row of such a round."""

    a_layer: float = 0.0
    a_round: float = 0.0
    a_row: float = 0.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one measurement.

    Attributes:
      plain_seconds, round_seconds: the bare roofline.
      layers: (of the target, of target and drafter): how often the fixed time is paid without and with a drafter.
    """

    measured: Measured
    plain_seconds: float
    round_seconds: float
    layers: tuple[int, int]

    def times(self, extra: Extra) -> tuple[float, float]:
        """Seconds of a plain step and of a round."""
        plain, both = self.layers
        engine = extra.a_round + extra.a_row * self.measured.rows
        return self.plain_seconds + plain * extra.a_layer, self.round_seconds + both * extra.a_layer + engine

    def ratio(self, extra: Extra) -> float:
        """How much longer a round takes than a plain step."""
        plain, block = self.times(extra)
        return block / plain

    def speedup(self, extra: Extra) -> float | None:
        return None if self.measured.tau is None else self.measured.tau / self.ratio(extra)

    def left_over(self) -> float | None:
        """Seconds a layer that plain decoding took longer than its roofline; None where its rate is not known."""
        if self.measured.plain_rate is None:
            return None
        return (self.measured.rows / self.measured.plain_rate - self.plain_seconds) / self.layers[0]


def architectures(name: str) -> tuple[TargetConfig, DrafterConfig]:
    """Of a key of TARGETS, with its drafter's."""
    hf = TARGETS[name]
    inner, layers, block = DRAFTERS[name]
    drafter = {
        "hidden_size": hf["hidden_size"], "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "vocab_size": hf["vocab_size"], "max_position_embeddings": 4096, "block_size": block,
        "dflash_config": {"mask_token_id": 0},
    }  # fmt: skip
    return read_architectures(name, hf, "", drafter)


def predict(measured: Measured, context: int) -> Prediction:
    """The bare roofline of a measurement's round, and of the plain step beside it."""
    target, drafter = architectures(measured.target)
    chip, placement = CHIPS[measured.chip], Placement(parts=measured.devices)
    plain = round_work(target, None, Load(measured.rows, 1, context), placement)
    block = round_work(target, drafter, Load(measured.rows, drafter.block_size, context), placement)
    return Prediction(measured, seconds(plain, chip), seconds(block, chip), (plain.layers, block.layers))


def typical_layer_seconds(predictions: list[Prediction]) -> float:
    """The median of what plain decoding left over."""
    return statistics.median(x for p in predictions if (x := p.left_over()) is not None)


def engine_time(predictions: list[Prediction], layer_seconds: float) -> Extra:
    """The line through what a series' rounds took longer than roofline and layers, over its rows."""
    extra = Extra(layer_seconds)
    longer = []
    for prediction in predictions:
        plain, block = prediction.times(extra)
        longer.append(prediction.measured.tau * plain / prediction.measured.speedup - block)
    a_row, a_round = np.polyfit([p.measured.rows for p in predictions], longer, 1)
    return Extra(layer_seconds, float(a_round), float(a_row))


def lines(predictions: list[Prediction], extras: Sequence[Extra]) -> Iterator[str]:
    """The table, in Markdown."""
    yield "| target | on | task | rows | tau | measured | bare | error | layers | error | engine | error | source |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for prediction in predictions:
        m = prediction.measured
        cells = [m.target, f"{m.devices} x {m.chip}", m.task, str(m.rows), f"{m.tau or '?'}", f"{m.speedup:.2f}x"]
        for extra in extras:
            foretold = prediction.speedup(extra)
            if foretold is None:
                cells += [f"tau / {prediction.ratio(extra):.2f}", ""]
            else:
                cells += [f"{foretold:.2f}x", f"{100 * (foretold / m.speedup - 1):+.0f} %"]
        yield "| " + " | ".join([*cells, m.source]) + " |"


def summary(predictions: list[Prediction], extra: Extra) -> str:
    """The typical factor between prediction and measurement, over those with a tau."""
    logs = [math.log(s / p.measured.speedup) for p in predictions if (s := p.speedup(extra)) is not None]
    typical = math.exp(statistics.median(abs(x) for x in logs))
    worst = math.exp(max(logs, key=abs))
    return f"median factor {typical:.2f}, worst {worst:.2f}, geometric mean {math.exp(statistics.fmean(logs)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--context", type=int, default=1024, help="tokens of context of each row")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    predictions = [predict(measured, arguments.context) for measured in MEASURED]
    layer_seconds = typical_layer_seconds(predictions)
    first, others = predictions[:FITTED], predictions[FITTED:]
    extras = {"bare": Extra(), "layers": Extra(layer_seconds), "engine": engine_time(first, layer_seconds)}
    left = [(p.measured, x) for p in predictions if (x := p.left_over()) is not None]
    print(
        "Plain decoding beyond its roofline, microseconds a layer: "
        + ", ".join(f"{m.target} at {m.rows} rows {1e6 * x:.0f}" for m, x in left)
        + f"; median {1e6 * layer_seconds:.0f}. Engine: {1e3 * extras['engine'].a_round:.2f} ms a round and "
        f"{1e3 * extras['engine'].a_row:.2f} ms a row.\n"
    )
    print("\n".join(lines(predictions, list(extras.values()))))
    print(f"\nWithout the first {FITTED} lines:")
    for name, extra in extras.items():
        print(f"- {name}: {summary(others, extra)}")
    for p in (p for p in predictions if p.measured.tau is None):
        taus = ", ".join(f"{p.measured.speedup * p.ratio(extra):.1f} ({name})" for name, extra in extras.items())
        print(f"- {p.measured.target}: no tau was published; {p.measured.speedup:.2f}x needs tau = {taus}")


if __name__ == "__main__":
    main()
