"""The state of ranks in a run in which nothing moves. Standard library only."""
