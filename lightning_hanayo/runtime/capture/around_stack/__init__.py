"""What code around the stack holds or computes, and blocks would have to see: caches, gradients, other parameters."""
