"""dflash_jax: train DFlash drafters, and decode, serve and measure with them, losslessly."""
