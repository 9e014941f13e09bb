"""Makes the process groups of a run: over gloo, over NCCL, and in tests over what stands in for them."""
