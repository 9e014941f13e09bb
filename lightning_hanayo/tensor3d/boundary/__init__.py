"""What happens at the two ends of the block stack: resharding of activations, and parameters outside of 3-D layers."""
