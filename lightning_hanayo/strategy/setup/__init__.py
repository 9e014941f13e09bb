"""Builds one rank's part of a pipeline from a whole model."""
