"""Makes sampling.npz: warped probabilities of the reference implementation (packages `dflash` 0.1.0 and torch).

    python tests/golden/make_sampling.py

Keys: logits [2, 3, 96]; probs_t{temperature}_p{top_p}_k{top_k}, of the same shape.
"""

import itertools
import pathlib

import numpy as np
import torch
from dflash.model import _sampling_probs


def main() -> None:
    logits = (np.random.default_rng(20).normal(size=(2, 3, 96)) * 3).astype(np.float32)
    arrays = {"logits": logits}
    for temperature, top_p, top_k in itertools.product((0.3, 1.0, 1.7), (0.4, 0.9, 1.0), (0, 1, 12)):
        probs = _sampling_probs(torch.from_numpy(logits), temperature, top_p, top_k)
        arrays[f"probs_t{temperature}_p{top_p}_k{top_k}"] = probs.numpy()
    np.savez_compressed(pathlib.Path(__file__).parent / "sampling.npz", **arrays)


if __name__ == "__main__":
    main()
