"""A small GPT on real text."""
