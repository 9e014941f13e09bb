"""Passes over a table: each checks it, or makes another table from it."""
