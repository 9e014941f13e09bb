"""3-D tensor parallelism (arXiv 2105.14450): linear layers and their neighbours, spread over a grid of ranks."""
