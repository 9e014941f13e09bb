"""Measures when each action of a batch ran, on all ranks, and what follows from that."""
