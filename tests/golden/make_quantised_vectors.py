"""Makes quantised.npz: FP8 and MXFP4 tensors and what transformers dequantises them to.

    python tests/golden/make_quantised_vectors.py        (needs torch and transformers: dflash_jax[parity])

`fp8` [24, 32] bytes of float8_e4m3fn, `fp8_scale` [6, 4] (blocks of 4 x 8) and `fp8_out` float32; `blocks`
[2, 6, 3, 16] and `scales` [2, 6, 3] bytes, and `mxfp4_out` [2, 96, 6] float32.
"""

import pathlib

import numpy as np
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def main() -> None:
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    generator = torch.Generator().manual_seed(0)
    fp8 = (100 * torch.randn(24, 32, generator=generator)).to(torch.float8_e4m3fn)
    fp8_scale = torch.rand(6, 4, generator=generator) * 1e-2
    blocks = torch.randint(256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 135, (2, 6, 3), generator=generator, dtype=torch.uint8)
    arrays = {
        "fp8": fp8.view(torch.uint8),
        "fp8_scale": fp8_scale,
        "fp8_out": Fp8Dequantize(None)._dequantize_one(fp8, fp8_scale, torch.float32),
        "blocks": blocks,
        "scales": scales,
        "mxfp4_out": convert_moe_packed_tensors(blocks, scales, dtype=torch.float32),
    }
    path = pathlib.Path(__file__).parent / "quantised.npz"
    np.savez_compressed(path, **{key: value.numpy() for key, value in arrays.items()})
    print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
