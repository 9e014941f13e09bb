"""The runtime: runs the actions of a schedule on a rank's stages. It needs torch, and no Lightning."""
