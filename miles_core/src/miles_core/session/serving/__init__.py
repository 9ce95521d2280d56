"""Sessions over HTTP: the wire protocols agents speak, in front of the same sessions that environments use."""
