"""What user code computes over all parameters, of which a rank has only its own: norms of gradients, skipped steps."""
