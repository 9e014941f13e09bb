"""Causal language models of 8 to 405 billion parameters, each with the layouts that `hanayo plan` chooses for it."""
