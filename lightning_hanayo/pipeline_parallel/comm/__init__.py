"""Messages between ranks: objects, and tensors that all ranks of a group hold."""
