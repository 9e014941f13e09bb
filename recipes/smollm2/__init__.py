"""SmolLM2-135M, the Llama of transformers, fine-tuned whole or with LoRA."""
