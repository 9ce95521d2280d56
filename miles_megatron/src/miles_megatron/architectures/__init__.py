"""Tables of the architectures that come with the backend."""
