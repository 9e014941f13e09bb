"""Each rank's monitor: a thread that knows which ranks still run, and lets them tell, ask and decide things together.

It needs neither collectives nor rank 0's store, and works while the main threads compute, wait or hang.
"""
