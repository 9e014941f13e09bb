"""What ranks do in a run in which nothing moves, and who holds up whom. Standard library only."""
