"""Pages in a real browser: headless Chromium, where it is installed."""
