"""Plans layouts: reads a model and its batches without values, and writes and reads plans."""
