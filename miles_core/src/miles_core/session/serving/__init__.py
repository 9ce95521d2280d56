"""Sessions over HTTP: the protocols that agents speak, in front of the same sessions that environments use."""
