"""Two micro-batches at once: how much of a cube's collectives hides behind the compute of another micro-batch."""
