"""One Protocol per kind of capability, in the file of the kind's name."""
