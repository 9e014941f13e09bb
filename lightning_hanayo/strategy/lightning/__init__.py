"""Everything that depends on Lightning's private attributes."""
