"""Stops all ranks before the same batch when one of them gets a signal, and saves a checkpoint there."""
