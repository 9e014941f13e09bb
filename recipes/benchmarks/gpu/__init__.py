"""Benchmarks on one GPU: steps of a Llama and a GPT, the host's work, memory, and products while other kernels spin."""
