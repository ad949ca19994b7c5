"""The embedded generator: a small server over a transformers model, on the CPU or one GPU."""
