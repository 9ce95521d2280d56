"""The session owns token ids; agents see messages."""
