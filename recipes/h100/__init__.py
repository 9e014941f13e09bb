"""Expected step times of Llama models on H100s, on paper: counted calls, products and messages times stated rates."""
