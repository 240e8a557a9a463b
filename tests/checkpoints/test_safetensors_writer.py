"""A written checkpoint can be read by others than its writer."""

import os
import stat

import numpy as np
from safetensors import safe_open

from dflash_jax.checkpoints.safetensors_writer import write_safetensors


def test_the_file_has_the_mode_that_the_umask_leaves(tmp_path):
    path = tmp_path / "model.safetensors"
    before = os.umask(0o022)
    try:
        write_safetensors({"a": np.arange(3, dtype=np.int64)}, path, "pt")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        np.testing.assert_array_equal(file.get_tensor("a"), [0, 1, 2])
