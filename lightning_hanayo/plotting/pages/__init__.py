"""Interactive pages in one file each, which load nothing from the network: timelines, and the layouts of a plan."""
