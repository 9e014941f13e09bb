"""Benchmarks that any user can run: what they measure, and how, is in the README beside them."""
