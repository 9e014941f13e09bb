"""Runs that torchrun or SLURM start anew after a failure go on from the newest checkpoint that they have saved."""
