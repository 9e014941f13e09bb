"""A small BERT on real text."""
