"""The same Transformer layer, parallelized in one, two and three dimensions."""
