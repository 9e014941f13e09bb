"""The loss of a batch that runs as micro-batches: how they are weighed, and whether the weights are right."""
