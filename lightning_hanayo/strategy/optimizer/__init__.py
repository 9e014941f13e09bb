"""The values that an optimizer updates: rows of parameters, and fp32 copies of them."""
