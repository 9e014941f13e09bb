"""Two micro-batches at once on one rank: the collectives of one hide behind the compute of the other."""
