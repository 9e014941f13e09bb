"""Reads and verifies checkpoint folders."""
