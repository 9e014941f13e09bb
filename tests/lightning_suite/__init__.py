"""Runs Lightning's own tests, of a checkout that the caller gives, with another strategy in place of the CPU's."""
