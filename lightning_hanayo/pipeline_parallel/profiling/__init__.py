"""Measures when each action of a batch ran, on all ranks, and computes timelines and costs from that."""
