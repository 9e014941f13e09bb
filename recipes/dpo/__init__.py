"""Direct preference optimization of a GPT: adapters learn which of two answers is better."""
