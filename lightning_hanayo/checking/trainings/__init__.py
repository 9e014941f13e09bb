"""The trainings that a check compares: one process (`reference.py`) and the layout (`layout.py`), and their parts."""
