"""Writes checkpoints: the commit protocol of folders, saving in the background, the one plain file, and removal."""
