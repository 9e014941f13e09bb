"""How a batch is cut along its samples: its containers, how it is read, the plan, and what is refused."""
