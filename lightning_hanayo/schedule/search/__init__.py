"""Searches for a fast order of actions under given costs and an activation budget."""
