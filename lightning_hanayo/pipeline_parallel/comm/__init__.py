"""Messages between pipeline ranks: what travels, how it is packed, and over which transport."""
