"""The commands of ``prism``: one file each, and what they share."""
