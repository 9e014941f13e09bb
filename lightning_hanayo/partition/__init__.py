"""The partition: finds a model's stack of blocks, cuts it into stages, and leaves out what other ranks own."""
