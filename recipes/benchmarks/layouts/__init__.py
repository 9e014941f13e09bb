"""Runs many layouts of one model on a cluster of emulated hosts, and compares their steps with the planner's."""
