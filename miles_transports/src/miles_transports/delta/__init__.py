"""Disk-delta: publish the bytes of a checkpoint that changed, and patch local copies with them."""
