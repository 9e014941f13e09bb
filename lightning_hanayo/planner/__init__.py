"""The planner: decides which configuration runs. No torch."""
