"""A drill: a training whose processes are killed at random, and which ends as if nothing had happened."""
