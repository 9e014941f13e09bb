"""The runtime: plays action lists over stages and transports. It needs torch and no Lightning."""
