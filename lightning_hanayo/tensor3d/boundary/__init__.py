"""How tensors enter and leave the block stack, where they change between the user's layout and the 3-D one."""
