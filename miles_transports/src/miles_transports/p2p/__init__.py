"""Transport `p2p`: every trainer rank writes into the memory of its own engines, all at once."""
