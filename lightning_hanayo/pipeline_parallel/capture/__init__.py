"""Captures what the user's step does at the block stack: suspends it there, and resumes it with the stack's output."""
