"""A GPT trained by Ray Train, where there is no SLURM."""
