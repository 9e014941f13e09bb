"""The user's code on several ranks: its collectives, what its steps collect, and what other ranks get of it."""
