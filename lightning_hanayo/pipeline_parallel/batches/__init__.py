"""Cuts a batch along its samples: its containers, the reader, and the plan."""
