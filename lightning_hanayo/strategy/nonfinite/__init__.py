"""Keeps NaN and infinite gradients away from the weights, and says where they were first made."""
