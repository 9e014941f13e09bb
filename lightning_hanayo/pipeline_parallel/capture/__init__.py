"""Captures the user's step at the block stack: suspends it there, and resumes it with the stack's output."""
