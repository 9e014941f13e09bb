"""Benchmarks that any user can run. This folder's README says what they measure, and how."""
