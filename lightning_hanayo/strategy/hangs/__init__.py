"""What happens when nothing moves: a report of who waits for whom, and an end where none can ever go on."""
